package compat

import (
	"errors"
	"testing"
)

// TestFields checks both readers with one table: ReadFields reports the first fault in the order of the body, and
// Object.Read in the order of the table.
func TestFields(t *testing.T) {
	w := Words{
		Missing: func(name string) error { return errors.New("missing " + name) },
		Twice:   func(name string) error { return errors.New("twice " + name) },
		Null:    func(f Field) error { return errors.New("null " + f.Name) },
		Wrong:   func(f Field, _ []byte, _ error) error { return errors.New("wrong " + f.Name) },
	}
	for _, c := range []struct{ body, streamed, tabled string }{
		{`{"a":1,"b":2}`, "", ""},
		{`{"a":1,"A":"x","other":"x"}`, "", ""},
		{`{"a":"x","b":"x"}`, "wrong a", "wrong a"},
		{`{"b":"x","a":"x"}`, "wrong b", "wrong a"},
		{`{"b":2}`, "", "missing a"},
		{`{"a":1,"a":1}`, "twice a", "twice a"},
		{`{"a":null}`, "null a", "null a"},
		{`{"a":1,"b":null}`, "", ""},
		{`{"a":1,"b":null,"b":2}`, "twice b", "twice b"},
	} {
		var a, b int
		list := []Field{{"a", &a, Required, "a number"}, {"b", &b, Optional, "a number"}}
		o, err := ReadObject([]byte(c.body))
		if err != nil {
			t.Fatal(err)
		}
		for _, got := range []struct {
			err  error
			want string
		}{{ReadFields([]byte(c.body), &w, list...), c.streamed}, {o.Read(&w, list...), c.tabled}} {
			if text := errorText(got.err); text != got.want {
				t.Errorf("%s: %q, want %q", c.body, text, got.want)
			}
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
