package integration

import (
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

const columns = 120

// TestColumns checks that a line of Go or Markdown has at most 120 columns. Exceptions are Markdown's tables and fenced
// blocks, URLs, long string literals and directives.
func TestColumns(t *testing.T) {
	t.Parallel()
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && path != ".." && (name == "testdata" || name == "bin" || name[0] == '.') {
			return filepath.SkipDir
		}
		long := longInGo
		if ext := filepath.Ext(path); ext == ".md" {
			long = longInMarkdown
		} else if ext != ".go" || strings.HasSuffix(path, ".pb.go") { // protoc writes these files
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, line := range long(string(text)) {
			t.Errorf("%s:%d is longer than %d columns", strings.TrimPrefix(path, "../"), line, columns)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

var url = regexp.MustCompile(`\w+://\S+`)

func tooLong(line string) bool {
	return utf8.RuneCountInString(line) > columns && utf8.RuneCountInString(url.ReplaceAllString(line, "")) > columns
}

// longInMarkdown returns the line numbers of text with too many columns.
func longInMarkdown(text string) (lines []int) {
	fenced := false
	for i, line := range strings.Split(text, "\n") {
		start := strings.TrimLeft(line, " ")
		if strings.HasPrefix(start, "```") {
			fenced = !fenced
		}
		if !fenced && !strings.HasPrefix(start, "|") && tooLong(line) {
			lines = append(lines, i+1)
		}
	}
	return lines
}

// longInGo returns the line numbers of a Go file with too many columns. Exceptions are tables in package comments, raw
// strings of several lines, literals of at least 70 bytes, and lines with only punctuation beside a literal.
func longInGo(text string) (lines []int) {
	excepted := map[int]bool{}
	source := strings.Split(text, "\n")
	file := token.NewFileSet().AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, []byte(text), nil, 0)
	for {
		pos, tok, literal := s.Scan()
		if tok == token.EOF {
			break
		}
		if tok != token.STRING {
			continue
		}
		first := file.Line(pos)
		breaks := strings.Count(literal, "\n")
		alone := strings.Trim(strings.Replace(source[first-1], literal, "", 1), " \t,+(){}") == ""
		if breaks > 0 || len(literal) >= 70 || alone {
			for i := range breaks + 1 {
				excepted[first+i] = true
			}
		}
	}
	for i, line := range source {
		if !excepted[i+1] && !strings.HasPrefix(line, "//go:") && !strings.HasPrefix(line, "//\t") && tooLong(line) {
			lines = append(lines, i+1)
		}
	}
	return lines
}
