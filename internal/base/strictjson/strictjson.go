// Package strictjson decodes JSON like [encoding/json], with two differences: names of fields are case-sensitive, and
// an object with a duplicate field or key is an error.
//
// encoding/json accepts the key MODEL for the field model, and the last of two equal keys. Another reader of the same
// bytes, such as an engine or a proxy, reads them differently. So a check and the service could read a request
// differently.
//
// The package does not check the content of types that decode themselves ([json.Unmarshaler]), [json.RawMessage] and
// interfaces. All functions are safe for concurrent use.
package strictjson

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
)

// Unmarshal decodes data into to. It ignores unknown fields.
func Unmarshal(data []byte, to any) error { return unmarshal(data, to, &walker{}) }

// UnmarshalKnown is Unmarshal, but an unknown field is an [UnknownField] error.
func UnmarshalKnown(data []byte, to any) error { return unmarshal(data, to, &walker{known: true}) }

// UnmarshalNoting is Unmarshal, and returns the names of unknown fields: each name once, in the order of the data, at
// most maxNoted.
func UnmarshalNoting(data []byte, to any) (unknown []string, err error) {
	w := walker{note: true}
	err = unmarshal(data, to, &w)
	return w.noted, err
}

// maxNoted limits the names that UnmarshalNoting returns.
const maxNoted = 32

// UnknownField is the error for an unknown field.
type UnknownField string

func (f UnknownField) Error() string { return fmt.Sprintf("there is no field %q", string(f)) }

// ErrTwice means that an object has a duplicate name. Errors wrap it.
var ErrTwice = errors.New("is given twice")

func unmarshal(data []byte, to any, w *walker) error {
	if t := reflect.TypeOf(to); t != nil {
		w.data = data
		w.value(t)
		if w.err != nil && json.Valid(data) { // otherwise json.Unmarshal returns the error
			return w.err
		}
		data = w.data
	}
	return json.Unmarshal(data, to)
}

// shape has the parts of a type that the walk needs.
type shape struct {
	kind   kind
	fields map[string]reflect.Type // of a struct, by name
	folded map[string]bool         // the names in the form that encoding/json compares
	of     reflect.Type            // type of the elements
}

type kind int

const (
	opaque kind = iota
	object
	list
	mapping
)

var shapes sync.Map // reflect.Type → *shape

