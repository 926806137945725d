package compat

import (
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Field describes a field of a JSON object: the destination and the valid values. A face describes a request as a table
// of Fields.
type Field struct {
	Name string

	// To is the destination: a *[api.Tokens], an *[api.Hashes], or a pointer for [strictjson.Unmarshal]. Or To is a
	// func(value []byte) error that reads the value, including null, and returns the face's own error.
	To any

	// Presence states whether the field may be absent or null.
	Presence Presence

	Want string // a description of valid values for errors
}

// Presence states whether a field may be absent or null.
type Presence int

// The kinds of presence.
const (
	Optional  Presence = iota // absent or null is valid
	Defaulted                 // absent is valid, null is not
	Required                  // absent and null are invalid
)

// Words builds the errors of a face. Only [Object.Read] calls Missing and Null.
type Words struct {
	Missing func(name string) error
	Twice   func(name string) error
	Null    func(f Field) error
	Wrong   func(f Field, value []byte, err error) error // err is the error of the value's reader
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

// ReadFields reads an object field by field, in the order of the body. All fields may be absent. Unknown fields are
// ignored, and names are case-sensitive. An [api.Error] reports invalid JSON.
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

// Object is a JSON object for reading in the order of a table.
type Object map[string]member

// member is a field of an object. value is the first value of a duplicate field.
type member struct {
	value []byte
	twice bool
}

// ReadObject splits an object into members without reading the values. An [api.Error] reports invalid JSON.
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

// Read reads fields in the order of the table. Unknown fields are ignored.
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
