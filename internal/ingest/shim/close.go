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

// ErrUnknown is returned by [Forget] for a rank that is neither in the log nor in its snapshot.
var ErrUnknown = errors.New("the log has no events of this worker and rank")

// Forgotten is the result of [Forget].
type Forgotten struct {
	Was Published // the state of the log before
	// the new closed incarnation; 0 if the earlier incarnation was already closed
	Incarnation events.Incarnation
	Seq         events.StreamSeq // where in the log
}

// Forget closes a rank on an operator's request, because its engine is gone permanently. The log begins a new, empty,
// closed incarnation, so missing or doubtful events of earlier incarnations do not matter. While a live shim serves the
// rank, Forget returns an error that wraps [ErrFenced] and names the shim. During the call, Forget holds the rank's
// control server, so no shim can start. force skips the check. A live shim then begins another incarnation at its next
// publication, with the events that the engine can repeat.
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

// Clear closes the incarnation of a rank without a shim: the log gets a clear with the reason. Clear calls still after
// reading the rank's last message, and writes nothing if still returns false. A closed or unknown incarnation is not an
// error. If a shim publishes at the same time, either the shim is first and Clear calls still again, or the shim
// detects the clear.
func Clear(ctx context.Context, ns *jetstream.Namespace, key events.RankKey, id Identity, why events.Reason,
	still func(context.Context) (bool, error)) error {
	_, _, err := closeRank(ctx, ns, key, func(last Published) (*events.Batch, error) {
		if ok, err := still(ctx); err != nil || !ok {
			return nil, err
		}
		if last.Unreadable != nil { // the incarnation to close is unknown
			return &events.Batch{Incarnation: last.next(millis(time.Now())), FirstID: 1, Model: id.Model,
				BlockSize: id.BlockSize}, nil
		}
		return &events.Batch{Incarnation: last.Incarnation, FirstID: last.LastID + 1, Model: id.Model,
			BlockSize: id.BlockSize, Cursor: last.Cursor}, nil
	}, why, func(err error) bool { return errors.Is(err, ErrFenced) || errors.Is(err, ErrLogLost) })
	return err
}

// closeRank ends a rank in the log with a batch that clears the rank, if the rank exists and is not closed. begin
// returns the batch, which closeRank completes; nil writes nothing. It retries after errors that satisfy again.
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

// RanksOf lists the ranks of a worker in its partition's log or newest usable snapshot, including closed ranks,
// ascending.
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
	if err != nil { // an unusable snapshot counts as missing; the log has all ranks with later messages
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
