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

// Pool is who serves a model, as it was registered and changed up to some moment. It does not change; nobody may change
// it. Another one is another moment's.
type Pool struct {
	Model string
	Ranks []PoolRank // by instance and rank; in whichever state

	endpoints func() map[string][]api.RankPlace // the ranks by serving address, made once; nil: each time
}

// PoolRank is one rank of a pool.
type PoolRank struct {
	events.RankKey
	Partition events.Partition
	BlockSize uint32
	Record    *api.WorkerRecord // that ranks of a worker share where it is the same

	// Engine is how it stands with its engine, as far as its shim says.
	Engine      api.EngineState
	EngineSince time.Time
}

// Rank is one rank of the pool; nil if it is not there.
func (p *Pool) Rank(key events.RankKey) *PoolRank {
	at, found := slices.BinarySearchFunc(p.Ranks, key,
		func(r PoolRank, key events.RankKey) int { return r.RankKey.Compare(key) })
	if !found {
		return nil
	}
	return &p.Ranks[at]
}

// Worker is the ranks of one worker.
func (p *Pool) Worker(instance events.WorkerID) []PoolRank {
	at := func(instance events.WorkerID, past int) int {
		i, _ := slices.BinarySearchFunc(p.Ranks, instance, func(r PoolRank, instance events.WorkerID) int {
			return cmp.Or(cmp.Compare(r.Instance, instance), past)
		})
		return i
	}
	return p.Ranks[at(instance, 1):at(instance, -1)]
}

// At lists the ranks that are registered with one of these serving addresses, and the addresses that none is registered
// with. The lists are not nil.
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

// Pool is who serves a model now. A model of a routing group other than default is MODEL:GROUP. The pool is put
// together by the first who asks after a change; who asks later pays an atomic load and a look-up in a map.
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

// Pools are those of all models, by model, kept as Pool keeps one. Nobody may change the list.
func (r *Registry) Pools() []*Pool {
	if known := r.allPools.Load(); known != nil {
		return *known
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.poolsNow()
}

// poolsNow is Pools with r.mu held.
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

// keptPool is a pool that was put together, and the workers of which anything has changed since.
type keptPool struct {
	ranks   []PoolRank
	altered map[events.WorkerID]bool
}

// alter notes that something of a worker may have changed. r.mu is held.
func (r *Registry) alter(instance events.WorkerID) {
	for model, k := range r.kept {
		k.altered[instance] = true
		if len(k.altered) > len(k.ranks)/4+16 { // to look through all is not much more
			delete(r.kept, model)
		}
	}
}

// poolRanks lists the ranks of a model: those that it had, with the workers that have changed put in their place.
// r.mu is held.
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

// pool puts a pool together. r.mu is held.
func (r *Registry) pool(model string) *Pool {
	p := &Pool{Model: model, Ranks: r.poolRanks(model)}
	if len(p.Ranks) == 0 {
		delete(r.kept, model)
		return p // else names that nobody has would be remembered
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

// Registered is one worker as it is registered, and whether it is.
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

// Complete has the model of each rank that is registered and whose registration is complete. One that was posted is,
// also while its shim starts.
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

// ModelRank is a rank and the model that it serves.
type ModelRank struct {
	Model string
	PoolRank
}

// All is who serves any model, by instance and rank.
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

// Known is every rank that has a lease or is declared, with its model.
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

// declared adds the ranks of a worker that is declared, with its model.
func (o *Operator) declared(instance events.WorkerID, models map[events.RankKey]string) {
	if o.Declared == nil {
		return
	}
	spec := o.Declared.Worker.With(o.Change)
	for i := range max(spec.RankSize, 1) {
		models[events.RankKey{Instance: instance, Rank: events.Rank(spec.RankStart + i)}] = o.Declared.Model
	}
}

// ranksOf lists a worker's ranks.
func (r *Registry) ranksOf(instance events.WorkerID) []PoolRank {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ranksWhere(func(of events.WorkerID, _ string) bool { return of == instance })
}

// modelOf is the model that a rank is registered for. r.mu is held.
func (r *Registry) modelOf(key events.RankKey) string {
	if w, leased := r.workers[key]; leased {
		return w.Record.Model
	}
	if o := r.operators.known[key.Instance]; o != nil && o.Declared != nil {
		return o.Declared.Model
	}
	return ""
}

// ranksWhere lists the ranks of workers and models for which which holds, by instance and rank. r.mu is held.
func (r *Registry) ranksWhere(which func(instance events.WorkerID, model string) bool) []PoolRank {
	var list []PoolRank
	leased := map[events.WorkerID]bool{} // of those that are declared too
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
			continue // it cannot be: the name came from a key
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

// judge writes into the ranks of one worker what is said of each, and whether it may be chosen. r.mu is held.
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
		if err := record.Check(); err != nil { // a version that knows more may have written it
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

// judge writes into a record why a rank with a lease may not be chosen.
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