var (
	decodes     = reflect.TypeFor[json.Unmarshaler]()
	decodesText = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// shapeOf returns the shape of a type.
func shapeOf(t reflect.Type) *shape {
	if s, is := shapes.Load(t); is {
		return s.(*shape)
	}
	base := t
	for base.Kind() == reflect.Pointer && !base.Implements(decodes) {
		base = base.Elem()
	}
	s := &shape{}
	own := reflect.PointerTo(base)
	switch {
	case own.Implements(decodes) || base.Implements(decodes) || own.Implements(decodesText):
	case base.Kind() == reflect.Struct:
		s.kind, s.fields, s.folded = object, map[string]reflect.Type{}, map[string]bool{}
		s.add(base)
	case base.Kind() == reflect.Slice || base.Kind() == reflect.Array:
		s.kind, s.of = list, base.Elem()
	case base.Kind() == reflect.Map:
		s.kind, s.of = mapping, base.Elem()
	}
	known, _ := shapes.LoadOrStore(t, s)
	return known.(*shape)
}

// add adds the fields of a struct and of its embedded structs. Own fields hide embedded fields.
func (s *shape) add(t reflect.Type) {
	var embedded []reflect.Type
	for i := range t.NumField() {
		f := t.Field(i)
		tag := f.Tag.Get("json")
		name, _, _ := strings.Cut(tag, ",")
		inner := f.Type
		if inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		switch {
		case tag == "-":
		case f.Anonymous && name == "" && inner.Kind() == reflect.Struct:
			embedded = append(embedded, inner)
		case f.IsExported():
			if name == "" {
				name = f.Name
			}
			if s.fields[name] == nil {
				s.fields[name], s.folded[fold(name)] = f.Type, true
			}
		}
	}
	for _, inner := range embedded {
		s.add(inner)
	}
}

// fold returns a name without letter case. Names that encoding/json considers equal have the same fold.
func fold(name string) string {
	return strings.Map(func(r rune) rune {
		switch r {
		case 'ſ': // in Unicode's simple folding, the long s equals s and the Kelvin sign equals k
			return 's'
		case 'K':
			return 'k'
		}
		if 'A' <= r && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, name)
}

// walker walks over a value along its type. It does not validate: in invalid JSON, it may end anywhere.
type walker struct {
	data  []byte
	at    int
	own   bool // data is a copy
	known bool // an unknown field is an error
	note  bool // names of unknown fields are collected in noted
	noted []string
	depth int
	err   error
}

// maxDepth is the maximum depth of nested values. It is lower than the limit of encoding/json.
const maxDepth = 10_000

// next skips blanks and returns the next byte, or 0 at the end.
func (w *walker) next() byte {
	for w.at < len(w.data) {
		switch c := w.data[w.at]; c {
		case ' ', '\t', '\r', '\n':
			w.at++
		default:
			return c
		}
	}
	return 0
}

// value walks over a value of a type.
func (w *walker) value(t reflect.Type) {
	if w.depth++; w.depth > maxDepth {
		w.err = fmt.Errorf("values are nested more than %d deep", maxDepth)
		return
	}
	defer func() { w.depth-- }()
	s := shapeOf(t)
	switch c := w.next(); {
	case s.kind == list && c == '[':
		w.elements(func() { w.value(s.of) })
	case (s.kind == object || s.kind == mapping) && c == '{':
		w.object(s)
	default:
		w.skip()
	}
}

// elements calls each for the content of brackets or braces.
func (w *walker) elements(each func()) {
	w.at++
	for w.err == nil {
		switch w.next() {
		case ']', '}':
			w.at++
			return
		case ',':
			w.at++
		case 0:
			return
		default:
			before := w.at
			if each(); w.at == before {
				w.at++ // invalid JSON
			}
		}
	}
}

// object walks over an object and rejects duplicate names.
func (w *walker) object(s *shape) {
	var few [16]string
	seen := few[:0]
	var many map[string]bool
	w.elements(func() {
		start := w.at
		name := w.name()
		twice := slices.Contains(seen, name)
		if many != nil {
			twice = many[name]
		}
		if twice {
			w.err = fmt.Errorf("%q %w", name, ErrTwice)
			return
		}
		if seen = append(seen, name); many != nil {
			many[name] = true
		} else if len(seen) == len(few) {
			many = make(map[string]bool, 2*len(few))
			for _, name := range seen {
				many[name] = true
			}
		}
		of := s.of
		if s.kind == object {
			of = s.fields[name]
			switch {
			case of != nil:
			case w.known:
				w.err = UnknownField(name)
				return
			default:
				w.pass(s, name, start)
			}
		}
		if w.next() == ':' {
			w.at++
		}
		if of == nil {
			w.skip()
		} else {
			w.value(of)
		}
	})
}

// pass handles an unknown field. encoding/json must not match it to a field with another letter case.
func (w *walker) pass(s *shape, name string, start int) {
	if w.note && len(w.noted) < maxNoted && !slices.Contains(w.noted, name) {
		w.noted = append(w.noted, name)
	}
	if s.folded[fold(name)] {
		w.blank(start, w.at)
	}
}

// blank overwrites a name with a name of the same length that no field has.
func (w *walker) blank(from, to int) {
	if !w.own {
		w.data, w.own = bytes.Clone(w.data), true
	}
	for i := from + 1; i < to-1; i++ {
		w.data[i] = ' '
	}
}

// name reads a quoted text.
func (w *walker) name() (name string) {
	start := w.at
	w.skip()
	raw := w.data[start:w.at]
	if len(raw) >= 2 && bytes.IndexByte(raw, '\\') < 0 {
		return string(raw[1 : len(raw)-1])
	}
	_ = json.Unmarshal(raw, &name) // an error means invalid JSON
	return name
}

// skip skips any value.
func (w *walker) skip() {
	for depth := 0; ; {
		switch c := w.next(); c {
		case 0:
			return
		case '"':
			w.text()
		case '[', '{':
			depth++
			w.at++
		case ']', '}':
			depth--
			w.at++
		case ',', ':':
			w.at++
		default:
			for w.at < len(w.data) && bytes.IndexByte([]byte(" \t\r\n,:[]{}\""), w.data[w.at]) < 0 {
				w.at++
			}
		}
		if depth <= 0 {
			return
		}
	}
}

// text skips a quoted text.
func (w *walker) text() {
	for w.at++; w.at < len(w.data); {
		end := bytes.IndexByte(w.data[w.at:], '"')
		if end < 0 {
			w.at = len(w.data)
			return
		}
		back := 0
		for back < end && w.data[w.at+end-1-back] == '\\' {
			back++
		}
		if w.at += end + 1; back%2 == 0 {
			return
		}
	}
}
