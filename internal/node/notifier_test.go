package node

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
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
	wg.Wait() // hangs if a ring is missed
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := b.wait(ctx, func() bool { return false }); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if n := b.waiting.Load(); n != 0 {
		t.Fatalf("%d wait still", n)
	}
}
