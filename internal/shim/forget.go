package shim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// ErrUnknown: neither the log nor its snapshot knows the rank. Returned by [Forget].
var ErrUnknown = errors.New("nothing is known of this worker and rank")

// Forgotten says what [Forget] has done.
type Forgotten struct {
	Was Published // what the log said before
	// the one that was begun, and closed; 0 if nothing had to be written, since what was is closed already
	Incarnation events.Incarnation
	Seq         events.StreamSeq // where in the log
}

// Forget closes a rank because an operator says that its engine is gone for good: the log begins a new incarnation that
// holds nothing, and says that nothing follows. Whatever was missing or in doubt of those before is of no account then.
// While a shim that lives serves the rank it refuses with an error that wraps [ErrFenced] and says who; meanwhile it
// holds the rank's server, so that none begins. By force it goes on all the same: that shim, if it publishes again,
// begins yet another incarnation with what its engine can still say.
func Forget(ctx context.Context, ns *jetstream.Namespace, key events.RankKey, force bool) (done Forgotten, err error) {
	if !force {
		server, err := Claim(ctx, ns, key, false)
		if err != nil {
			return done, err
		}
		defer server.Close()
	}
	log := NewStreamLog(ns, key, nil)
	for {
		if done.Was, err = log.Last(ctx); err != nil {
			return done, err
		}
		switch {
		case !done.Was.Found:
			return done, fmt.Errorf("%w: %s", ErrUnknown, key)
		case done.Was.Shutdown:
			return done, nil
		}
		incarnation := done.Was.Incarnation + 1
		data, err := events.AppendBatch(nil, &events.Batch{
			Incarnation: incarnation, FirstID: 1, Model: done.Was.Identity.Model,
			BlockSize: done.Was.Identity.BlockSize, Shutdown: true,
			Events: []events.Event{{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonOperator}},
		})
		if err != nil {
			return done, err
		}
		seq, err := log.Publish(ctx, [][]byte{data})
		switch {
		case err == nil:
			done.Incarnation, done.Seq = incarnation, seq
			return done, nil
		case !errors.Is(err, ErrLogLost) && !(force && errors.Is(err, ErrFenced)):
			return done, err
		}
		sleep(ctx, 100*time.Millisecond)
		if ctx.Err() != nil {
			return done, err
		}
	}
}

// RanksOf lists the ranks of a worker that its partition's log or its newest usable snapshot knows, closed ones
// included, ascending.
func RanksOf(ctx context.Context, ns *jetstream.Namespace, worker events.WorkerID) ([]events.Rank, error) {
	p, err := ns.PartitionOf(worker)
	if err != nil {
		return nil, err
	}
	ranks, err := ns.RanksInLog(ctx, worker)
	if err != nil {
		return nil, err
	}
	bucket, err := ns.OpenSnapshots(ctx)
	if errors.Is(err, jetstream.ErrNotFound) {
		return ranks, nil
	} else if err != nil {
		return nil, err
	}
	entry, err := bucket.Latest(ctx, snapshot.ManifestKey(p))
	if errors.Is(err, jetstream.ErrNotFound) {
		return ranks, nil
	} else if err != nil {
		return nil, err
	}
	manifest, err := snapshot.ParseManifest(entry.Value)
	if err != nil { // it is as good as none; the log knows whoever spoke since
		return ranks, nil
	}
	states, err := snapshot.Ranks(manifest, func(name string) ([]byte, error) { return bucket.Get(ctx, name) })
	if err != nil && ctx.Err() != nil {
		return nil, err
	}
	for i := range states {
		if states[i].Key().Instance == worker {
			ranks = append(ranks, states[i].Key().Rank)
		}
	}
	slices.Sort(ranks)
	return slices.Compact(ranks), nil
}
