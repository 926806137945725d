package registry

import (
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// MarkWorkers writes into a list of workers the leases of those that have one, and how it stands with their engines.
func (r *Registry) MarkWorkers(list *api.WorkerList) {
	for i := range list.Workers {
		w := &list.Workers[i]
		if known, ok := r.Worker(events.RankKey{Instance: w.Instance, Rank: w.Rank}); ok {
			record := known.Record
			w.Lease = &api.Lease{
				Holder: record.Holder.ID, Host: record.Holder.Host, PID: record.Holder.PID, Since: record.Holder.Since,
				State:   string(record.State),
				L3:      record.L3.String(),
				Renewed: known.Renewed.UTC(), Expires: known.Renewed.Add(record.Lease()).UTC(),
			}
			standing := known.standing()
			w.Engine, w.EngineWhy, w.CatchingUp = standing.Engine, standing.Why, standing.CatchingUp
			if !standing.Since.IsZero() {
				w.EngineSince = &standing.Since
			}
		}
	}
}
