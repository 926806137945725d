package registry

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Pool has the workers of a model, as registered and changed at a moment. Pool is immutable.
type Pool struct {
	Model string
	Ranks []PoolRank // by instance and rank; in any state

	endpoints func() map[string][]api.RankPlace // the ranks by serving address, computed once; nil: at each call
}

// PoolRank is a rank of a pool.
type PoolRank struct {
	events.RankKey
	Partition events.Partition
	BlockSize uint32
	Record    *api.WorkerRecord // shared by the ranks of a worker with equal records

	// Engine is the state of the engine, as reported by the shim.
	Engine      api.EngineState
	EngineSince time.Time
}

// Rank returns a rank of the pool, or nil.
func (p *Pool) Rank(key events.RankKey) *PoolRank {
	at, found := slices.BinarySearchFunc(p.Ranks, key,
		func(r PoolRank, key events.RankKey) int { return r.RankKey.Compare(key) })
	if !found {
		return nil
	}
	return &p.Ranks[at]
}

// Worker returns the ranks of a worker.
func (p *Pool) Worker(instance events.WorkerID) []PoolRank {
	at := func(instance events.WorkerID, past int) int {
		i, _ := slices.BinarySearchFunc(p.Ranks, instance, func(r PoolRank, instance events.WorkerID) int {
			return cmp.Or(cmp.Compare(r.Instance, instance), past)
		})
		return i
	}
	return p.Ranks[at(instance, 1):at(instance, -1)]
}

// At returns the ranks that are registered with any of the serving addresses, and the unknown addresses. The lists are
// not nil.
func (p *Pool) At(endpoints []string) (ranks []api.RankPlace, unknown []string) {
	list := p.endpoints
	if list == nil {
		list = p.byEndpoint
	}
	known := list()
	ranks, unknown = []api.RankPlace{}, []string{}
	for _, e := range endpoints {
		at := known[e]
		if ranks = append(ranks, at...); len(at) == 0 && !slices.Contains(unknown, e) {
			unknown = append(unknown, e)
		}
	}
	return ranks, unknown
}

func (p *Pool) byEndpoint() map[string][]api.RankPlace {
	by := map[string][]api.RankPlace{}
	for i := range p.Ranks {
		if r := &p.Ranks[i]; r.Record.Endpoint != "" {
			by[r.Record.Endpoint] = append(by[r.Record.Endpoint], api.RankPlace{Instance: r.Instance, Rank: r.Rank})
		}
	}
	return by
}

