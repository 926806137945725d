package sharedstore

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
)

// masterReply returns the reply of a real master for keys. Keys with an even number exist.
func masterReply(keys []string) string {
	var b strings.Builder
	b.WriteString(`{"success":true,"data":{`)
	for i, key := range keys {
		if i > 0 {
			b.WriteByte(',')
		}
		said := `false,"error":"OBJECT_NOT_FOUND","values":null`
		if i%2 == 0 {
			said = `true,"error":null,"values":[{"size_":100,"buffer_address_":139826519080960,` +
				`"protocol_":"tcp","transport_endpoint_":"127.0.0.1:15406"}]`
		}
		fmt.Fprintf(&b, `"%s":{"ok":%s,"disk_values":null,"local_disk_values":null,"nof_values":null}`, key, said)
	}
	b.WriteString("}}")
	return b.String()
}

func masterKeys(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("%064x__k", i*7919)
	}
	return keys
}

// replies returns valid and invalid replies in many forms.
func replies() []string {
	list := []string{masterReply(nil), masterReply(masterKeys(3)), masterReply([]string{"ü@tp_rank:0", "", "b"}),
		masterReply([]string{"a", "b", "a"}), masterReply([]string{"\xff"}), masterReply([]string{"\\u0061", "a"}),
		" {\n\t\"success\" : true , \"data\" : { \"a\" : { \"ok\" : false , \"x\" : [ ] , \"y\" : { } } } } \r\n"}
	entries := []string{`null`, `{}`, `{"ok":null}`, `{"ok":"yes"}`, `{"ok":1}`, `{"OK":true}`, `{"o\u006b":true}`,
		"{\"o\u212a\":true}", `{"ok":true,"Ok":false}`, `{"ok":true,"ok":false}`, `{"ok":true,"ok":null}`,
		`{"ok":true,"x":00}`, `{"ok":true,"x":01}`, `{"ok":true,"x":105}`, `{"ok":true,"x":1}`, `{"ok":true,"x":}`,
		`{"ok":true,"x":"10"}`, `{"ok":true,"x":10,"y":20}`, `{"ok":true,"x":-1.5e+7}`, `{"ok":true,"x":0}`,
		`{"ok":true,"x":1.}`,
		`{"ok":true,"x":"a\"b"}`, `{"ok":true,"x":"\q"}`, "{\"ok\":true,\"x\":\"\n\"}", `{"ok":true,"x":[1,]}`,
		`{"ok":true,"x":` + strings.Repeat("[", 20) + strings.Repeat("]", 20) + `}`, `{"ok":true,}`, `{"ok":tru}`,
		`{"ok":true,"x":[1 2]}`, `{"ok":true,"x":{"a":1,"b":[{},{"c":null}]}}`, `{"ok":truex}`}
	for _, e := range entries {
		list = append(list, `{"success":true,"data":{"a":`+e+`}}`,
			`{"success":true,"data":{"a":{"ok":true},"a":`+e+`}}`,
			`{"success":true,"data":{"b":{"ok":true,"x":10},"a":`+e+`}}`)
	}
	return append(list, ``, `[]`, `{}`, `{"success":true}`, `{"success":true,"data":null}`, `{"success":true,"data":[]}`,
		`{"success":false,"data":{}}`, `{"success":null,"data":{}}`, `{"data":{},"success":true}`,
		`{"success":true,"success":false,"data":{}}`, `{"success":true,"data":{"a":{"ok":true}},"data":{"b":{"ok":true}}}`,
		`{"Success":true,"data":{}}`, `{"success":true,"data":{}}x`, `{"success":true,"data":{},"more":1}`,
		`{"success":true,"data":{"a":{"ok":true}`)
}

// sameReply compares the scanner with the naive twin, unless the scanner rejects the text.
func sameReply(t *testing.T, text string) (scanned bool) {
	t.Helper()
	got := map[string]bool{}
	if !scanBatchReply(text, func(key string, ok bool) { got[key] = ok }) {
		return false
	}
	if want, err := decodeBatchReply([]byte(text), 1); err != nil || !maps.Equal(got, want) {
		t.Fatalf("%q: %v, the twin reads %v (%v)", text, got, want, err)
	}
	return true
}

