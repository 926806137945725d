package hicache

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// patience is the time limit for an expected event. A busy machine may stall for minutes.
const patience = testkit.Patience

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// memory is a store in memory.
type memory struct {
	mu      sync.Mutex
	objects map[string]bool
	keys    atomic.Int64
	calls   atomic.Int64
	gate    chan struct{} // if not nil, calls wait for the gate
	err     error
}

func (m *memory) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	m.calls.Add(1)
	m.keys.Add(int64(len(keys)))
	if m.gate != nil {
		<-m.gate
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	present, known = NewBitmap(len(keys)), NewBitmap(len(keys))
	if m.err != nil {
		return present, known, m.err
	}
	for i, k := range keys {
		known.Set(i)
		if m.objects[k] {
			present.Set(i)
		}
	}
	return present, known, nil
}
