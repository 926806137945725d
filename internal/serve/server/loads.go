package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// loadStatus is how the tables of requests under way stand, as clients get it.
func loadStatus(s load.Status) *api.LoadStatus {
	out := &api.LoadStatus{Ready: s.Ready, Peers: s.Peers, Beats: s.Counts.Beats, Healed: s.Counts.Healed,
		Models: []api.ModelDigest{}}
	for _, m := range s.Models {
		out.Models = append(out.Models, api.ModelDigest{
			Model: m.Name, Group: m.Group, Requests: m.Requests, PrefillTokens: m.PrefillTokens, OutputBlocks: m.Outputs,
			Hash: fmt.Sprintf("%016x", m.Hash), Conflicts: m.Counts.Conflicts, Rivals: m.Counts.Rivals,
			Twice: m.Twice, Expired: m.Counts.Expired, Booked: m.Counts.Booked, Freed: m.Counts.Freed,
			Full: m.Counts.Full, Gone: m.Counts.Gone,
		})
	}
	slices.SortFunc(out.Models, func(a, b api.ModelDigest) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Group, b.Group))
	})
	return out
}

// routerRequests converts the counts of other makes' router requests for clients.
func routerRequests(c load.ForeignCounts) *api.RouterRequestCounts {
	return &api.RouterRequestCounts{Requests: c.Requests, Added: c.Added, Prefilled: c.Prefilled, Freed: c.Freed,
		Expired: c.Expired, Own: c.Own, Duplicate: c.Duplicate, Unknown: c.Unknown, Refused: c.Refused}
}

// wantLoads asks the shims of all partitions with workers for the loads of their engines.
func (s *Server) wantLoads() (err error) {
	asked := map[events.Partition]bool{}
	for _, r := range s.registry.All() {
		p, wrong := s.ns.PartitionOf(r.Instance)
		if wrong == nil && !asked[p] {
			asked[p] = true
			err = errors.Join(err, control.WantLoads(s.ns, p))
		}
	}
	return err
}

// waitLoads waits until this node has the other nodes' running requests and sessions, or until ctx ends. Without other
// nodes it returns at once.
func (s *Server) waitLoads(ctx context.Context) {
	if len(s.views.Now().Peers) == 0 {
		s.loads.Alone()
		if s.sessions != nil {
			s.sessions.Alone()
		}
	}
	for _, ready := range s.shared() {
		select {
		case <-ready:
		case <-ctx.Done():
		}
	}
}

// removeGone ends the requests of ranks without a complete registration for the same model and routing group, until ctx
// ends. Every node does the same.
func (s *Server) removeGone(ctx context.Context) {
	known := map[events.RankKey]string{}
	for {
		changed := s.registry.Changed()
		if s.registry.Current() {
			there := s.registry.Complete()
			for key, model := range known {
				if there[key] != model {
					s.loads.RemoveRank(key)
				}
			}
			known = there
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}
