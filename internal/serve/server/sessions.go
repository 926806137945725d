package server

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/affinity"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// newSessions returns the service of session affinity, or nil if disabled.
func (s *Server) newSessions() *affinity.Service {
	set := s.Routing.SessionAffinity
	if set == nil {
		return nil
	}
	return affinity.New(affinity.ServiceConfig{
		Config: affinity.Config{TTL: set.TTL(), Alive: func(model, request string) (alive bool) {
			s.loads.Read(load.Model{Name: model}, func(t *load.Table) { alive = t.Has(request) })
			return alive
		}},
		Conn: s.Conn, Namespace: s.Namespace, Log: s.log,
	})
}

// bindSession returns the function that binds sessions of a gateway; nil without sessions.
func (s *Server) bindSession() func(model, session string, rank events.RankKey, requestID string) {
	if s.sessions == nil {
		return nil
	}
	return func(model, session string, rank events.RankKey, requestID string) {
		// A failure means that too many sessions are bound. The next request is then routed by load.
		_, _, _ = s.sessions.Bind(affinity.Key{Model: model, Session: session}, rank, requestID,
			func(events.RankKey) bool { return true })
	}
}

// sessionStatus converts the status of sessions for clients; nil without session affinity.
func (s *Server) sessionStatus() *api.SessionStatus {
	if s.sessions == nil {
		return nil
	}
	of := s.sessions.Status()
	return &api.SessionStatus{Sessions: of.Sessions, Hash: fmt.Sprintf("%016x", of.Sum), Made: of.Counts.Made,
		Kept: of.Counts.Kept, Moved: of.Counts.Moved, Refused: of.Counts.Elsewhere, Full: of.Counts.Full,
		Expired: of.Counts.Expired, Prompts: of.Prompts, Continued: of.Counts.Continued, Unclear: of.Counts.Unclear}
}

// shared returns channels that are closed after this node has all nodes' requests and sessions.
func (s *Server) shared() [2]<-chan struct{} {
	ready := [2]<-chan struct{}{s.loads.Ready(), s.loads.Ready()}
	if s.sessions != nil {
		ready[1] = s.sessions.Ready()
	}
	return ready
}

// Sessions lists the sessions with a worker. Every node has the bindings of all nodes.
func (s *Server) Sessions(ctx context.Context, q *api.SessionsRequest) (*api.SessionList, error) {
	if err := s.named(&q.Model); err != nil {
		return nil, err
	}
	return admitted(ctx, s, q, func(ctx context.Context, q *api.SessionsRequest) (*api.SessionList, error) {
		list := s.sessionList(func() []affinity.Bound {
			return s.sessions.Bound(func(k affinity.Key) bool {
				return (q.Model == "" || k.Model == q.Model) && (q.Prompts || q.SessionID != "" || !k.Prompt()) &&
					(q.SessionID == "" || slices.Contains(affinity.KeysOf(k.Model, q.SessionID), k))
			})
		}, int(cmp.Or(q.Limit, api.UsualSessions)))
		if q.SessionID != "" {
			if err := s.addHeld(ctx, q, list); err != nil {
				return nil, err
			}
		}
		return list, nil
	})
}

// addHeld adds the blocks of a session from the indexes of all nodes. One node with a partition counts its blocks.
func (s *Server) addHeld(ctx context.Context, q *api.SessionsRequest, list *api.SessionList) error {
	share, unserved := s.sharePartitions()
	list.Missing = unserved
	parts, missing, err := fromNodes(ctx, s, slices.Sorted(maps.Keys(share)),
		func(ctx context.Context, n oneNode, name string) (*peerapi.SessionBlocks, error) {
			return n.SessionBlocks(ctx,
				&peerapi.SessionBlocksRequest{Model: q.Model, SessionID: q.SessionID, Partitions: share[name]})
		})
	if err != nil {
		return err
	}
	for _, name := range missing {
		list.Missing = append(list.Missing, share[name]...)
	}
	for _, part := range parts {
		list.Held, list.Missing = append(list.Held, part.answer.Held...), append(list.Missing, part.answer.Missing...)
		list.Unknown += part.answer.Unknown
	}
	slices.Sort(list.Missing)
	slices.SortFunc(list.Held, func(a, b api.SessionHolding) int {
		return cmp.Or(strings.Compare(a.Model, b.Model), strings.Compare(string(a.Worker), string(b.Worker)),
			cmp.Compare(a.Rank, b.Rank))
	})
	return nil
}

// SessionBlocks returns the blocks of a session in some partitions of this node's index.
func (s *Server) SessionBlocks(_ context.Context, q *peerapi.SessionBlocksRequest) (*peerapi.SessionBlocks, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	return s.node.SessionBlocks(q), nil
}

// EndSession ends the bindings of a session.
func (s *Server) EndSession(ctx context.Context, q *api.SessionEnd) (*api.SessionList, error) {
	if err := s.named(&q.Model); err != nil {
		return nil, err
	}
	return admitted(ctx, s, q, func(_ context.Context, q *api.SessionEnd) (*api.SessionList, error) {
		return s.sessionList(func() []affinity.Bound {
			keys := affinity.KeysOf(q.Model, q.SessionID)
			if q.Model == "" {
				keys = nil
				for _, b := range s.sessions.Bound(func(k affinity.Key) bool {
					return slices.Contains(affinity.KeysOf(k.Model, q.SessionID), k)
				}) {
					keys = append(keys, b.Key)
				}
			}
			return s.sessions.Unbind(keys...)
		}, api.MaxSessions), nil
	})
}

// sessionList converts sessions for clients, the last used first. It does not call list without session affinity.
func (s *Server) sessionList(list func() []affinity.Bound, limit int) *api.SessionList {
	out := &api.SessionList{Sessions: []api.Session{}, Affinity: s.sessions != nil}
	if !out.Affinity {
		return out
	}
	now := time.Now().UTC()
	of := list()
	slices.SortFunc(of, func(a, b affinity.Bound) int {
		return cmp.Or(cmp.Compare(a.Idle, b.Idle), strings.Compare(a.Key.Model, b.Key.Model),
			strings.Compare(a.Key.Session, b.Key.Session))
	})
	out.Total = len(of)
	for _, b := range of[:min(limit, len(of))] {
		out.Sessions = append(out.Sessions, api.Session{Model: b.Key.Model, ID: b.Key.String(), Worker: b.Rank.Instance,
			Rank: b.Rank.Rank, LastUse: now.Add(-b.Idle), Expires: now.Add(b.Left)})
	}
	return out
}
