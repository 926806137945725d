package cluster

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/load"
	"github.com/kvatlas/kvatlas/internal/node"
	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/internal/selection"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// inside measures choices in this process: the index of a node, a load table, and the selection that joins them.
func (s *selecting) inside() error {
	conn := s.users.as("inside", jetstream.RoleNode).conn
	ns, err := jetstream.JoinNamespace(s.ctx, conn, jetstream.NamespaceConfig{Name: "inside",
		Partitions: s.o.Partitions})
	if err != nil {
		return err
	}
	if err := ns.EnsureStreams(s.ctx, jetstream.LogConfig{MaxBytes: 64 << 20}); err != nil {
		return err
	}
	bucket, err := ns.EnsureSnapshots(s.ctx, jetstream.BucketConfig{MaxBytes: -1})
	if err != nil {
		return err
	}
	if _, err := s.holding(ns); err != nil {
		return err
	}
	ready := make(chan struct{})
	n := node.New(node.Config{ID: "bench", Namespace: ns, Snapshots: bucket, SnapshotInterval: 1000 * time.Hour,
		SnapshotBlocks: 1 << 62, Hooks: node.Hooks{Ready: func() { close(ready) }}})
	ctx, cancel := context.WithCancel(s.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.Run(ctx)
	}()
	defer func() { cancel(); <-done }()
	select {
	case <-ready:
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
	pool := &registry.Pool{Model: model}
	for i := range s.Workers {
		record := &api.WorkerRecord{State: api.WorkerSchedulable}
		record.Role, record.Events = api.RoleAggregated, api.EventsShim
		pool.Ranks = append(pool.Ranks, registry.PoolRank{RankKey: events.RankKey{Instance: worker(i)},
			BlockSize: blockSize, Record: record})
	}
	loads := load.New(load.Config{Conn: conn, Namespace: "inside"})
	stages := map[string][]time.Duration{}
	cfg := selection.Config{Find: n.Find, Pool: func(string) *registry.Pool { return pool }, Loads: loads,
		Routing: routing.DefaultConfig()}
	plain, err := selection.New(cfg)
	if err != nil {
		return err
	}
	cfg.Stage = func(_ context.Context, stage string, took time.Duration) { stages[stage] = append(stages[stage], took) }
	timed, err := selection.New(cfg)
	if err != nil {
		return err
	}
	for i := range s.UnderWay {
		r := s.ask()
		_, err := plain.Book(s.ctx, &api.BookRequest{Prompt: r.Prompt(), RequestID: r.RequestID,
			Worker: worker(i % s.Workers), EffectivePrefillTokens: uint64(i % 1000)})
		if err != nil {
			return err
		}
	}
	names := []string{"hash", "match", "load", "choose", "book"}
	var p99, rates []float64
	all := map[string][]Times{}
	for range s.Rounds {
		list := make([]*api.SelectRequest, s.Decisions)
		for i := range list {
			list[i] = s.ask()
		}
		free := func() error {
			for _, r := range list {
				if err := plain.Free(s.ctx, &api.RequestRef{Model: model, RequestID: r.RequestID}); err != nil {
					return err
				}
			}
			return nil
		}
		clear(stages)
		for _, r := range list {
			if a, err := timed.Select(s.ctx, r); err != nil || !a.Complete {
				return fmt.Errorf("%+v: %w", a, err)
			}
		}
		decision := make([]time.Duration, s.Decisions)
		for i := range decision {
			decision[i] = stages["match"][i] + stages["load"][i] + stages["choose"][i]
		}
		all["decision"] = append(all["decision"], timesOf(decision))
		p99 = append(p99, timesOf(decision).P99)
		for _, name := range names {
			all[name] = append(all[name], timesOf(slices.Clone(stages[name])))
		}
		if err := free(); err != nil {
			return err
		}
		begun := time.Now()
		halves := make(chan error, 2)
		for half := range 2 {
			go func() {
				for i := half; i < len(list); i += 2 {
					if _, err := plain.Select(s.ctx, list[i]); err != nil {
						halves <- err
						return
					}
				}
				halves <- nil
			}()
		}
		for range 2 {
			if err := <-halves; err != nil {
				return err
			}
		}
		rates = append(rates, float64(len(list))/time.Since(begun).Seconds())
		if err := free(); err != nil {
			return err
		}
	}
	for _, name := range append(names, "decision") {
		s.report.Stages = append(s.report.Stages, Stage{name, medianTimes(all[name])})
	}
	s.report.DecisionP99, s.report.Inside = median(p99), median(rates)
	return nil
}
