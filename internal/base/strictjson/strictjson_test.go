package strictjson

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"unicode"
)

type inner struct {
	Rank  int    `json:"rank"`
	Label string `json:"label"`
}

type embedded struct {
	Salt  string `json:"cache_salt"`
	Model string `json:"model"` // hidden by outer
}

// self decodes itself.
type self map[string]int

func (s *self) UnmarshalJSON(data []byte) error { return json.Unmarshal(data, (*map[string]int)(s)) }

type outer struct {
	Model string            `json:"model"`
	Inner inner             `json:"inner"`
	Ptr   *inner            `json:"ptr"`
	List  []*inner          `json:"list"`
	Map   map[string]inner  `json:"map"`
	Texts map[string]string `json:"texts"`
	Raw   json.RawMessage   `json:"raw"`
	Any   any               `json:"any"`
	Self  self              `json:"self"`
	Plain string
	None  string `json:"-"`
	embedded
}

// TestLetterCase: a name with another letter case is unknown, at any depth. The right name counts, with any escapes.
func TestLetterCase(t *testing.T) {
	for text, want := range map[string]outer{
		`{"MODEL":"a"}`:                                             {},
		`{"MODEL":"a","model":"b"}`:                                 {Model: "b"},
		`{"model":"b","Model":"a"}`:                                 {Model: "b"},
		`{"\u006dodel":"b","\u004dodel":"a"}`:                       {Model: "b"},
		`{"inner":{"RANK":1,"label":"x"}}`:                          {Inner: inner{Label: "x"}},
		`{"Inner":{"rank":1}}`:                                      {},
		`{"ptr":{"Rank":1,"rank":2}}`:                               {Ptr: &inner{Rank: 2}},
		`{"ptr":null}`:                                              {},
		`{"list":[{"Rank":1},null,{"rank":2}]}`:                     {List: []*inner{{}, nil, {Rank: 2}}},
		`{"map":{"A":{"Rank":1},"a":{"rank":2}}}`:                   {Map: map[string]inner{"A": {}, "a": {Rank: 2}}},
		`{"texts":{"Model":"x","model":"y"}}`:                       {Texts: map[string]string{"Model": "x", "model": "y"}},
		`{"raw":{"M":1,"m":2,"m":3}}`:                               {Raw: json.RawMessage(`{"M":1,"m":2,"m":3}`)},
		`{"any":{"a":1,"a":2}}`:                                     {Any: map[string]any{"a": 2.0}},
		`{"self":{"a":1,"a":2}}`:                                    {Self: self{"a": 2}},
		`{"Plain":"x","plain":"y","None":"z"}`:                      {Plain: "x"},
		`{"cache_salt":"s","Cache_Salt":"t"}`:                       {embedded: embedded{Salt: "s"}},
		`{"cache_ſalt":"t","caKhe":"u"}`:                            {},
		"{\"cache_\u017falt\":\"t\"}":                               {},
		` {"other" : [ {"model":1} , "]}\"\\" ] , "model" : "a" } `: {Model: "a"},
	} {
		var got outer
		if err := Unmarshal([]byte(text), &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v; want %+v", text, got, err, want)
		}
	}
}

// TestTwice: a duplicate name is an error in every object with a known type.
func TestTwice(t *testing.T) {
	for _, text := range []string{`{"model":"a","model":"b"}`, `{"model":"a","m\u006fdel":"b"}`, `{"x":1,"x":1}`,
		`{"inner":{"rank":1,"rank":1}}`, `{"list":[{},{"label":"","label":""}]}`, `{"map":{"a":{},"a":{}}}`,
		`{"texts":{"a":"","a":""}}`, `{"MODEL":1,"MODEL":2}`} {
		if err := Unmarshal([]byte(text), &outer{}); !errors.Is(err, ErrTwice) {
			t.Errorf("%s: %v", text, err)
		}
	}
	many := make([]string, 100)
	for i := range many {
		many[i] = fmt.Sprintf(`"k%d":""`, i)
	}
	var texts map[string]string
	if err := Unmarshal([]byte("{"+strings.Join(many, ",")+"}"), &texts); err != nil || len(texts) != 100 {
		t.Errorf("%d, %v", len(texts), err)
	}
	for _, i := range []int{0, 14, 15, 16, 99} {
		if err := Unmarshal([]byte("{"+strings.Join(append(many, many[i]), ",")+"}"), &texts); !errors.Is(err, ErrTwice) {
			t.Errorf("%d: %v", i, err)
		}
	}
}

// TestUnknown: UnmarshalKnown names the unknown field.
func TestUnknown(t *testing.T) {
	for text, want := range map[string]string{`{"model":"a"}`: "", `{"MODEL":"a"}`: "MODEL", `{"inner":{"x":1}}`: "x",
		`{"raw":{"x":1}}`: "", `{"map":{"x":{"Rank":1}}}`: "Rank"} {
		err := UnmarshalKnown([]byte(text), &outer{})
		if name, _ := errors.AsType[UnknownField](err); string(name) != want || (err != nil) != (want != "") {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// FuzzUnmarshal compares with encoding/json. A rejected text is rejected there too, or has a duplicate name. A decoded
// value is equal, unless names differ by letter case.
func FuzzUnmarshal(f *testing.F) {
	for _, text := range []string{`{"model":"a","inner":{"rank":1},"list":[{"label":"x"}]}`, `{"MODEL":1}`, `{"a":}`, `[`,
		`{"texts":{"a":"b"}} x`, `{"raw":[{"a":"\\\""}]}`, `"\ud800"`, `{"list":[[[[]]]]}`, "{\"\xff\":1}"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var got, want outer
		err, otherwise := Unmarshal([]byte(text), &got), json.Unmarshal([]byte(text), &want)
		if errors.Is(err, ErrTwice) {
			return
		}
		if err == nil != (otherwise == nil) && !strings.ContainsFunc(text, unicode.IsUpper) &&
			!strings.ContainsAny(text, "ſ\\") {
			t.Errorf("%q: %v, by encoding/json %v", text, err, otherwise)
		}
		if !strings.ContainsFunc(text, unicode.IsUpper) && !strings.ContainsAny(text, "ſ\\") && err == nil &&
			!reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v, by encoding/json %+v", text, got, want)
		}
	})
}

func BenchmarkUnmarshal(b *testing.B) {
	text := []byte(`{"model":"llama","messages":[{"role":"user","content":"` + strings.Repeat("word ", 4000) + `"}],
		"temperature":0.7,"stream":true,"cache_salt":"tenant"}`)
	type request struct {
		Model    string          `json:"model"`
		Messages json.RawMessage `json:"messages"`
		Salt     string          `json:"cache_salt"`
	}
	for name, decode := range map[string]func([]byte, any) error{"strict": Unmarshal, "encoding-json": json.Unmarshal} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				var r request
				if err := decode(text, &r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
