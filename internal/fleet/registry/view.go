package registry

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// MarkWorkers completes a page of the list of workers from the log. MarkWorkers adds the ranks that are only
// registered, and for each rank the lease, the record and the state of the engine.
func (r *Registry) MarkWorkers(list *api.WorkerList, asked api.WorkersRequest) {
	r.addRegistered(list, asked)
	if asked.After == nil {
		list.Expired = r.Expired(time.Now())
	}
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
		lease := known.lease()
		w.Lease = &lease
		standing := known.state()
		w.Engine, w.EngineWhy, w.CatchingUp = standing.Engine, standing.Why, standing.CatchingUp
		if !standing.Since.IsZero() {
			w.EngineSince = &standing.Since
		}
	}
}

// LeaseEnded is the displayed state of a lease that its shim ended.
const LeaseEnded = "ended"

// lease returns the worker's lease for display.
func (w *Worker) lease() api.Lease {
	r := &w.Record
	state, stopped := string(r.State), (*time.Time)(nil)
	switch {
	case r.endedByShim():
		state = LeaseEnded
	case r.State == Held && r.Shim != nil && !r.Shim.Stopped.IsZero():
		stopped = &r.Shim.Stopped
	}
	return api.Lease{
		Holder: r.Holder.ID, Host: r.Holder.Host, PID: r.Holder.PID, Since: r.Holder.Since,
		State: state, Stopped: stopped,
		L3:      r.L3.String(),
		Renewed: w.Renewed.UTC(), Expires: w.Renewed.Add(r.Lease()).UTC(),
	}
}

// addRegistered adds declared or remote ranks that the log lacks to a page of the list.
func (r *Registry) addRegistered(list *api.WorkerList, asked api.WorkersRequest) {
	listed := make(map[api.RankPlace]bool, len(list.Workers))
	for i := range list.Workers {
		listed[list.Workers[i].Place()] = true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	remote := map[events.WorkerID]bool{}
	for key, w := range r.workers {
		remote[key.Instance] = remote[key.Instance] || w.state().Engine == api.EngineRemote
	}
	unannounced := func(instance events.WorkerID, _ string) bool {
		o := r.operators.known[instance]
		return remote[instance] || o != nil && o.Declared != nil
	}
	for _, rank := range r.ranksWhere(unannounced) {
		if remote[rank.Instance] && rank.Engine != api.EngineRemote {
			continue // its shim will announce it soon
		}
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
