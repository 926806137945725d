package api

import (
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// unknownFields selects the treatment of unknown fields in a request.
type unknownFields int

// The treatments.
const (
	// refuseUnknown is for clients' requests: an unknown field is most often misspelt, and the answer would be wrong.
	refuseUnknown unknownFields = iota

	// ignoreUnknown is for requests between nodes: a newer version may send further fields. Such a field must be
	// optional.
	ignoreUnknown
)

// reader decodes requests from a source, with the same rules for each form. Every field has its effect or is refused by
// name.
type reader struct {
	source
	unknown unknownFields

	optional bool   // the body may be null
	what     string // name of the body in messages
	within   string // the object or list around the value; empty: the body
	element  int    // index in the list plus 1; 0: within is an object
}

// rooms are buffers for the members of bodies.
var rooms = sync.Pool{New: func() any { return new([48]member) }}

// read reads a whole body into to.
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
		err = r.checkEnd()
	}
	return notForm(contentType, err)
}

// name returns the full name of a field for messages. An empty field is the value that is read.
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

// isNot returns the error for a value of the wrong kind.
func (r *reader) isNot(field, want string) error {
	if r.kind() == kindNone {
		return r.skip() // returns the error
	}
	return Errorf(CodeMalformed, "%s is %s, not %s", r.name(field), r.shown(), want)
}

// fields reads an object with the known members, each at most once, and returns the number of members. A null member
// counts as absent.
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
		if r.unknown == ignoreUnknown {
			return r.skip()
		}
		return noField(r.name(string(key)), string(key), known)
	})
	return bits.OnesCount64(seen &^ null), err
}

// leave restores the names of an outer object or list.
func (r *reader) leave(within string, element int) { r.within, r.element = within, element }

// readList reads a list of at most most elements. The names of fields in an element contain the index of the element.
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

// readMap reads an object with members of any name.
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

// positive is uint32 for a field that must be omitted in place of 0.
func (r *reader) positive(field string, to *uint32) error {
	err := r.uint32(field, to)
	if err == nil && *to == 0 {
		instead := map[string]string{
			"block_size":    "omit it to skip the comparison with the model's block size",
			"deadline_ms":   "omit it for the deadline of the request",
			"l3_timeout_ms": `omit it for the node's setting, or send "l3":"off"`,
			"rank_size":     "a worker has at least one rank",
		}[field]
		return Errorf(CodeMalformed, "%s is 0; %s", r.name(field), instead)
	}
	return err
}

// uint64 reads a number, or text in decimal digits, since many programs round numbers above 2^53.
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

// fieldHints maps field names of other systems' requests to names here. A value that begins with a blank is advice in
// place of a name.
var fieldHints = map[string]string{
	"token_ids": "tokens", "prompt_token_ids": "tokens", "input_ids": "tokens", "block_hashes": "hashes",
	"model_name": "model", "lora": "lora_name", "adapter": "lora_name", "salt": "cache_salt",
	"lora_id":   ` an adapter with a number in the engine's events has the name "lora_name":"lora_id:NUMBER"`,
	"instances": "workers", "instance": "workers", "worker": "workers", "worker_ids": "workers",
	"block_mm_infos": " media has the tokens of each item; or use POST /query",
	"prompt":         " this operation accepts only tokens and hashes: tokenize the prompt first",
	"messages":       " this operation accepts only tokens and hashes: tokenize the messages first",
	"text":           "prompt", "input": "prompt",
	"timeout_ms":        " the deadline travels in the header Kv-Deadline-Ms",
	"routing_group":     " a routing group other than default is a model of its own: MODEL:GROUP",
	"additional_salt":   " hashes include lora_name and cache_salt",
	"extra_keys":        " hashes include lora_name, cache_salt and media",
	"parent_hash":       " hashes are those of the prompt from its first block on",
	"block_hash_parent": " hashes are those of the prompt from its first block on",
}

// noField returns the error for an unknown field.
func noField(name, key string, members []member) error {
	known := make([]string, len(members))
	for i, m := range members {
		known[i] = m.name
	}
	said := ""
	switch other, has := fieldHints[strings.ToLower(key)], ""; {
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
			said = ": the object has no fields"
		}
	}
	return Errorf(CodeMalformed, "there is no field %q%s", shorten(name), said)
}

// plain returns a name without differences of style.
func plain(name string) string {
	return strings.ToLower(strings.NewReplacer("_", "", "-", "", " ", "").Replace(name))
}

// distance returns the number of letters to insert, delete, change or swap with the next to make b from a. The result
// is exact up to 2.
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
