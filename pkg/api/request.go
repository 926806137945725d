package api

import (
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// UnknownFields says what becomes of fields of a request that this version does not know.
type UnknownFields int

// The ways.
const (
	// RefuseUnknown is for clients' requests: a field that is not known is most often one that is misspelt, and the
	// answer would be to another question.
	RefuseUnknown UnknownFields = iota

	// IgnoreUnknown is for what nodes ask each other: one of a newer version may say more than is known here, and asks
	// only what it gets by with if that is not heeded.
	IgnoreUnknown
)

// reader reads requests from a source: it holds the rules that are the same for each form. What is given is taken for
// what it says, or refused by name.
type reader struct {
	source
	unknown UnknownFields

	optional bool   // the body may be null
	what     string // the body, as messages call it
	within   string // the object or list whose value is read; empty: the body
	element  int    // of that list, from 1 on; 0: it is an object
}

// rooms are for the members of bodies.
var rooms = sync.Pool{New: func() any { return new([48]member) }}

// read reads the whole of a body.
func (r *reader) read(contentType string, body []byte, to object) (err error) {
	if r.source, err = openSource(contentType, body); err == nil {
		if r.optional && r.kind() == kindNull {
			r.null()
		} else {
			room := rooms.Get().(*[48]member)
			_, err = r.fields("", to.members(room[:0]))
			clear(room[:])
			rooms.Put(room)
		}
	}
	if err == nil {
		err = r.end()
	}
	return notForm(contentType, err)
}

// name is what a field is called in messages; an empty one is the value itself that is read.
func (r *reader) name(field string) string {
	name := r.within
	if r.element > 0 {
		name += "[" + strconv.Itoa(r.element-1) + "]"
	}
	switch {
	case name == "" && field == "":
		return r.what
	case name == "" || field == "":
		return name + field
	}
	return name + "." + field
}

// isNot is the error of a value that is not what a field wants.
func (r *reader) isNot(field, want string) error {
	if r.kind() == kindNone {
		return r.skip() // which says what is wrong
	}
	return Errorf(CodeMalformed, "%s is %s, not %s", r.name(field), r.shown(), want)
}

// fields reads an object that has the known members, each at most once, and returns how many it has. One that is null
// is as if it were not there.
func (r *reader) fields(field string, known []member) (n int, err error) {
	if r.kind() != kindObject {
		return 0, r.isNot(field, "an object")
	}
	defer r.leave(r.within, r.element)
	if field != "" {
		r.within, r.element = r.name(field), 0
	}
	var seen, null uint64
	err = r.object(func(key []byte) error {
		for i, m := range known {
			if string(key) != m.name {
				continue
			}
			if seen&(1<<i) != 0 {
				return Errorf(CodeMalformed, "%s is given twice", r.name(m.name))
			}
			seen |= 1 << i
			if r.kind() == kindNull {
				null |= 1 << i
				r.null()
				return nil
			}
			return r.into(m.name, m.to)
		}
		if r.unknown == IgnoreUnknown {
			return r.skip()
		}
		return noField(r.name(string(key)), string(key), known)
	})
	return bits.OnesCount64(seen &^ null), err
}

// leave has names be those of an object or list again.
func (r *reader) leave(within string, element int) { r.within, r.element = within, element }

// readList reads a list of at most so many; the names of fields in its elements tell which element they are of.
func readList[T any](r *reader, field string, to *[]T, most int) error {
	if r.kind() != kindList {
		return r.isNot(field, "a list")
	}
	defer r.leave(r.within, r.element)
	r.within = r.name(field)
	*to = []T{}
	return r.list(func(i int) error {
		if i == most {
			return Errorf(CodeTooLarge, "%s has more than %d elements", r.within, most)
		}
		r.element = i + 1
		*to = append(*to, *new(T))
		return r.into("", &(*to)[i])
	})
}

// readMap reads an object whose members may have any names.
func readMap[T any](r *reader, field, want string, to *map[string]T) error {
	if r.kind() != kindObject {
		return r.isNot(field, want)
	}
	*to = map[string]T{}
	return r.object(func(key []byte) error {
		name, v := string(key), new(T)
		if _, twice := (*to)[name]; twice {
			return Errorf(CodeMalformed, "%s.%s is given twice", r.name(field), shorten(name))
		}
		err := r.into(field+"."+shorten(name), v)
		(*to)[name] = *v
		return err
	})
}

func (r *reader) string(field string, to *string) error {
	if k := r.kind(); k != kindText && k != kindBytes {
		return r.isNot(field, "text")
	}
	s, valid, err := r.text()
	if err == nil && !valid {
		return Errorf(CodeMalformed, "%s is not UTF-8: %s", r.name(field), shorten(s))
	}
	*to = s
	return err
}

func (r *reader) bool(field string, to *bool) error {
	if r.kind() != kindTruth {
		return r.isNot(field, "true or false")
	}
	*to = r.truth()
	return nil
}

// uint reads an unsigned number up to a bound.
func (r *reader) uint(field, want string, most uint64) (uint64, error) {
	if r.kind() != kindNumber {
		return 0, r.isNot(field, want)
	}
	shown := r.shown()
	v, is, err := r.whole()
	if err == nil && (is != positive || v > most) {
		return 0, Errorf(CodeMalformed, "%s is %s, not %s", r.name(field), shown, want)
	}
	return v, err
}

func (r *reader) uint32(field string, to *uint32) error {
	v, err := r.uint(field, wantToken, 1<<32-1)
	*to = uint32(v)
	return err
}

// positive is uint32 for a field that is left out where 0 would be meant.
func (r *reader) positive(field string, to *uint32) error {
	err := r.uint32(field, to)
	if err == nil && *to == 0 {
		instead := map[string]string{
			"block_size":    "leave it out to ask whatever the model's block size is",
			"deadline_ms":   "leave it out for as long as the request has",
			"l3_timeout_ms": `leave it out for what the node is set to, or say "l3":"off"`,
			"rank_size":     "a worker has one rank at least",
		}[field]
		return Errorf(CodeMalformed, "%s is 0; %s", r.name(field), instead)
	}
	return err
}

// uint64 reads a number that may come as text in decimal digits, since many programs round numbers above 2^53.
func (r *reader) uint64(field string, to *uint64) error {
	if r.kind() != kindText {
		v, err := r.uint(field, wantSeq, 1<<64-1)
		*to = v
		return err
	}
	shown := r.shown()
	word, _, err := r.text()
	if err != nil {
		return err
	}
	v, is := parseWhole([]byte(word))
	if is != positive {
		return Errorf(CodeMalformed, "%s is %s, not %s", r.name(field), shown, wantSeq)
	}
	*to = v
	return nil
}

// readTokens and readHashes read lists of numbers.
func (r *reader) readTokens(field string, to *Tokens) (err error) {
	if k := r.kind(); k != kindList && k != kindBytes {
		if k == kindNone {
			return r.skip()
		}
		return Errorf(CodeBadTokens, "%s must be an array, each of it %s", r.name(field), wantToken)
	}
	*to, err = r.tokens(r.name(field))
	return err
}

func (r *reader) readHashes(field string, to *Hashes) (err error) {
	if k := r.kind(); k != kindList && k != kindBytes {
		return r.isNot(field, "an array, each of it "+wantHash)
	}
	*to, err = r.hashes(r.name(field))
	return err
}

// meant is what fields of other systems' requests are called here; what begins with a blank is advice in place of a
// name.
var meant = map[string]string{
	"token_ids": "tokens", "prompt_token_ids": "tokens", "input_ids": "tokens", "block_hashes": "hashes",
	"model_name": "model", "lora": "lora_name", "adapter": "lora_name", "salt": "cache_salt",
	"lora_id":   ` an adapter that its engine announces by number is called so: "lora_name":"lora_id:NUMBER"`,
	"instances": "workers", "instance": "workers", "worker": "workers", "worker_ids": "workers",
	"block_mm_infos": " say in media which tokens are of which item, or ask POST /query",
	"prompt":         " only tokens and hashes are counted here: tokenize it first",
	"messages":       " only tokens and hashes are counted here: tokenize them first",
	"text":           "prompt", "input": "prompt",
	"timeout_ms":        " the deadline travels in the header Kv-Deadline-Ms",
	"routing_group":     " a routing group other than default is a model of its own: MODEL:GROUP",
	"additional_salt":   " what is part of the hashes is lora_name and cache_salt",
	"extra_keys":        " what is part of the hashes is lora_name, cache_salt and media",
	"parent_hash":       " hashes are those of the prompt from its first block on",
	"block_hash_parent": " hashes are those of the prompt from its first block on",
}

// noField is the error of a field that is not known.
func noField(name, key string, members []member) error {
	known := make([]string, len(members))
	for i, m := range members {
		known[i] = m.name
	}
	said := ""
	switch other, has := meant[strings.ToLower(key)], ""; {
	case strings.HasPrefix(other, " ") && slices.Contains(known, "tokens"):
		said = ";" + other
	default:
		for _, field := range known {
			near := distance(plain(key), plain(field)) <= min(2, len(field)/3)
			if other == field || plain(key) == plain(field) || near {
				has = field
				break
			}
		}
		switch {
		case has != "":
			said = "; did you mean \"" + has + "\"?"
		case len(known) > 0:
			said = "; there are " + strings.Join(known, ", ")
		default:
			said = ": nothing may be said there"
		}
	}
	return Errorf(CodeMalformed, "there is no field %q%s", shorten(name), said)
}

// plain is a name without what differs between styles.
func plain(name string) string {
	return strings.ToLower(strings.NewReplacer("_", "", "-", "", " ", "").Replace(name))
}

// distance is how many letters must be put in, left out, changed or swapped with the next to make b of a, if that is 2
// or less.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
