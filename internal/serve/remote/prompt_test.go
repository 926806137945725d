package remote

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestPrompt reads prompts from flags, and rejects invalid and missing prompts.
func TestPrompt(t *testing.T) {
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "prompt")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	list := api.Value(`[{"role":"user","content":"x"}]`)
	chat := file(`{"model":"other","messages":` + string(list) + `,"prompt":"y"}`)
	image := events.MediaItem{Hash: events.MediaHash("a@b"), Offset: 3, Length: 4}
	for _, c := range []struct {
		args []string
		want api.Query
		err  string
	}{
		{[]string{"--tokens", "1, 2\n[3]"}, api.Query{Tokens: []uint32{1, 2, 3}}, ""},
		{[]string{"--tokens-file", file("[7,8]")}, api.Query{Tokens: []uint32{7, 8}}, ""},
		{[]string{"--hashes", "18446744073709551615"}, api.Query{Hashes: []uint64{1<<64 - 1}}, ""},
		{[]string{"--engine-hashes", "5", "--worker", "a,b"}, api.Query{EngineHashes: []uint64{5},
			Workers: []events.WorkerID{"a", "b"}}, ""},
		{[]string{"--prompt-file", file("hi"), "--return-token-ids"},
			api.Query{Text: &api.Text{Prompt: "hi", ReturnTokenIDs: true}}, ""},
		{[]string{"--messages-file", chat}, api.Query{Text: &api.Text{Messages: list}}, ""},
		{[]string{"--messages-file", file(string(list))}, api.Query{Text: &api.Text{Messages: list}}, ""},
		{[]string{"--tokens", "1", "--media", "a@b@3+4"}, api.Query{Tokens: []uint32{1},
			Media: []events.MediaItem{image}}, ""},
		{[]string{"--tokens", "1,x"}, api.Query{}, `--tokens: number 2 is "x"`},
		{[]string{"--tokens", "4294967296"}, api.Query{}, "--tokens: "},
		{[]string{"--tokens", "1", "--hashes", "2"}, api.Query{}, "give one of"},
		{[]string{"--tokens", "1", "--media", "a@3"}, api.Query{}, "is not ID@OFFSET+LENGTH"},
		{[]string{"--tokens", "1", "--return-token-ids"}, api.Query{}, "--return-token-ids goes with"},
		{[]string{"--messages-file", file(`{}`)}, api.Query{}, "no messages: the file has"},
		{nil, api.Query{}, "give --tokens"},
	} {
		var p Prompt
		var q api.Query
		cmd := &cobra.Command{}
		p.Flags(&q, "").Add(cmd.Flags())
		if err := cmd.Flags().Parse(append(c.args, "--model", "m")); err != nil {
			t.Fatal(err)
		}
		err := p.Read(cmd)
		c.want.Model = "m"
		switch {
		case c.err != "":
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%q: %v, want %q", c.args, err, c.err)
			}
		case err != nil || !equal(q, c.want):
			t.Errorf("%q: %+v, %v, want %+v", c.args, q, err, c.want)
		}
	}
}

// equal compares queries. An empty list and nil are equal.
func equal(a, b api.Query) bool {
	textA, textB := a.Text, b.Text
	a.Text, b.Text = nil, nil
	normal := func(q *api.Query) {
		q.Workers, q.Endpoints = append([]events.WorkerID{}, q.Workers...), append([]string{}, q.Endpoints...)
		q.Media = append([]events.MediaItem{}, q.Media...)
	}
	normal(&a)
	normal(&b)
	return reflect.DeepEqual(a, b) && reflect.DeepEqual(textA, textB)
}
