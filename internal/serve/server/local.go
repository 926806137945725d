package server

import (
	"cmp"
	"context"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// local answers the requests of other nodes on the subjects of this node, from the data of this node. The methods
// Capacity, Sessions, RemovalOrder, HotPrefixes and Tenants serve clients that send a request to a named node: they
// answer for all nodes.
type local struct{ s *Server }

// Find answers a query from this node's index.
func (l local) Find(ctx context.Context, q *api.Query) (*api.Answer, error) {
	if q.Text != nil {
		return nil, api.Errorf(api.CodeMalformed, "requests between nodes contain only tokens or hashes")
	}
	return l.s.addressed(ctx, q, func(ctx context.Context, q *api.Query) (*api.Answer, error) {
		return findRanks(ctx, q, l.s.node.Find)
	})
}

// Workers lists the ranks of this node's partitions.
func (l local) Workers(ctx context.Context, asked api.WorkersRequest) (*api.WorkerList, error) {
	return l.s.node.Workers(ctx, asked)
}

// Status returns the status of this node.
func (l local) Status(ctx context.Context) (*api.Status, error) { return l.s.Status(ctx) }

// StatusOf returns the status of this node, and an error for any other name.
func (l local) StatusOf(ctx context.Context, name string) (*api.Status, error) {
	if err := l.named(name); err != nil {
		return nil, err
	}
	return l.s.Status(ctx)
}

// named returns an error if a request names another node.
func (l local) named(name string) error {
	if name != l.s.ID {
		return api.Errorf(api.CodeUnavailable, "this is node %s, but the request names node %s", l.s.ID, name)
	}
	return nil
}

// Verify returns the checksums of this node's partitions.
func (l local) Verify(ctx context.Context, at []api.PartitionSeq) (*api.Status, error) {
	return l.s.node.Verify(ctx, at)
}

// Snapshot writes the due snapshots of this node.
func (l local) Snapshot(ctx context.Context) (*api.SnapshotList, error) {
	return l.s.node.Snapshot(ctx)
}

// Prefixes returns the prefixes of this node's workers.
func (l local) Prefixes(ctx context.Context, q *api.PrefixesRequest) (*api.PrefixTree, error) {
	named := *q
	named.Node = cmp.Or(q.Node, l.s.ID)
	if err := l.named(named.Node); err != nil {
		return nil, err
	}
	return l.s.Prefixes(ctx, &named)
}

// RemoveWorker removes a worker of shims in this process.
func (l local) RemoveWorker(ctx context.Context, instance events.WorkerID) (*api.Worker, error) {
	if node := l.s.shimsNode(instance); node != l.s.ID {
		return nil, api.Errorf(api.CodeUnknownWorker, "this is node %s, which runs no shim of %s", l.s.ID, instance)
	}
	return l.s.remove(ctx, instance, true)
}

// Funnel sums up the requests that this node has recorded.
func (l local) Funnel(ctx context.Context, r *api.FunnelRequest) (*api.Funnel, error) {
	window, err := r.Window()
	if err != nil {
		return nil, err
	}
	return l.s.funnel.Funnel(ctx, r.Model, window)
}

// Recorded lists the requests that this node has recorded.
func (l local) Recorded(ctx context.Context, q *api.RecordedRequest) (*api.RecordedList, error) {
	return l.s.funnel.Recorded(ctx, q)
}

// Report adds an engine's report to a choice of this node.
func (l local) Report(ctx context.Context, r *api.Report) error {
	known, err := l.s.funnel.Report(ctx, r)
	if err == nil && !known {
		err = unknownReport(r)
	}
	return err
}

// BlockHistory returns this node's records of blocks.
func (l local) BlockHistory(ctx context.Context, q *peerapi.BlockHistoryRequest) (*peerapi.BlockHistory, error) {
	return l.s.BlockHistory(ctx, q)
}

// Capacity returns the hit rates from all nodes' samples.
func (l local) Capacity(ctx context.Context, r *api.CapacityRequest) (*api.Capacity, error) {
	return l.s.Capacity(ctx, r)
}

// CapacitySamples returns this node's sampled references.
func (l local) CapacitySamples(
	ctx context.Context, r *peerapi.CapacitySamplesRequest,
) (*peerapi.CapacitySamples, error) {
	return l.s.CapacitySamples(ctx, r)
}

// Sessions lists all sessions; every node has them.
func (l local) Sessions(ctx context.Context, q *api.SessionsRequest) (*api.SessionList, error) {
	return l.s.Sessions(ctx, q)
}

// EndSession ends a session.
func (l local) EndSession(ctx context.Context, q *api.SessionEnd) (*api.SessionList, error) {
	return l.s.EndSession(ctx, q)
}

// SessionBlocks returns the blocks of a session in this node's index.
func (l local) SessionBlocks(ctx context.Context, q *peerapi.SessionBlocksRequest) (*peerapi.SessionBlocks, error) {
	return l.s.SessionBlocks(ctx, q)
}

// RemovalOrder returns the order in which to remove workers.
func (l local) RemovalOrder(ctx context.Context, q *api.RemovalRequest) (*api.RemovalOrder, error) {
	return l.s.RemovalOrder(ctx, q)
}

// HotPrefixes returns the hot prefixes of all nodes.
func (l local) HotPrefixes(ctx context.Context, r *api.HotRequest) (*api.HotList, error) {
	return l.s.HotPrefixes(ctx, r)
}

// HotPart returns this node's counts of hot prefixes.
func (l local) HotPart(ctx context.Context, r *api.HotRequest) (*peerapi.HotPart, error) {
	return l.s.HotPart(ctx, r)
}

// Warm copies a prefix; this node has the tokens.
func (l local) Warm(ctx context.Context, r *api.WarmRequest) (*api.PrefixCopy, error) {
	return l.s.warmOwn(ctx, r)
}

// Copied records a copy that another node has made.
func (l local) Copied(ctx context.Context, r *peerapi.CopyNote) error { return l.s.Copied(ctx, r) }

// RemovalPart returns this node's part of the order of removal.
func (l local) RemovalPart(ctx context.Context, q *api.RemovalRequest) (*peerapi.RemovalPart, error) {
	return l.s.RemovalPart(ctx, q)
}

// Tenants returns the tenants of all nodes.
func (l local) Tenants(ctx context.Context, q *api.TenantsRequest) (*api.TenantList, error) {
	return l.s.Tenants(ctx, q)
}

// TenantsPart returns the tokens and held blocks of tenants on this node.
func (l local) TenantsPart(ctx context.Context, q *peerapi.TenantsPartRequest) (*peerapi.TenantsPart, error) {
	return l.s.TenantsPart(ctx, q)
}

// TenantCharges returns the tokens that this node has charged to quotas.
func (l local) TenantCharges(ctx context.Context) (*peerapi.TenantCharges, error) {
	return l.s.TenantCharges(ctx)
}

// Scaling returns the requests that wait on this node.
func (l local) Scaling(_ context.Context, q *api.ScalingRequest) (*api.Scaling, error) {
	out := &api.Scaling{Model: q.Model}
	l.s.addQueued(out)
	return out, nil
}
