package upkeep

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// ForgottenRank is the result for a rank, in the form of the JSON output.
type ForgottenRank struct {
	Instance    events.WorkerID    `json:"instance"`
	Rank        events.Rank        `json:"rank"`
	Was         events.Incarnation `json:"was"`
	LastEvent   events.EventID     `json:"last_event"`
	Closed      bool               `json:"closed_before"`         // nothing was written
	Incarnation events.Incarnation `json:"incarnation,omitempty"` // the new incarnation, which is closed
	Seq         events.StreamSeq   `json:"seq,omitempty"`         // place in the log
}

// Forget records in the log that ranks of a worker hold nothing. The function stops at the first error. A nil rank
// means all ranks in the log. Without force, a running shim of any rank is an error, and nothing changes.
func Forget(ctx context.Context, ns *jetstream.Namespace, worker events.WorkerID, rank *events.Rank, force bool) (
	done []ForgottenRank, err error) {
	var ranks []events.Rank
	if rank != nil {
		ranks = append(ranks, *rank)
	} else if ranks, err = shim.RanksOf(ctx, ns, worker); err != nil {
		return nil, err
	}
	if len(ranks) == 0 {
		return nil, fmt.Errorf("worker %s is unknown", worker)
	}
	if !force {
		if err := unserved(ctx, ns, worker, ranks); err != nil {
			return []ForgottenRank{}, err
		}
	}
	done, err = closeRanks(ctx, ns, worker, ranks, force)
	if err == nil && !force && rank == nil { // with force, a shim may still need its claims
		err = registry.Unclaim(ctx, ns, worker)
	}
	return done, err
}

// unserved returns an error if a shim serves one of the ranks.
func unserved(ctx context.Context, ns *jetstream.Namespace, worker events.WorkerID, ranks []events.Rank) error {
	for _, r := range ranks {
		running, err := control.ShimOf(ctx, ns, events.RankKey{Instance: worker, Rank: r})
		if err != nil {
			return err
		}
		if running != nil {
			return fmt.Errorf("a shim serves %s: %v; stop the shim first, or use --force", running.Key(), running)
		}
	}
	return nil
}

// closeRanks closes ranks in the log, one after the other.
func closeRanks(ctx context.Context, ns *jetstream.Namespace, worker events.WorkerID, ranks []events.Rank,
	force bool) ([]ForgottenRank, error) {
	done := []ForgottenRank{}
	for _, r := range ranks {
		key := events.RankKey{Instance: worker, Rank: r}
		f, err := shim.Forget(ctx, ns, key, force)
		if err != nil {
			return done, fmt.Errorf("clear %s: %w", key, err)
		}
		done = append(done, ForgottenRank{worker, r, f.Was.Incarnation, f.Was.LastID, f.Incarnation == 0, f.Incarnation,
			f.Seq})
	}
	return done, nil
}

// ForgetModel deletes the block size of a model, so that the next worker of the model registers a new one. Without
// force, a listed worker of the model is an error.
func ForgetModel(ctx context.Context, ns *jetstream.Namespace, model string, force bool) (*jetstream.Model, error) {
	if !force {
		if err := unused(ctx, ns, model); err != nil {
			return nil, err
		}
	}
	was, err := ns.ForgetModel(ctx, model)
	if errors.Is(err, jetstream.ErrNotFound) {
		return nil, fmt.Errorf("no worker has registered the model %q", model)
	}
	return &was, err
}

// unused returns an error if an indexer lists a worker of the model, or cannot list all workers.
func unused(ctx context.Context, ns *jetstream.Namespace, model string) error {
	c, err := client.NATS(ns.Conn().NATS(), ns.Name(), client.Options{})
	if err != nil {
		return err
	}
	defer c.Close()
	list, err := c.Workers(ctx)
	if err != nil {
		return fmt.Errorf("the workers of %q are unknown: %w", model, err)
	}
	if !list.Complete {
		return fmt.Errorf("the workers of %q are unknown: partitions %v are not available", model, list.Missing)
	}
	for _, w := range list.Workers {
		if w.Model == model {
			return fmt.Errorf("worker %s/%d serves %q with blocks of %d tokens; stop the worker's shim, then run indexer "+
				"workers clear %s, or use --force", w.Instance, w.Rank, model, w.BlockSize, escape.Operand(string(w.Instance)))
		}
	}
	return nil
}
