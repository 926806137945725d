package compat

import (
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Field describes one field of a JSON object: where its value goes, and which values are valid. The fields of a request
// are a table of these for each face.
type Field struct {
	Name string

	// To is a pointer to the value: a *[api.Tokens], an *[api.Hashes], or one that [strictjson.Unmarshal] takes; or a
	// func(value []byte) error that reads the value, null too, and returns the face's own error.
	To any

	// Presence says whether the field may be absent or null.
	Presence Presence

	Want string // a valid value, in the words of an error
}

// Presence says whether a field may be absent or null.
type Presence int

// The kinds of presence.
const (
	Optional  Presence = iota // it may be both
	Defaulted                 // it may be absent
	Required                  // neither
)

// Words make the errors of a face. Missing and Null are for [Object.Read] only.
type Words struct {
	Missing func(name string) error
	Twice   func(name string) error
	Null    func(f Field) error
	Wrong   func(f Field, value []byte, err error) error // err is the error of the reader of the value
}

// set reads the value of the field.
func (f Field) set(value []byte, words *Words) error {
	if read, is := f.To.(func([]byte) error); is {
		return read(value)
	}
	if string(value) == "null" {
		if f.Presence == Optional {
			return nil
		}
		return words.Null(f)
	}
	var err error
	switch to := f.To.(type) {
	case *api.Tokens:
		*to, err = api.ReadTokens(f.Name, value)
	case *api.Hashes:
		*to, err = api.ReadHashes(f.Name, value)
	default:
		err = strictjson.Unmarshal(value, to)
	}
	if err != nil {
		return words.Wrong(f, value, err)
	}
	return nil
}

// ReadFields reads an object field by field, in the order of the body. The fields may be absent. Other fields are
// ignored; so is a known name in another letter case. An error of JSON that is broken is an [api.Error].
func ReadFields(body []byte, words *Words, fields ...Field) error {
	seen := make([]bool, len(fields))
	return api.Members(body, func(name string, value []byte) error {
		i := slices.IndexFunc(fields, func(f Field) bool { return f.Name == name })
		switch {
		case i < 0:
			return nil
		case seen[i]:
			return words.Twice(name)
		}
		seen[i] = true
		return fields[i].set(value, words)
	})
}

// Object is a JSON object whose fields are read in the order of a table.
type Object map[string]member

// member is a field of an object. Of a field that is there twice, value is the first.
type member struct {
	value []byte
	twice bool
}

// ReadObject reads an object without its values. An error of JSON that is broken is an [api.Error].
func ReadObject(body []byte) (Object, error) {
	o := Object{}
	err := api.Members(body, func(name string, value []byte) error {
		if m, twice := o[name]; twice {
			value = m.value
			o[name] = member{value, true}
		} else {
			o[name] = member{value, false}
		}
		return nil
	})
	return o, err
}

// Read reads fields in the order of the table. Other fields are ignored.
func (o Object) Read(words *Words, fields ...Field) error {
	for _, f := range fields {
		m, there := o[f.Name]
		var err error
		switch {
		case !there && f.Presence == Required:
			err = words.Missing(f.Name)
		case !there, f.Presence == Optional && string(m.value) == "null" && !m.twice:
		case m.twice:
			err = words.Twice(f.Name)
		default:
			err = f.set(m.value, words)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