// TestReplyAgainstTwin: the scanner reads replies of masters like the twin. The texts also have changed bytes.
func TestReplyAgainstTwin(t *testing.T) {
	for _, n := range []int{1, 16, 100} {
		if !sameReply(t, masterReply(masterKeys(n))) {
			t.Errorf("the scanner rejects a master's reply of %d keys", n)
		}
	}
	rng := rand.New(rand.NewPCG(5, 6))
	for _, text := range replies() {
		sameReply(t, text)
		if len(text) == 0 {
			continue
		}
		for range 2000 {
			b := []byte(text)
			for range 1 + rng.IntN(2) {
				i := rng.IntN(len(b))
				switch rng.IntN(3) {
				case 0:
					b[i] = `{}[]",:\ax0-1. tfn`[rng.IntN(18)]
				case 1:
					b = append(b[:i], b[i+1:]...)
				default:
					b = append(b[:i], append([]byte{`{}[]",:\ax0-1. tfn`[rng.IntN(18)]}, b[i:]...)...)
				}
				if len(b) == 0 {
					break
				}
			}
			sameReply(t, string(b))
		}
	}
}

func FuzzReadBatchReply(f *testing.F) {
	for _, text := range replies() {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) { sameReply(t, text) })
}

// TestChunkAgainstTwin compares a chunk with a naive twin, for replies in any order and form, with repeated keys. It
// also compares the number of unexpected keys.
func TestChunkAgainstTwin(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	m := &Mooncake{cfg: MooncakeConfig{MaxKeys: 1000, MaxURL: 64 << 10, Parallel: 1}}
	for range 500 {
		asked, said := masterKeys(1+rng.IntN(200)), masterKeys(rng.IntN(250))
		for i := range asked {
			j, k := rng.IntN(len(asked)), rng.IntN(len(asked))
			asked[j], asked[k] = asked[k], asked[j]
			if rng.IntN(50) == 0 {
				asked[i] = asked[j]
			}
		}
		text := masterReply(said)
		if rng.IntN(3) == 0 {
			rng.Shuffle(len(said), func(i, j int) { said[i], said[j] = said[j], said[i] })
			text = masterReply(said)
		}
		if rng.IntN(3) == 0 { // the scanner rejects this form
			text = strings.Replace(text, `"data"`, `"more":1.5,"data"`, 1)
		}
		twin, err := decodeBatchReply([]byte(text), 1)
		list, bad := m.chunks(asked)
		if err != nil || bad != nil || len(list) != 1 {
			t.Fatal(err, bad, len(list))
		}
		c := &list[0]
		if c.forget(); readBatchReply([]byte(text), c) != nil {
			t.Fatalf("%q is not read", text)
		}
		for i, at := range c.at {
			want, is := twin[asked[at]]
			if c.said.Get(i) != is || c.there.Get(i) != want {
				t.Fatalf("key %s: answered %v, present %v, want %v, %v", asked[at], c.said.Get(i), c.there.Get(i), is, want)
			}
		}
		for _, key := range asked {
			delete(twin, key)
		}
		if c.unseen != uint64(len(twin)) {
			t.Fatalf("%d unexpected keys, want %d", c.unseen, len(twin))
		}
	}
}

func TestPlainText(t *testing.T) {
	for n := range 20 {
		for at := range n {
			for b := range 256 {
				text := []byte(strings.Repeat("x", n))
				text[at] = byte(b)
				if got, want := plainText(string(text)), b >= ' ' && b < 0x80 && b != '\\'; got != want {
					t.Fatalf("%q: %v", text, got)
				}
			}
		}
	}
}

func BenchmarkReadBatchReply(b *testing.B) {
	keys := masterKeys(740)
	body := []byte(masterReply(keys))
	m := &Mooncake{cfg: MooncakeConfig{MaxKeys: 1000, MaxURL: 64 << 10, Parallel: 1}}
	list, _ := m.chunks(keys)
	for name, read := range map[string]func() error{
		"scan":    func() error { return readBatchReply(body, &list[0]) },
		"reflect": func() error { _, err := decodeBatchReply(body, 740); return err }} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if list[0].forget(); read() != nil {
					b.Fatal("it is not read")
				}
			}
		})
	}
}
