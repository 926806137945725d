package registry

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestUnknownModelsUseNoMemory: queries for unknown models use no memory.
func TestUnknownModelsUseNoMemory(t *testing.T) {
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
		t.Errorf("%d models are cached", n)
	}
}

// accepting returns the entry of a worker's lease with further names and adapters. Without a model, the lease is
// deleted.
func (c *claiming) accepting(name, model string, names, adapters []string) jetstream.Entry {
	r := record(name, DefaultLease)
	r.Model, r.Worker = model, &api.WorkerSpec{ServedNames: names, LoRAAdapters: adapters}
	key := must(jetstream.WorkerKey(0, r.Key()))
	if model == "" {
		return c.entry(key, nil)
	}
	return c.entry(key, must(r.encode()))
}

// resolves checks the target of a name: "MODEL", "MODEL+ADAPTER", or an error with the text.
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
		c.Errorf("%q resolves to %q, want %q", name, got, want)
	}
}

// reports checks that a status has a problem or a warning with the text, or none about names ("").
func (c *claiming) reports(want string) {
	c.Helper()
	s := &api.Status{}
	c.markNames(s)
	if got := strings.Join(append(s.Problems, s.Warnings...), "\n"); (got == "") != (want == "") ||
		!strings.Contains(got, want) {
		c.Errorf("the status reports %q, want %q", got, want)
	}
}

// TestNamesOfModels steps a registry through further names of models: new names, shared names, conflicts with names and
// models, and the end of the last worker.
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

	c.see(c.accepting("w2", "m", []string{"chat"}, []string{"late"})) // loaded later
	c.resolves("late", "m+late")
	c.see(c.accepting("w2", "m", []string{"chat"}, nil))
	c.resolves("late", "late")

	c.see(c.accepting("w3", "other", []string{"chat"}, []string{"sql"}))
	c.resolves("chat", `model "m" and model "other"`)
	c.resolves("sql", `adapter "sql" of model "m" and adapter "sql" of model "other"`)
	c.reports(`"chat" (model "m" and model "other")`)
	c.see(c.accepting("w3", "other", nil, []string{"sql"})) // it no longer accepts chat
	c.resolves("chat", "m")
	c.resolves("sql", `adapter "sql" of model "m" and adapter "sql" of model "other"`)
	c.see(c.accepting("w3", "", nil, nil))
	c.resolves("sql", "m+sql")
	c.resolves("chat", "m")
	c.see(c.accepting("w5", "m", nil, []string{"*"})) // it loads any adapter
	c.resolves("*", "*")
	c.see(c.accepting("w5", "", nil, nil))

	c.see(c.accepting("w4", "chat", nil, nil)) // a model with the name
	c.resolves("chat", "chat")
	c.reports(`"chat" (worker w1 accepts it for model "m")`)
	c.see(c.accepting("w4", "", nil, nil))
	c.resolves("chat", "m")
	models["chat"] = 16 // the model stays registered: workers may return
	c.ModelsChanged()
	c.resolves("chat", "chat")
	c.reports("indexer models remove")
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
	c.resolves("chat", "chat") // the operator's names replace w2's
	c.resolves("sql", "sql")
	c.see(c.accepting("w2", "", nil, nil))
	c.resolves("by hand", "by hand")
}

// TestNamesNeedClaims: with accounts, a shim's names count only with the permission of the key. Names by operators need
// no claim.
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
	c.see(c.accepting("good", "", nil, nil)) // the model has no worker now, and evil must not get the name
	c.resolves("m", "m")
	if len(c.Pool("m").Ranks) > 0 {
		t.Error("a worker has a name without a claim")
	}
	c.RequireClaims(false)
	c.resolves("chat", "own")
}
