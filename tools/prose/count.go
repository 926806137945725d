package main

import (
	"cmp"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// kinds are the counted words, with a limit per 1,000 words of text. The greatest figures of etcd-io/raft, pebble,
// rqlite and litestream are 0.5, 0.2, 0, 45 and 2.1.
var kinds = [...]struct {
	name  string
	limit float64
	score int // weight of a word in the order of the worst sentences
	words []string
}{
	{"what", 2.0, 3, []string{"what", "whatever"}},
	{"who", 0.5, 3, []string{"who", "whom", "whose", "whoever", "whomever"}},
	{"nobody", 0.3, 3, []string{"nobody", "somebody", "anybody", "everybody", "someone"}}, // figuresOf adds pairs of words
	{"pronoun", 50.0, 1, []string{"it", "its", "they", "them", "their", "that", "those", "these", "this", "one", "ones",
		"which", "such", "each", "both", "other", "others"}},
	{"person", 4.0, 2, []string{"tell", "tells", "told", "say", "says", "said", "hear", "hears", "heard",
		"ask", "asks", "asked", "know", "knows", "known", "take", "takes", "taken", "learn", "learns", "learned",
		"forget", "forgets", "remember", "remembers", "remembered"}},
}

const nobody = 2 // in kinds

// kindOf maps a counted word in lower case to an index in kinds.
var kindOf = func() map[string]int {
	m := map[string]int{}
	for i, k := range kinds {
		for _, w := range k.words {
			m[w] = i
		}
	}
	return m
}()

const (
	fewest      = 120 // words of the smallest place with a judgement
	longest     = 25  // words of the longest sentence that does not count as long
	inLiteral   = 5   // words of the shortest string literal that counts as text
	inSentence  = 6   // words of the shortest sentence that Worst lists
	scoredWords = 25  // further words of a sentence do not move the sentence up in the list
)

var (
	commentLine  = regexp.MustCompile(`^\s*//\s?(.*)$`)
	hashLine     = regexp.MustCompile(`^\s*#:?\s?(.*)$`)
	hashTrailing = regexp.MustCompile(`\s#\s(.*)$`)
	styleComment = regexp.MustCompile(`(?s)/\*(.*?)\*/`)
	directive    = regexp.MustCompile(`^\s*(//(go:|nolint)|#!)`)
	trailing     = regexp.MustCompile(`\s//\s(.*)$`)
	literal      = regexp.MustCompile(`"((?:[^"\\]|\\.)*)"`)
	rawLiteral   = regexp.MustCompile("`([^`]*)`")
	notProse     = regexp.MustCompile("`[^`]*`" + `|\]\([^)]*\)|<[^>]*>`)
	sentenceEnd  = regexp.MustCompile(`[.;:!?]\s+`)
	skippedFiles = regexp.MustCompile(`\.pb\.go$|(^|/)CHANGELOG\.md$|^docs/reference\.md$|^docs/measurements/`)
)

// Figures are the counts of a place: a package, the tests of a package, or a document.
type Figures struct {
	Words int
	Hits  [len(kinds)]int
	Long  int // sentences of more than 25 words
}

func (f *Figures) add(other *Figures) {
	f.Words += other.Words
	f.Long += other.Long
	for i := range f.Hits {
		f.Hits[i] += other.Hits[i]
	}
}

func (f *Figures) perThousand(n int) float64 { return 1000 * float64(n) / float64(max(f.Words, 1)) }

// Rate returns the number of words of a kind in 1,000 words.
func (f *Figures) Rate(kind int) float64 { return f.perThousand(f.Hits[kind]) }

// excess returns the greatest ratio of a rate to the limit.
func (f *Figures) excess() (greatest float64) {
	for i, k := range kinds {
		greatest = max(greatest, f.Rate(i)/k.limit)
	}
	return greatest
}

// Sentence is a sentence with the position in the source. Line is the first line of the comment.
type Sentence struct {
	File  string
	Line  int
	Text  string
	score float64
}

// Report has the figures of all places, and all sentences of at least six words.
type Report struct {
	Places    map[string]*Figures
	sentences []Sentence
}

// Worst returns the n sentences with the highest share of counted words.
func (r *Report) Worst(n int) []Sentence {
	s := slices.Clone(r.sentences)
	slices.SortStableFunc(s, func(a, b Sentence) int { return cmp.Compare(b.score, a.score) })
	return s[:min(n, len(s))]
}

// judged returns the names of all places with enough words, in alphabetical order.
func (r *Report) judged() (names []string) {
	for name, f := range r.Places {
		if f.Words >= fewest {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Count reads the files with prose below the given paths of the repository at root, by default all files. Count skips
// generated files, test data, the change log and the documents of measurements.
func Count(root string, paths ...string) (*Report, error) {
	r := &Report{Places: map[string]*Figures{}}
	if len(paths) == 0 {
		paths = []string{"."}
	}
	for _, path := range paths {
		err := filepath.WalkDir(filepath.Join(root, path), func(file string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			name, err := filepath.Rel(root, file)
			if err != nil {
				return err
			}
			name = filepath.ToSlash(name)
			if d.IsDir() {
				base := d.Name()
				skipped := strings.HasPrefix(base, ".") ||
					slices.Contains([]string{"testdata", "vendor", "node_modules", "bin"}, base)
				if skipped && name != "." {
					return filepath.SkipDir
				}
				return nil
			}
			if textOf(name) == nil || skippedFiles.MatchString(name) {
				return nil
			}
			text, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			r.count(name, string(text))
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return r, nil
}

// count adds the text of a file to the figures of a place.
func (r *Report) count(name, text string) {
	place := filepath.ToSlash(filepath.Dir(name))
	switch ext := filepath.Ext(name); {
	case ext == ".md":
		place = name
	case ext == ".go" && strings.Contains(text[:min(300, len(text))], "Code generated"):
		return
	case strings.HasSuffix(name, "_test.go"):
		place += " (tests)"
	case ext != ".go":
		place += " (" + strings.TrimPrefix(cmp.Or(ext, ".sh"), ".") + ")"
	}
	f := r.Places[place]
	if f == nil {
		f = &Figures{}
		r.Places[place] = f
	}
	textOf(name)(text, func(line int, piece string) {
		for _, sentence := range sentences(piece) {
			one := figuresOf(sentence)
			score := 0
			for i, k := range kinds {
				score += k.score * one.Hits[i]
			}
			f.add(&one)
			if one.Words >= inSentence {
				weight := float64(score) / float64(one.Words) * float64(min(one.Words, scoredWords))
				r.sentences = append(r.sentences, Sentence{name, line, strings.TrimSpace(sentence), weight})
			}
		}
	})
}

// words returns the number of words in text. A word is a letter with the letters, apostrophes and hyphens after.
func words(text string) (n int) {
	inside := false
	for i := range len(text) {
		switch c := text[i]; {
		case letter(c):
			if !inside {
				n++
			}
			inside = true
		case c != '\'' && c != '-':
			inside = false
		}
	}
	return n
}

func letter(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' }

// figuresOf counts the words of a sentence. A hyphen or an apostrophe divides counted words.
func figuresOf(sentence string) Figures {
	f := Figures{Words: words(sentence)}
	if f.Words > longest {
		f.Long = 1
	}
	start, previous := -1, ""
	for i := range len(sentence) + 1 {
		if i < len(sentence) && (letter(sentence[i]) || sentence[i] == '_' || '0' <= sentence[i] && sentence[i] <= '9') {
			if start < 0 {
				start = i
			}
			continue
		}
		if start < 0 {
			continue
		}
		w := strings.ToLower(sentence[start:i])
		if kind, counted := kindOf[w]; counted {
			f.Hits[kind]++
		}
		if w == "one" && previous == "no" && sentence[start-1] == ' ' {
			f.Hits[nobody]++
		}
		start, previous = -1, w
	}
	return f
}

// sentences divides text after a full stop, semicolon, colon, exclamation mark and question mark before a space.
func sentences(text string) (parts []string) {
	start := 0
	for _, at := range sentenceEnd.FindAllStringIndex(text, -1) {
		parts = append(parts, text[start:at[0]+1])
		start = at[1]
	}
	return append(parts, text[start:])
}

// textOf returns the function that finds the prose of a file; nil: the file has none.
func textOf(name string) func(source string, piece func(line int, text string)) {
	switch ext := filepath.Ext(name); ext {
	case ".go", ".js":
		return func(source string, piece func(line int, text string)) {
			codeText(source, commentLine, trailing, piece)
		}
	case ".md":
		return markdownText
	case ".css":
		return styleText
	case ".py":
		return pythonText
	case ".sh", ".yaml", ".yml", ".toml", ".service", ".conf", ".env", ".tpl":
		return hashText
	default:
		if base := filepath.Base(name); base == "Makefile" || base == "Dockerfile" {
			return hashText
		}
	}
	return nil
}

// hashText calls piece for comments that begin with '#'.
func hashText(source string, piece func(line int, text string)) {
	codeText(source, hashLine, hashTrailing, piece)
}

// pythonText calls piece for comments, docstrings and string literals.
func pythonText(source string, piece func(line int, text string)) {
	line := 1
	for i, part := range strings.Split(source, `"""`) {
		if i%2 == 0 {
			hashText(part, func(at int, text string) { piece(line+at-1, text) })
		} else {
			for _, paragraph := range strings.Split(part, "\n\n") {
				piece(line, strings.Join(strings.Fields(paragraph), " "))
			}
		}
		line += strings.Count(part, "\n")
	}
}

// styleText calls piece for the comments of a style sheet.
func styleText(source string, piece func(line int, text string)) {
	for _, m := range styleComment.FindAllStringSubmatchIndex(source, -1) {
		piece(1+strings.Count(source[:m[0]], "\n"), strings.Join(strings.Fields(source[m[2]:m[3]]), " "))
	}
}

// codeText calls piece for every block of line comments, comment after code, and string literal of at least five
// words. comment and after find a comment in a line of its own, and after code.
func codeText(source string, comment, after *regexp.Regexp, piece func(line int, text string)) {
	var block []string
	first := 0
	endBlock := func() {
		if len(block) > 0 {
			piece(first, strings.Join(block, " "))
		}
		block = block[:0]
	}
	for i, line := range strings.Split(source, "\n") {
		if m := comment.FindStringSubmatch(line); m != nil && !directive.MatchString(line) {
			if len(block) == 0 {
				first = i + 1
			}
			block = append(block, m[1])
			continue
		}
		endBlock()
		if m := after.FindStringSubmatch(line); m != nil && strings.Count(line, `"`)%2 == 0 {
			piece(i+1, m[1])
		}
		for _, form := range []*regexp.Regexp{literal, rawLiteral} {
			for _, m := range form.FindAllStringSubmatch(line, -1) {
				if words(m[1]) >= inLiteral && strings.Contains(m[1], " ") {
					piece(i+1, m[1])
				}
			}
		}
	}
	endBlock()
}

// markdownText calls piece for every line outside code blocks. Code, link targets and tags become a single word.
func markdownText(source string, piece func(line int, text string)) {
	fenced := false
	for i, line := range strings.Split(source, "\n") {
		if strings.HasPrefix(strings.TrimLeft(line, " \t"), "```") {
			fenced = !fenced
		} else if !fenced && !strings.HasPrefix(line, "    ") {
			piece(i+1, notProse.ReplaceAllString(line, " x "))
		}
	}
}
