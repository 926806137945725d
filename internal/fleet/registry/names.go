package registry

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Target is the model of a name in a request. LoRA is the adapter, or empty.
type Target struct{ Model, LoRA string }

// alias is a further name that workers accept for a model.
type alias struct {
	targets   []Target        // targets, ascending; several targets are ambiguous
	worker    events.WorkerID // a worker that accepts the name, for reports
	partition events.Partition
}

// names are the aliases of all models. They are immutable.
type names struct {
	known     map[string]*alias
	of        map[string][]string // model → aliases that are not adapters, ascending
	unclaimed map[string]*alias   // unused names without a claim
}

// Resolve returns the target of a name in a request. The name of a model means the model, also without a worker: an
// alias never replaces a model. An alias of a model or an adapter means its target. Any other name is returned as a
// model. The error is an [api.Error]: the alias has several targets.
//
// Resolve does not block for the name of a model with workers. After a change, the first call with another name
// collects the aliases of all workers.
func (r *Registry) Resolve(name string) (Target, error) {
	own := Target{Model: name}
	if known := r.pools.Load(); known != nil && (*known)[name] != nil {
		return own, nil
	}
	a := r.aliases().known[name]
	if a == nil || r.isModel(name) {
		return own, nil
	}
	if len(a.targets) > 1 {
		return own, api.Errorf(api.CodeConflict, "the name %q is ambiguous: workers accept it for %s; use the name of a "+
			"model, with lora_name for an adapter", name, listTargets(a.targets))
	}
	return a.targets[0], nil
}

// Resolver is [Registry.Resolve] as a function. With nil, a name is its own target.
type Resolver func(name string) (Target, error)

// Resolve returns the target of a name. An adapter in the name overrides the adapter of the request.
func (f Resolver) Resolve(name, lora string) (Target, error) {
	if f == nil {
		return Target{Model: name, LoRA: lora}, nil
	}
	t, err := f(name)
	t.LoRA = cmp.Or(t.LoRA, lora)
	return t, err
}

// Aliases returns the further names of a model for requests, ascending, without adapters. The caller must not change
// the result.
func (r *Registry) Aliases(model string) []string { return r.aliases().of[model] }

// isModel reports whether a name is a model's: a worker is registered for the model, or the model has a block size.
func (r *Registry) isModel(name string) bool {
	return r.cfg.BlockSize(name) != 0 || len(r.Pool(name).Ranks) > 0
}

// aliases returns the aliases of all models. They are collected once after each change.
func (r *Registry) aliases() *names {
	if n := r.names.Load(); n != nil {
		return n
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	n := &names{known: map[string]*alias{}, of: map[string][]string{}, unclaimed: map[string]*alias{}}
	for _, p := range r.poolsNow() {
		for i := range p.Ranks {
			if i == 0 || p.Ranks[i].Record != p.Ranks[i-1].Record || p.Ranks[i].Instance != p.Ranks[i-1].Instance {
				r.collect(n, p.Model, &p.Ranks[i])
			}
		}
	}
	for name, a := range n.known {
		slices.SortFunc(a.targets, func(a, b Target) int {
			return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.LoRA, b.LoRA))
		})
		if t := a.targets[0]; len(a.targets) == 1 && t.LoRA == "" {
			n.of[t.Model] = append(n.of[t.Model], name)
		}
	}
	for _, list := range n.of {
		slices.Sort(list)
	}
	r.names.Store(n)
	return n
}

// collect adds the names in a rank's record. A shim's names count only with a claim, like its model; names by operators
// need no claim. The caller holds r.mu.
func (r *Registry) collect(n *names, model string, rank *PoolRank) {
	o := r.operators.known[rank.Instance]
	if o == nil {
		o = &Operator{}
	}
	_, leased := r.workers[rank.RankKey]
	add := func(name string, t Target, byShim bool) {
		to := n.known
		if byShim && leased && !r.claims.allows(rank.Instance, name) {
			to = n.unclaimed
		}
		a := to[name]
		if a == nil {
			a = &alias{worker: rank.Instance, partition: rank.Partition}
			to[name] = a
		}
		if !slices.Contains(a.targets, t) {
			a.targets = append(a.targets, t)
		}
	}
	for _, name := range rank.Record.ServedNames {
		if name != model {
			add(name, Target{Model: model}, o.Change.ServedNames == nil)
		}
	}
	for _, name := range rank.Record.LoRAAdapters {
		if name != model && name != routing.AnyLoRA {
			add(name, Target{Model: model, LoRA: name}, o.Change.LoRAAdapters == nil)
		}
	}
}

// listTargets formats the targets of an alias.
func listTargets(list []Target) string {
	var texts []string
	for _, t := range list {
		text := fmt.Sprintf("model %q", t.Model)
		if t.LoRA != "" {
			text = fmt.Sprintf("adapter %q of model %q", t.LoRA, t.Model)
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, " and ")
}

// markNames adds the unused names of models to a status.
func (r *Registry) markNames(s *api.Status) {
	n := r.aliases()
	var taken, ambiguous, unclaimed []string
	for _, name := range slices.Sorted(maps.Keys(n.known)) {
		a := n.known[name]
		switch {
		case !r.cfg.Mine(a.partition):
		case r.isModel(name):
			taken = append(taken, fmt.Sprintf("%q (worker %s accepts it for %s)", name, a.worker, listTargets(a.targets)))
		case len(a.targets) > 1:
			ambiguous = append(ambiguous, fmt.Sprintf("%q (%s)", name, listTargets(a.targets)))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(n.unclaimed)) {
		if a := n.unclaimed[name]; r.cfg.Mine(a.partition) {
			unclaimed = append(unclaimed, fmt.Sprintf("%q of worker %s", name, a.worker))
		}
	}
	if len(taken) > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("names that workers accept are not used, since they are models "+
			"themselves: %s; what to do: serve the model under one name, or, if no worker serves the model of that name "+
			"any more: indexer models remove NAME", First(taken)))
	}
	if len(ambiguous) > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("names that workers of several models accept are refused: %s; what "+
			"to do: give the engines of each model names of their own (--served-model-name, names of LoRA adapters)",
			First(ambiguous)))
	}
	if len(unclaimed) > 0 {
		s.Warnings = append(s.Warnings, fmt.Sprintf("names that workers accept are not used, since their NATS keys do not "+
			"permit them: %s; what to do: permit them if the worker may serve them (indexer auth create --shim WORKER "+
			"--model MODEL --model NAME)", First(unclaimed)))
	}
}
