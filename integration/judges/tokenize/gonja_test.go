//go:build judges

package tokenize

import (
	"bytes"
	"encoding/json"
	"flag"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"

	"github.com/kvatlas/kvatlas/internal/text/jinja"
)

var gonja = flag.Bool("gonja", false, "measure github.com/nikolalohinski/gonja too; needs a download")

// TestGonja measures the reason for internal/text/jinja in place of a library: the number of conversations of
// TestTemplates that gonja renders as Jinja2 does. The results are in docs/measurements/2026-11-templates.md.
func TestGonja(t *testing.T) {
	if !*gonja {
		t.Skip("-gonja measures the library")
	}
	templates := readTemplates(t)
	for _, name := range []string{"qwen2_5", "qwen3", "llama3", "llama3_1", "deepseekv3", "gptoss"} {
		text := templates[name]
		template, err := jinja.Parse(t.Context(), text)
		if err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(*seed, 3))
		var cases []chatCase
		var in bytes.Buffer
		for range 2000 {
			c := chatCase{text, json.RawMessage(conversation(rng))}
			line, err := json.Marshal(c)
			if err != nil {
				t.Fatal(err)
			}
			cases = append(cases, c)
			in.Write(append(line, '\n'))
		}
		c := exec.Command("go", "run", ".")
		c.Dir, c.Stdin, c.Stderr = "gonja", &in, os.Stderr
		out, err := c.Output()
		if err != nil {
			t.Fatal(err)
		}
		d := json.NewDecoder(bytes.NewReader(out))
		// of Jinja2's renderings; where counts gonja's renderings of Jinja2's failures
		rendered, ours, theirs, where := 0, 0, 0, 0
		example := ""
		for i, want := range renderAll(t, cases) {
			var got chatResult
			if err := d.Decode(&got); err != nil {
				t.Fatal(err)
			}
			if want.Text == nil {
				if got.Text != nil {
					where++
				}
				continue
			}
			rendered++
			if text, err := renderOurs(t, template, cases[i].Vars); err == nil && text == *want.Text {
				ours++
			}
			if got.Text != nil && *got.Text == *want.Text {
				theirs++
			} else if example == "" {
				if example = got.Error; got.Text != nil {
					example = *got.Text + "\nnot\n" + *want.Text
				}
			}
		}
		t.Logf("%-12s Jinja2 renders %4d of 2000: equal in internal/text/jinja %4d, in gonja %4d; gonja renders %d where Jinja2 fails; the first difference:\n%.1500s",
			name, rendered, ours, theirs, where, example)
	}
}