// Pool returns the current workers of a model. A model of a routing group other than default is MODEL:GROUP. The first
// call after a change builds the pool. Later calls cost an atomic load and a map lookup.
func (r *Registry) Pool(model string) *Pool {
	if known := r.pools.Load(); known != nil {
		if p := (*known)[model]; p != nil {
			return p
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pool(model)
}

// Pools returns the pools of all models, by model, as Pool does. The caller must not change the list.
func (r *Registry) Pools() []*Pool {
	if known := r.allPools.Load(); known != nil {
		return *known
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.poolsNow()
}

// poolsNow is Pools. The caller holds r.mu.
func (r *Registry) poolsNow() []*Pool {
	if known := r.allPools.Load(); known != nil {
		return *known
	}
	models := map[string]bool{}
	for _, rank := range r.ranksWhere(func(events.WorkerID, string) bool { return true }) {
		models[r.modelOf(rank.RankKey)] = true
	}
	list := []*Pool{}
	for _, model := range slices.Sorted(maps.Keys(models)) {
		list = append(list, r.pool(model))
	}
	r.allPools.Store(&list)
	return list
}

// keptPool is a pool with the workers that have changed since.
type keptPool struct {
	ranks   []PoolRank
	altered map[events.WorkerID]bool
}

// alter records a possible change of a worker. The caller holds r.mu.
func (r *Registry) alter(instance events.WorkerID) {
	for model, k := range r.kept {
		k.altered[instance] = true
		if len(k.altered) > len(k.ranks)/4+16 { // a full rebuild costs little more
			delete(r.kept, model)
		}
	}
}

// poolRanks returns the ranks of a model: the ranks of the kept pool, with the changed workers replaced. The caller
// holds r.mu.
func (r *Registry) poolRanks(model string) []PoolRank {
	k := r.kept[model]
	if k == nil {
		return r.ranksWhere(func(_ events.WorkerID, m string) bool { return m == model })
	}
	if len(k.altered) == 0 {
		return k.ranks
	}
	news := r.ranksWhere(func(of events.WorkerID, m string) bool { return m == model && k.altered[of] })
	list := make([]PoolRank, 0, len(k.ranks)+len(news))
	for from := 0; from < len(k.ranks); {
		if k.altered[k.ranks[from].Instance] {
			from++
			continue
		}
		to := from + 1
		for to < len(k.ranks) && !k.altered[k.ranks[to].Instance] &&
			(len(news) == 0 || k.ranks[to].Compare(news[0].RankKey) < 0) {
			to++
		}
		for len(news) > 0 && news[0].Compare(k.ranks[from].RankKey) < 0 {
			list, news = append(list, news[0]), news[1:]
		}
		list = append(list, k.ranks[from:to]...)
		from = to
	}
	if list = append(list, news...); len(list) == 0 {
		return nil
	}
	return list
}

// pool builds a pool. The caller holds r.mu.
func (r *Registry) pool(model string) *Pool {
	p := &Pool{Model: model, Ranks: r.poolRanks(model)}
	if len(p.Ranks) == 0 {
		delete(r.kept, model)
		return p // keeps no memory for unknown names
	}
	r.kept[model] = &keptPool{p.Ranks, map[events.WorkerID]bool{}}
	p.endpoints = sync.OnceValue(p.byEndpoint)
	next := map[string]*Pool{model: p}
	if known := r.pools.Load(); known != nil {
		maps.Copy(next, *known)
		next[model] = p
	}
	r.pools.Store(&next)
	return p
}

// Registered returns a registered worker, and whether it is registered.
func (r *Registry) Registered(instance events.WorkerID) (*api.Worker, bool) {
	w := &api.Worker{Instance: instance, Ranks: []api.WorkerRank{}}
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, rank := range r.ranksWhere(func(of events.WorkerID, _ string) bool { return of == instance }) {
		if i == 0 {
			w.Model, w.BlockSize = r.modelOf(rank.RankKey), rank.BlockSize
		}
		w.Ranks = append(w.Ranks, api.WorkerRank{Rank: rank.Rank, WorkerRecord: *rank.Record})
	}
	return w, len(w.Ranks) > 0
}

// Complete returns the model of each rank with a complete registration. A posted worker is complete also while its shim
// starts.
func (r *Registry) Complete() map[events.RankKey]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	models := map[events.RankKey]string{}
	for _, rank := range r.ranksWhere(func(events.WorkerID, string) bool { return true }) {
		if rank.Record.State != api.WorkerIncomplete {
			models[rank.RankKey] = r.modelOf(rank.RankKey)
		}
	}
	for instance, o := range r.operators.known {
		if o.Posted != nil {
			o.declared(instance, models)
		}
	}
	return models
}

// ModelRank is a rank with its model.
type ModelRank struct {
	Model string
	PoolRank
}

// All returns the ranks of all models, by instance and rank.
func (r *Registry) All() []ModelRank {
	r.mu.Lock()
	defer r.mu.Unlock()
	ranks := r.ranksWhere(func(events.WorkerID, string) bool { return true })
	list := make([]ModelRank, len(ranks))
	for i, rank := range ranks {
		list[i] = ModelRank{r.modelOf(rank.RankKey), rank}
	}
	return list
}

// Known returns every rank with a lease or a declaration, with its model.
func (r *Registry) Known() map[events.RankKey]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := map[events.RankKey]string{}
	for instance, o := range r.operators.known {
		o.declared(instance, known)
	}
	for key, w := range r.workers {
		known[key] = w.Record.Model
	}
	return known
}

// declared adds the ranks of a declared worker, with the model.
func (o *Operator) declared(instance events.WorkerID, models map[events.RankKey]string) {
	if o.Declared == nil {
		return
	}
	spec := o.Declared.Worker.With(o.Change)
	for i := range max(spec.RankSize, 1) {
		models[events.RankKey{Instance: instance, Rank: events.Rank(spec.RankStart + i)}] = o.Declared.Model
	}
}

// ranksOf returns the ranks of a worker.
func (r *Registry) ranksOf(instance events.WorkerID) []PoolRank {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ranksWhere(func(of events.WorkerID, _ string) bool { return of == instance })
}

// modelOf returns the model of a rank. The caller holds r.mu.
func (r *Registry) modelOf(key events.RankKey) string {
	if w, leased := r.workers[key]; leased {
		return w.Record.Model
	}
	if o := r.operators.known[key.Instance]; o != nil && o.Declared != nil {
		return o.Declared.Model
	}
	return ""
}

// ranksWhere returns the ranks of matching workers and models, by instance and rank. The caller holds r.mu.
func (r *Registry) ranksWhere(which func(instance events.WorkerID, model string) bool) []PoolRank {
	var list []PoolRank
	leased := map[events.WorkerID]bool{} // workers that are declared too
	for key, w := range r.workers {
		if r.otherSize(&w.Record) != nil {
			continue
		}
		if o := r.operators.known[key.Instance]; o != nil && o.Declared != nil {
			leased[key.Instance] = true
		}
		if which(key.Instance, w.Record.Model) {
			list = append(list, PoolRank{RankKey: key, Partition: w.Partition, BlockSize: w.Record.BlockSize})
		}
	}
	for instance, o := range r.operators.known {
		if o.Declared == nil || leased[instance] || !which(instance, o.Declared.Model) ||
			r.otherSize(&Record{Model: o.Declared.Model, BlockSize: o.Declared.BlockSize}) != nil {
			continue
		}
		p, err := r.cfg.Namespace.PartitionOf(instance)
		if err != nil {
			continue // impossible: the name came from a key
		}
		spec := o.Declared.Worker.With(o.Change)
		for i := range max(spec.RankSize, 1) {
			key := events.RankKey{Instance: instance, Rank: events.Rank(spec.RankStart + i)}
			list = append(list, PoolRank{RankKey: key, Partition: p, BlockSize: o.Declared.BlockSize})
		}
	}
	slices.SortFunc(list, func(a, b PoolRank) int { return a.RankKey.Compare(b.RankKey) })
	for from := 0; from < len(list); {
		to := from + 1
		for to < len(list) && list[to].Instance == list[from].Instance {
			to++
		}
		r.judge(list[from:to])
		from = to
	}
	return list
}

// judge sets the state of each rank of a worker, with the reasons. The caller holds r.mu.
func (r *Registry) judge(ranks []PoolRank) {
	o := r.operators.known[ranks[0].Instance]
	if o == nil {
		o = &Operator{}
	}
	var roles []string
	for i := range ranks {
		w, leased := r.workers[ranks[i].RankKey]
		spec := api.WorkerSpec{}
		switch {
		case leased && w.Record.Worker != nil:
			spec = *w.Record.Worker
		case !leased && o.Declared != nil:
			spec = o.Declared.Worker
		}
		record := &api.WorkerRecord{WorkerSpec: spec.With(o.Change), State: api.WorkerSchedulable}
		if err := dial.CheckServing(record.Endpoint); record.Endpoint != "" && err != nil {
			record.Endpoint = ""
			record.Because(api.WorkerIncomplete, fmt.Sprintf("its serving address is not used: %v", err))
		}
		if err := record.Check(); err != nil { // a later version may have written it
			record.Because(api.WorkerIncomplete, api.AsError(err).Message)
		}
		if record.Role == "" {
			record.Role = api.RoleAggregated
		}
		if !slices.Contains(roles, string(record.Role)) {
			roles = append(roles, string(record.Role))
		}
		if !record.Covers(ranks[i].Rank) {
			record.Because(api.WorkerUnschedulable, fmt.Sprintf("rank %d is not among the %d ranks from %d on",
				ranks[i].Rank, record.RankSize, record.RankStart))
		}
		if leased {
			standing := w.state()
			ranks[i].Engine, ranks[i].EngineSince = standing.Engine, standing.Since
			record.Events = api.EventsShim
			w.judge(record)
		} else if record.Events == "" {
			record.Because(api.WorkerIncomplete, "it has neither an events_endpoint nor events: none")
		}
		if o.Drain != nil {
			why := "an operator has drained it at " + o.Drain.Since.UTC().Format(time.RFC3339)
			if o.Drain.Why != "" {
				why += ": " + o.Drain.Why
			}
			record.Because(api.WorkerDraining, why)
		}
		ranks[i].Record = record
	}
	for i := range ranks {
		if len(roles) > 1 {
			slices.Sort(roles)
			ranks[i].Record.Because(api.WorkerIncomplete, fmt.Sprintf("its ranks are registered with several roles: %s",
				First(roles)))
		}
		if i > 0 && reflect.DeepEqual(ranks[i].Record, ranks[i-1].Record) {
			ranks[i].Record = ranks[i-1].Record
		}
	}
}

// judge adds the reasons against a rank with a lease to a record.
func (w *Worker) judge(record *api.WorkerRecord) {
	switch {
	case w.Record.endedByShim():
		record.Because(api.WorkerUnschedulable, "its shim has ended its lease")
	case w.Record.State != Held:
		record.Because(api.WorkerUnschedulable, "its lease has expired")
	}
	standing := w.state()
	if standing.Engine == api.EngineGone {
		record.Because(api.WorkerUnschedulable, fmt.Sprintf("its engine has ended: %s", standing.Why))
	}
	if standing.Engine == api.EngineAsleep {
		record.Because(api.WorkerUnschedulable, "its engine sleeps: "+standing.Why)
	}
	if standing.Unserved != "" {
		record.Because(api.WorkerUnschedulable, standing.Unserved)
	}
	if !standing.Stopped.IsZero() && standing.Engine != api.EngineGone {
		record.Because(api.WorkerSchedulable, "its shim was stopped at "+standing.Stopped.Format(time.RFC3339)+
			" while its engine ran")
	}
	if standing.Unusable != "" {
		record.Because(api.WorkerIncomplete, standing.Unusable)
	}
	if w.noStore != nil {
		record.Because(api.WorkerSchedulable, fmt.Sprintf("its shared store is not used: %v", w.noStore))
	}
}
