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
	done.Was, done.Seq, err = closeRank(ctx, ns, key, func(was Published) (*events.Batch, error) {
		if done.Incarnation = was.Incarnation + 1; was.Unreadable != nil {
			done.Incarnation = was.next(millis(time.Now()))
		}
		return &events.Batch{Incarnation: done.Incarnation, FirstID: 1, Model: was.Identity.Model,
			BlockSize: was.Identity.BlockSize}, nil
	}, events.ReasonOperator, func(err error) bool {
		return errors.Is(err, ErrLogLost) || force && errors.Is(err, ErrFenced)
	})
	switch {
	case err != nil:
		done.Incarnation = 0
	case !done.Was.Found:
		err = fmt.Errorf("%w: %s", ErrUnknown, key)
	}
	return done, err
}

// Clear closes the incarnation of a rank whose shim is gone: the log says that it holds nothing, why, and that nothing
// follows. still is asked after the rank's last message was read; if it says no, nothing is written. If the incarnation
// is closed already, or the log knows of none, that is well. A shim that publishes at the same time either comes first,
// then Clear asks again, or finds out.
func Clear(ctx context.Context, ns *jetstream.Namespace, key events.RankKey, id Identity, why events.Reason,
	still func(context.Context) (bool, error)) error {
	_, _, err := closeRank(ctx, ns, key, func(last Published) (*events.Batch, error) {
		if ok, err := still(ctx); err != nil || !ok {
			return nil, err
		}
		if last.Unreadable != nil { // it is not known which incarnation it is to close
			return &events.Batch{Incarnation: last.next(millis(time.Now())), FirstID: 1, Model: id.Model,
				BlockSize: id.BlockSize}, nil
		}
		return &events.Batch{Incarnation: last.Incarnation, FirstID: last.LastID + 1, Model: id.Model,
			BlockSize: id.BlockSize, Cursor: last.Cursor}, nil
	}, why, func(err error) bool { return errors.Is(err, ErrFenced) || errors.Is(err, ErrLogLost) })
	return err
}

// closeRank ends a rank in the log, if it is known there and not ended, by a batch that clears it. begin makes the
// batch, of which the end is filled in; nil: nothing is written. It begins anew after errors that again is true for.
func closeRank(ctx context.Context, ns *jetstream.Namespace, key events.RankKey,
	begin func(last Published) (*events.Batch, error), why events.Reason,
	again func(error) bool) (last Published, seq events.StreamSeq, err error) {
	log := NewStreamLog(ns, key, nil)
	for {
		if last, err = log.Last(ctx); err != nil || !last.Found || last.Shutdown {
			return last, 0, err
		}
		batch, err := begin(last)
		if err != nil || batch == nil {
			return last, 0, err
		}
		batch.Shutdown = true
		batch.Events = []events.Event{{Kind: events.Cleared, Tier: events.AllTiers, Reason: why}}
		data, err := events.AppendBatch(nil, batch)
		if err != nil {
			return last, 0, err
		}
		if seq, err = log.Publish(ctx, [][]byte{data}); err == nil || !again(err) {
			return last, seq, err
		}
		sleep(ctx, 100*time.Millisecond)
		if ctx.Err() != nil {
			return last, 0, err
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
	var entry jetstream.Entry
	bucket, err := ns.OpenSnapshots(ctx)
	if err == nil {
		entry, err = bucket.Latest(ctx, snapshot.ManifestKey(p))
	}
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
