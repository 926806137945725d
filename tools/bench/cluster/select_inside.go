package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/choose/selection"
	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/index/node"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// inside measures selections in this process: a node's index, a load table, and the selection service.
func (s *selecting) inside() error {
	conn := s.users.as("inside", natsauth.RoleNode).conn
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
		SnapshotBlocks: 1 << 62, Ready: func() { close(ready) }})
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
	pool := s.pool()
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
		r := s.request()
		_, err := plain.Book(s.ctx, &api.BookRequest{Prompt: r.Prompt(), RequestID: r.RequestID,
			Worker: worker(i % s.Workers), EffectivePrefillTokens: uint64(i % 1000)})
		if err != nil {
			return err
		}
	}
	prices := make([]*price, len(selectPolicies))
	for k := range prices {
		prices[k] = &price{stages: map[string][]Times{}}
	}
	for range s.Rounds {
		for k, policy := range selectPolicies {
			clear(stages)
			if err := s.priceOf(policy, plain, timed, stages, prices[k]); err != nil {
				return err
			}
		}
	}
	s.reportPrices(prices)
	return nil
}

// pool returns the registrations of the workers.
func (s *selecting) pool() *registry.Pool {
	pool := &registry.Pool{Model: model}
	for i := range s.Workers {
		record := &api.WorkerRecord{State: api.WorkerSchedulable}
		record.Role, record.Events = api.RoleAggregated, api.EventsShim
		pool.Ranks = append(pool.Ranks, registry.PoolRank{RankKey: events.RankKey{Instance: worker(i)},
			BlockSize: blockSize, Record: record})
	}
	return pool
}

// reportPrices puts the medians of the policies' rounds into the report.
func (s *selecting) reportPrices(prices []*price) {
	for k, policy := range selectPolicies {
		p := prices[k]
		cost := PolicyCost{Policy: policy, PerSecond: median(p.rates), PerCPU: median(p.perCPU)}
		for _, name := range append(slices.Clone(stageNames), "decision") {
			cost.Stages = append(cost.Stages, Stage{name, medianTimes(p.stages[name])})
		}
		decision := cost.Stages[len(stageNames)]
		cost.DecisionP50, cost.DecisionP99 = decision.P50, decision.P99
		s.report.Policies = append(s.report.Policies, cost)
	}
	first := &s.report.Policies[0]
	s.report.DecisionP99, s.report.Inside, s.report.Stages = first.DecisionP99, first.PerSecond, first.Stages
}

// selectPolicies are measured by turns. The goals are for the first.
var selectPolicies = []string{"kvatlas", "dynamo"}

// stageNames are the stages of a choice, in order.
var stageNames = []string{"hash", "match", "load", "choose", "book"}

// price is the cost of a policy's selections, by round.
type price struct {
	rates  []float64 // decisions per second
	perCPU []float64 // decisions per second of processor time
	stages map[string][]Times
}

// priceOf measures a round of selections: first with timed, in sequence, then two at a time.
func (s *selecting) priceOf(
	policy string, plain, timed *selection.Service, stages map[string][]time.Duration, p *price,
) error {
	list := make([]*api.SelectRequest, s.Decisions)
	for i := range list {
		list[i] = s.request()
		list[i].Policy = policy
	}
	free := func() error {
		for _, r := range list {
			if err := plain.Free(s.ctx, &api.RequestRef{Model: model, RequestID: r.RequestID}); err != nil {
				return err
			}
		}
		return nil
	}
	for _, r := range list {
		if a, err := timed.Select(s.ctx, r); err != nil || !a.Complete {
			return fmt.Errorf("%+v: %w", a, err)
		}
	}
	decision := make([]time.Duration, s.Decisions)
	for i := range decision {
		decision[i] = stages["match"][i] + stages["load"][i] + stages["choose"][i]
	}
	p.stages["decision"] = append(p.stages["decision"], timesOf(decision))
	for _, name := range stageNames {
		p.stages[name] = append(p.stages[name], timesOf(slices.Clone(stages[name])))
	}
	if err := free(); err != nil {
		return err
	}
	before, err := spentBy(os.Getpid())
	if err != nil {
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
	if err := errors.Join(<-halves, <-halves); err != nil {
		return err
	}
	took := time.Since(begun)
	after, err := spentBy(os.Getpid())
	if err != nil {
		return err
	}
	p.rates = append(p.rates, float64(len(list))/took.Seconds())
	p.perCPU = append(p.perCPU, float64(len(list))/(after-before).Seconds())
	return free()
}
