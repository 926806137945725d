package shim

import (
	"context"
	"errors"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Clear closes the incarnation of a rank whose shim is gone: the log says that it holds nothing, why, and that nothing
// follows. still is asked after the rank's last message was read; if it says no, nothing is written. If the incarnation
// is closed already, or the log knows of none, that is well. A shim that publishes at the same time either comes first,
// then Clear asks again, or finds out.
func Clear(ctx context.Context, ns *jetstream.Namespace, key events.RankKey, id Identity, why events.Reason,
	still func(context.Context) (bool, error)) error {
	log := NewStreamLog(ns, key, nil)
	for {
		last, err := log.Last(ctx)
		if err != nil {
			return err
		}
		if !last.Found || last.Shutdown {
			return nil
		}
		if ok, err := still(ctx); err != nil || !ok {
			return err
		}
		data, err := events.AppendBatch(nil, &events.Batch{
			Incarnation: last.Incarnation, FirstID: last.LastID + 1, Model: id.Model, BlockSize: id.BlockSize,
			Cursor: last.Cursor, Shutdown: true,
			Events: []events.Event{{Kind: events.Cleared, Tier: events.AllTiers, Reason: why}},
		})
		if err != nil {
			return err
		}
		_, err = log.Publish(ctx, [][]byte{data})
		if !errors.Is(err, ErrFenced) && !errors.Is(err, ErrLogLost) {
			return err
		}
		sleep(ctx, 100*time.Millisecond)
		if ctx.Err() != nil {
			return err
		}
	}
}
