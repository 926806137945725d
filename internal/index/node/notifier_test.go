package node

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

func TestNotifierWakesEveryWaiter(t *testing.T) {
	var b notifier
	var at atomic.Int64
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			if err := b.wait(context.Background(), func() bool { return at.Load() >= int64(i) }); err != nil {
				t.Error(err)
			}
		})
	}
	for range 200 {
		at.Add(1)
		b.notify()
	}
	wg.Wait() // hangs if a notification is missed
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := b.wait(ctx, func() bool { return false }); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if n := b.waiting.Load(); n != 0 {
		t.Fatalf("%d wait still", n)
	}
}

// TestMinSeqIsNotWaitedForWithoutEnd: a query without a deadline that names an unreachable log position does not occupy
// a worker of the node forever.
func TestMinSeqIsNotWaitedForWithoutEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Node{shards: []*shard{{machine: NewMachine(nil, 1)}}, parts: []*runner{{}}}
		n.parts[0].phase = &restoring{kept: &kept{}}
		begun := time.Now()
		err := n.waitFor(t.Context(), api.PartitionSeq{Partition: 0, Seq: 5})
		if took := time.Since(begun); !api.HasCode(err, api.CodeBehind) || took != maxWait {
			t.Errorf("after %v: %v", took, err)
		}
	})
}
