package server

import (
	"context"

	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// RegisterWorker registers a worker. If the engine publishes events, shims in this process follow the engine.
func (s *Server) RegisterWorker(ctx context.Context, w *api.WorkerRegistration) (*api.Worker, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	if w.EventsEndpoint == "" {
		return answered(s.registry.Declare(ctx, w))
	}
	if uint64(w.RankStart)+uint64(w.RankSize) > events.MaxRanks {
		return nil, api.Errorf(api.CodeMalformed, "ranks %d to %d: a worker with events has ranks 0 to %d", w.RankStart,
			uint64(w.RankStart)+uint64(w.RankSize)-1, events.MaxRanks-1)
	}
	source := w.Source
	if source == "" {
		source = "auto"
	}
	out := &api.Worker{Instance: w.Instance, Model: w.Model, BlockSize: w.BlockSize}
	records := make([]registry.Record, w.RankSize)
	for i := range w.RankSize {
		engine := &registry.Engine{Group: compat.DefaultGroup}
		for _, e := range []struct {
			from string
			to   *string
		}{{w.EventsEndpoint, &engine.Endpoint}, {w.ReplayEndpoint, &engine.Replay}} {
			at, err := zmtp.PortsAfter(e.from, i)
			if err != nil {
				return nil, api.Errorf(api.CodeMalformed, "%v", err)
			}
			*e.to = at
		}
		rank := events.Rank(w.RankStart + i)
		records[i] = registry.Record{Instance: w.Instance, Rank: rank, Model: w.Model, BlockSize: w.BlockSize,
			Source: source, Engine: engine, Worker: &w.WorkerSpec}
		record := api.WorkerRecord{WorkerSpec: w.WorkerSpec}
		record.Events = api.EventsShim
		record.Because(api.WorkerIncomplete, "the shim is about to start")
		out.Ranks = append(out.Ranks, api.WorkerRank{Rank: rank, WorkerRecord: record})
	}
	if err := s.shims.Register(ctx, records...); err != nil {
		return nil, compat.AsError(err)
	}
	return out, nil
}

// ChangeWorker changes the fields of a worker.
func (s *Server) ChangeWorker(ctx context.Context, c *api.WorkerChange) (*api.Worker, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	return answered(s.registry.Change(ctx, c))
}

// RemoveWorker ends the registration of a worker. The node of the worker's shim removes the worker.
func (s *Server) RemoveWorker(ctx context.Context, instance events.WorkerID) (*api.Worker, error) {
	if err := s.admit(); err != nil {
		return nil, err
	}
	node := s.shimsNode(instance)
	if node == "" || node == s.ID {
		return s.remove(ctx, instance, node == s.ID)
	}
	other, err := s.peer(node)
	if err != nil {
		return nil, err
	}
	w, err := other.RemoveWorker(ctx, instance)
	if err != nil && api.AsError(err).Code != api.CodeUnknownWorker {
		return nil, api.Errorf(api.CodeUnavailable, "node %s, which runs the shim of %s: %s", node, instance,
			api.AsError(err).Message)
	}
	return w, err
}

// shimsNode returns the node of a worker's shims, or "" without shims.
func (s *Server) shimsNode(instance events.WorkerID) string {
	for _, l := range s.shims.Listeners() {
		if l.Record.Instance == instance {
			return s.ID
		}
	}
	for _, w := range s.registry.Workers() {
		if w.Record.Instance == instance && w.Record.Engine != nil {
			return w.Record.Engine.Node
		}
	}
	return ""
}

// remove ends the registration of a worker on this node. shims is set if this process runs the worker's shims.
func (s *Server) remove(ctx context.Context, instance events.WorkerID, shims bool) (*api.Worker, error) {
	if !shims {
		return answered(s.registry.Remove(ctx, instance))
	}
	was, _ := s.registry.Registered(instance)
	every := func(registry.Record) bool { return true }
	forget := func(ctx context.Context) error { return s.registry.Forget(ctx, instance) }
	if err := s.shims.Unregister(ctx, instance, every, forget); err != nil {
		return nil, compat.AsError(err)
	}
	for i := range was.Ranks {
		was.Ranks[i].Because(api.WorkerUnschedulable, "it is removed")
	}
	return was, nil
}

// answered converts the result of a registry change for clients.
func answered(w *api.Worker, err error) (*api.Worker, error) {
	if err != nil {
		return nil, compat.AsError(err)
	}
	return w, nil
}
