package registry

import (
	"context"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Leased is an indexer whose answers, list of workers and status say how it stands with shims and engines.
type Leased struct {
	api.Indexer
	Registry *Registry
}

// Workers lists the ranks that the log knows, with the leases of those that have one.
func (l Leased) Workers(ctx context.Context, asked api.WorkersRequest) (*api.WorkerList, error) {
	list, err := l.Indexer.Workers(ctx, asked)
	if err != nil {
		return nil, err
	}
	for i := range list.Workers {
		w := &list.Workers[i]
		if known, ok := l.Registry.Worker(events.RankKey{Instance: w.Instance, Rank: w.Rank}); ok {
			r := known.Record
			w.Lease = &api.Lease{
				Holder: r.Holder.ID, Host: r.Holder.Host, PID: r.Holder.PID, Since: r.Holder.Since,
				State:   string(r.State),
				L3:      r.L3.String(),
				Renewed: known.Renewed.UTC(), Expires: known.Renewed.Add(r.Lease()).UTC(),
			}
			standing := known.standing()
			w.Engine, w.EngineWhy, w.CatchingUp = standing.Engine, standing.Why, standing.CatchingUp
			if !standing.Since.IsZero() {
				w.EngineSince = &standing.Since
			}
		}
	}
	return list, nil
}
