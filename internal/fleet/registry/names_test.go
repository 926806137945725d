package registry

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestUnknownModelsAreNotRemembered: what is asked of models that nobody has takes no memory.
func TestUnknownModelsAreNotRemembered(t *testing.T) {
	r := &Registry{}
	for i := range 100 {
		model := fmt.Sprint("m", i)
		r.Sharing(model)
		r.Partitions(model)
	}
	n := 0
	count := func(_, _ any) bool { n++; return true }
	r.shared.Range(count)
	r.serving.Range(count)
	if n > 0 {
		t.Errorf("%d models are remembered", n)
	}
}

// accepting is an entry of a worker's lease, whose engine accepts further names and has adapters. Without a model the
// lease is deleted.
func (c *claiming) accepting(name, model string, names, adapters []string) jetstream.Entry {
	r := record(name, DefaultLease)
	r.Model, r.Worker = model, &api.WorkerSpec{ServedNames: names, LoRAAdapters: adapters}
	key := must(jetstream.WorkerKey(0, r.Key()))
	if model == "" {
		return c.entry(key, nil)
	}
	return c.entry(key, must(r.encode()))
}

// resolves checks what a name stands for: "MODEL", "MODEL+ADAPTER", or an error with such a text.
func (c *claiming) resolves(name, want string) {
	c.Helper()
	target, err := c.Resolve(name)
	got := target.Model
	if target.LoRA != "" {
		got += "+" + target.LoRA
	}
	if err != nil {
		if got = err.Error(); strings.Contains(got, want) {
			return
		}
	}
	if got != want {
		c.Errorf("%q stands for %q, want %q", name, got, want)
	}
}

// reports checks that a status has a problem or a warning with such a text, or none about names ("").
func (c *claiming) reports(want string) {
	c.Helper()
	s := &api.Status{}
	c.markNames(s)
	if got := strings.Join(append(s.Problems, s.Warnings...), "\n"); (got == "") != (want == "") ||
		!strings.Contains(got, want) {
		c.Errorf("the status reports %q, want %q", got, want)
	}
}

// TestNamesOfModels steps a registry through the names that workers accept: they come, are shared, collide with each
// other and with models, and go with the last worker.
func TestNamesOfModels(t *testing.T) {
	c := newClaiming(t)
	models := map[string]uint32{}
	c.cfg.BlockSize = func(model string) uint32 { return models[model] }
	c.resolves("chat", "chat")
	c.see(c.accepting("w1", "m", []string{"chat", "m"}, []string{"sql"}))
	c.see(c.accepting("w2", "m", []string{"chat"}, nil))
	c.resolves("m", "m")
	c.resolves("chat", "m")
	c.resolves("sql", "m+sql")
	c.resolves("stranger", "stranger")
	c.reports("")
	if got := fmt.Sprint(c.Aliases("m")); got != "[chat]" {
		t.Errorf("aliases of m: %s", got)
	}

	c.see(c.accepting("w2", "m", []string{"chat"}, []string{"late"})) // it was loaded later
	c.resolves("late", "m+late")
	c.see(c.accepting("w2", "m", []string{"chat"}, nil))
	c.resolves("late", "late")

	c.see(c.accepting("w3", "other", []string{"chat"}, []string{"sql"}))
	c.resolves("chat", `model "m" and model "other"`)
	c.resolves("sql", `adapter "sql" of model "m" and adapter "sql" of model "other"`)
	c.reports(`"chat" (model "m" and model "other")`)
	c.see(c.accepting("w3", "", nil, nil))
	c.resolves("chat", "m")

	c.see(c.accepting("w4", "chat", nil, nil)) // a model of that name
	c.resolves("chat", "chat")
	c.reports(`"chat" (worker w1 accepts it for model "m")`)
	c.see(c.accepting("w4", "", nil, nil))
	c.resolves("chat", "m")
	models["chat"] = 16 // it stays registered: its workers may come back
	c.ModelsChanged()
	c.resolves("chat", "chat")
	c.reports("indexer forget")
	delete(models, "chat")
	c.ModelsChanged()

	o, err := json.Marshal(Operator{Version: operatorVersion, Instance: "w2",
		Change: api.WorkerSpec{ServedNames: []string{"by hand"}}})
	if err != nil {
		t.Fatal(err)
	}
	c.see(c.entry(must(jetstream.OperatorKey("w2")), o))
	c.resolves("by hand", "m")
	c.see(c.accepting("w1", "", nil, nil))
	c.resolves("chat", "chat") // w2's own are replaced by the operator's
	c.resolves("sql", "sql")
	c.see(c.accepting("w2", "", nil, nil))
	c.resolves("by hand", "by hand")
}

// TestNamesNeedClaims: with accounts, a shim's names count only if its key permits them; what operators say does not
// need that.
func TestNamesNeedClaims(t *testing.T) {
	c := newClaiming(t)
	c.see(c.claim("good", "m", true), c.claim("evil", "own", true), c.claim("good", "chat", true))
	c.see(c.accepting("good", "m", []string{"chat"}, []string{"sql"}),
		c.accepting("evil", "own", []string{"chat", "m"}, nil))
	c.resolves("chat", `model "m" and model "own"`)
	c.RequireClaims(true)
	c.resolves("chat", "m")
	c.resolves("m", "m")
	c.resolves("sql", "sql")
	c.reports(`"chat" of worker evil, "m" of worker evil, "sql" of worker good`)
	c.see(c.claim("good", "sql", true))
	c.resolves("sql", "m+sql")
	c.see(c.claim("good", "chat", false))
	c.resolves("chat", "chat")
	c.see(c.accepting("good", "", nil, nil)) // the model is nobody's now, and evil must not take its name
	c.resolves("m", "m")
	if len(c.Pool("m").Ranks) > 0 {
		t.Error("a worker is known under a name that it has not claimed")
	}
	c.RequireClaims(false)
	c.resolves("chat", "own")
}
