//go:build judges

package tokenize

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/text/jinja"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// rendered is the time for templates in render_chats.py.
var rendered = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// collection is the wheel with the templates: trl contains unchanged templates of models.
const collection = "trl==1.16.0"

// families lists the templates of the collection with full support.
var families = []string{"qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_5_nothink",
	"qwen3_6",
	"llama3", "llama3_1", "llama3_2", "deepseekv3", "deepseek_r1_distill", "gptoss", "glm4moe", "phi3", "lfm2_v2",
	"nemotron_3_nano"}

// TestTemplates renders random conversations with every template of the collection, in internal/text/jinja and in
// Jinja2.
func TestTemplates(t *testing.T) {
	templates := readTemplates(t)
	for _, name := range families {
		if templates[name] == "" {
			t.Errorf("there is no template %s", name)
		}
	}
	total, unknown := 0, []string(nil)
	for name, text := range templates {
		template, err := jinja.Parse(t.Context(), text)
		must := slices.Contains(families, name)
		if err != nil {
			if unknown = append(unknown, name); must {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		n := 25 * *many
		if must {
			n = 125 * *many
		}
		rng := rand.New(rand.NewPCG(*seed, 3))
		var cases []chatCase
		for range n {
			cases = append(cases, chatCase{text, json.RawMessage(conversation(rng))})
		}
		same, both, refused := 0, 0, 0
		for i, want := range renderAll(t, cases) {
			got, err := renderOurs(t, template, cases[i].Vars)
			switch {
			case err != nil && want.Text == nil:
				both++
			case err != nil:
				if refused++; must {
					t.Errorf("%s: %s: %v; -seed=%d", name, cases[i].Vars, err, *seed)
				}
			case want.Text == nil:
				t.Errorf("%s: %s: %q, and Jinja2 %s", name, cases[i].Vars, got, want.Error)
			case got != *want.Text:
				t.Errorf("%s: %s:\n%q, not\n%q; -seed=%d", name, cases[i].Vars, got, *want.Text, *seed)
			default:
				same++
			}
			if t.Failed() {
				break
			}
		}
		total += same
		t.Logf("%-32s %4d alike, %4d errors in both, %3d refused here", name, same, both, refused)
	}
	slices.Sort(unknown)
	t.Logf("%d equal renderings; unsupported: %s", total, strings.Join(unknown, " "))
}

// TestGoldenTemplates has Jinja2 render internal/text/jinja/testdata/cases.json again.
func TestGoldenTemplates(t *testing.T) {
	data, err := os.ReadFile("../../../internal/text/jinja/testdata/cases.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Vars  json.RawMessage
		Cases []struct{ Template, Text, Error string }
	}
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	var cases []chatCase
	for _, c := range file.Cases {
		cases = append(cases, chatCase{c.Template, file.Vars})
	}
	for i, want := range renderAll(t, cases) {
		if c := file.Cases[i]; want.Text == nil != (c.Error != "") || want.Text != nil && *want.Text != c.Text {
			t.Errorf("%q: %q, and Jinja2 %v %s", c.Template, c.Text, want.Text, want.Error)
		}
	}
}

type chatCase struct {
	Template string          `json:"template"`
	Vars     json.RawMessage `json:"vars"`
}

type chatResult struct {
	Text  *string
	Error string
}

// renderAll renders the cases with Jinja2.
func renderAll(t *testing.T, cases []chatCase) []chatResult {
	t.Helper()
	return answers[chatCase, chatResult](t, cases, pyenv.PythonWith(t, "tokenizers.txt"),
		pyenv.Script(t, "render_chats.py"))
}

// answers runs a program that reads one JSON value per case and writes one result per case, in the same order.
func answers[C, R any](t *testing.T, cases []C, program string, args ...string) []R {
	t.Helper()
	var in bytes.Buffer
	for _, c := range cases {
		line, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		in.Write(append(line, '\n'))
	}
	c := exec.Command(program, args...)
	c.Stdin, c.Stderr = &in, os.Stderr
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(out))
	results := make([]R, len(cases))
	for i := range results {
		if err := d.Decode(&results[i]); err != nil {
			t.Fatal(err)
		}
	}
	return results
}

func renderOurs(t *testing.T, template *jinja.Template, vars []byte) (string, error) {
	t.Helper()
	v, err := jinja.Decode(t.Context(), vars)
	if err != nil {
		t.Fatal(err)
	}
	d := v.(*jinja.Dict)
	of := jinja.Vars{}
	for _, k := range d.Keys() {
		of[k], _ = d.Get(k)
	}
	return template.RenderAt(t.Context(), of, rendered)
}

// readTemplates reads templates by name.
func readTemplates(t *testing.T) map[string]string {
	t.Helper()
	templates := map[string]string{}
	z, err := zip.OpenReader(pyenv.Wheel(t, collection))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	for _, f := range z.File {
		name, is := strings.CutPrefix(f.Name, "trl/chat_templates/")
		// templates for training are trl's own
		if name, is2 := strings.CutSuffix(name, ".jinja"); is && is2 && !strings.HasSuffix(name, "_training") {
			r, err := f.Open()
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			r.Close()
			templates[name] = string(text)
		}
	}
	return templates
}
