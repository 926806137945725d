package registry

import (
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// MarkWorkers completes a part of the list of workers, as the log knows them: the ranks that are only registered come
// into it, and each has its lease, its record, and how it stands with its engine.
func (r *Registry) MarkWorkers(list *api.WorkerList, asked api.WorkersRequest) {
	r.addRegistered(list, asked)
	for i := range list.Workers {
		w := &list.Workers[i]
		key := events.RankKey{Instance: w.Instance, Rank: w.Rank}
		known, leased := r.Worker(key)
		model := w.Model
		if leased {
			model = known.Record.Model
		}
		if rank := r.Pool(model).Rank(key); rank != nil {
			w.Record = rank.Record
		}
		if !leased {
			continue
		}
		record := known.Record
		w.Lease = &api.Lease{
			Holder: record.Holder.ID, Host: record.Holder.Host, PID: record.Holder.PID, Since: record.Holder.Since,
			State:   string(record.State),
			L3:      record.L3.String(),
			Renewed: known.Renewed.UTC(), Expires: known.Renewed.Add(record.Lease()).UTC(),
		}
		standing := known.state()
		w.Engine, w.EngineWhy, w.CatchingUp = standing.Engine, standing.Why, standing.CatchingUp
		if !standing.Since.IsZero() {
			w.EngineSince = &standing.Since
		}
	}
}

// addRegistered puts ranks into a part of a list that were declared, and that the log does not know.
func (r *Registry) addRegistered(list *api.WorkerList, asked api.WorkersRequest) {
	listed := make(map[api.RankPlace]bool, len(list.Workers))
	for i := range list.Workers {
		listed[list.Workers[i].Place()] = true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	declared := func(instance events.WorkerID, _ string) bool {
		o := r.operators.known[instance]
		return o != nil && o.Declared != nil
	}
	for _, rank := range r.ranksWhere(declared) {
		place := api.RankPlace{Instance: rank.Instance, Rank: rank.Rank}
		before := asked.After != nil && place.Compare(*asked.After) <= 0
		behind := list.Next != nil && place.Compare(*list.Next) > 0
		if !before && !behind && !listed[place] {
			list.Workers = append(list.Workers, api.WorkerInfo{Instance: rank.Instance, Rank: rank.Rank,
				Model: r.modelOf(rank.RankKey), BlockSize: rank.BlockSize, Partition: rank.Partition})
		}
	}
	list.Cut(asked)
}
