package compat

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// shimSite is a namespace for shims of a test.
type shimSite struct {
	*testing.T
	ns     *jetstream.Namespace
	bucket *jetstream.Bucket
	shims  *Shims
}

func newShimSite(t *testing.T) *shimSite {
	t.Helper()
	t.Parallel()
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	conn := natskit.Connect(t, natskit.Start(t, natsserver.Options{MaxStore: 1 << 30}))
	s := &shimSite{T: t}
	var err error
	s.ns, err = jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "test", Partitions: 2})
	must(err)
	must(s.ns.EnsureStreams(ctx, jetstream.LogConfig{MaxBytes: 64 << 20}))
	s.bucket, err = s.ns.EnsureWorkers(ctx, jetstream.BucketConfig{MaxBytes: 64 << 20})
	must(err)
	s.shims = s.start()
	return s
}

// start runs the shims of a node until the end of the test.
func (s *shimSite) start() *Shims {
	ctx, cancel := context.WithCancel(s.Context())
	shims := NewShims(s.ns, s.bucket, "one", Engines{}, nil)
	done := make(chan struct{})
	go func() {
		defer close(done)
		shims.Run(ctx)
	}()
	s.Cleanup(func() {
		cancel()
		<-done
	})
	s.until("shims can be registered", func() bool {
		shims.mu.Lock()
		defer shims.mu.Unlock()
		return shims.ctx != nil
	})
	return shims
}

func (s *shimSite) until(what string, so func() bool) {
	s.Helper()
	testkit.Eventually(s, what, so)
}

// keys returns the keys that name the instance and have a value. Claims do not count, because the registry deletes
// claims.
func (s *shimSite) keys(instance string) []string {
	s.Helper()
	keys, err := s.bucket.Keys(s.Context(), "")
	if err != nil {
		s.Fatal(err)
	}
	return slices.DeleteFunc(keys, func(k string) bool {
		if !strings.Contains(k, "."+instance+".") || strings.HasPrefix(k, "serves.") {
			return true
		}
		_, err := s.bucket.Latest(s.Context(), k)
		return errors.Is(err, jetstream.ErrNotFound)
	})
}

func ranksOf(instance events.WorkerID, n int, endpoint string) (list []registry.Record) {
	for i := range n {
		list = append(list, registry.Record{Instance: instance, Rank: events.Rank(i), Model: "m", BlockSize: 16,
			Source: "vllm", Engine: &registry.Engine{Endpoint: endpoint, Group: DefaultGroup}})
	}
	return list
}

func every(registry.Record) bool { return true }

// TestRegisterRanks registers the maximum number of ranks of a worker, or an eighth under the race detector. A single
// call then removes the ranks, before most shims have started. No key remains.
func TestRegisterRanks(t *testing.T) {
	s := newShimSite(t)
	endpoint := "tcp://" + loopback.Reserve(t)
	n := testkit.Rounds(4096)
	lease, _, err := s.shims.keys(events.RankKey{Instance: "big"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.shims.Register(t.Context(), ranksOf("big", n, endpoint)...); err != nil {
		t.Fatal(err)
	}
	if got := len(s.shims.Listeners()); got != n {
		t.Fatalf("%d ranks are registered, want %d", got, n)
	}
	s.until("a shim has its lease", func() bool {
		_, err := s.bucket.Latest(t.Context(), lease)
		return err == nil
	})
	if err := s.shims.Register(t.Context(), ranksOf("big", 1, endpoint)...); !errors.Is(err, ErrExists) {
		t.Errorf("a rank is registered twice: %v", err)
	}
	forgotten := false
	err = s.shims.Unregister(t.Context(), "big", every, func(context.Context) error { forgotten = true; return nil })
	if err != nil || !forgotten {
		t.Fatalf("unregister: %v, what is to follow was done: %t", err, forgotten)
	}
	keys := slices.DeleteFunc(s.keys("big"), func(key string) bool {
		_, _, is := jetstream.ParseClaimKey(key) // a node deletes the claim with the last record of the worker
		return is
	})
	if left := len(s.shims.Listeners()); left > 0 || len(keys) > 0 {
		t.Errorf("%d ranks and these keys are left: %v", left, keys)
	}
}

// TestRegisterGivenUp ends the context at different points of a registration. No key remains, and the same ranks can be
// registered.
func TestRegisterGivenUp(t *testing.T) {
	s := newShimSite(t)
	endpoint := "tcp://" + loopback.Reserve(t)
	given := 0
	for after := range 12 {
		instance := fmt.Sprint("w", after)
		ctx, cancel := context.WithCancel(t.Context())
		left := &countdown{Context: ctx, cancel: cancel}
		left.n.Store(int64(after * after))
		err := s.shims.Register(left, ranksOf(events.WorkerID(instance), testkit.Rounds(600), endpoint)...)
		if cancel(); err == nil {
			continue
		}
		given++
		if keys := s.keys(instance); len(keys) > 0 {
			t.Errorf("given up after %d looks at the context: %v, and %d keys are left", after*after, err, len(keys))
		}
		if err := s.shims.Register(t.Context(), ranksOf(events.WorkerID(instance), 2, endpoint)...); err != nil {
			t.Errorf("register again: %v", err)
		}
	}
	if given < 3 {
		t.Fatalf("%d registrations were given up", given)
	}
	for _, l := range s.shims.Listeners() {
		if l.Record.Rank > 1 && slices.Contains([]events.WorkerID{"w0", "w1", "w2"}, l.Record.Instance) {
			t.Fatalf("%s runs", l.Record.Key())
		}
	}
}

// countdown is a context that ends after n calls of Err or Done.
type countdown struct {
	context.Context
	n      atomic.Int64
	cancel func()
}

func (c *countdown) Err() error {
	if c.n.Add(-1) < 0 {
		c.cancel()
	}
	return c.Context.Err()
}

func (c *countdown) Done() <-chan struct{} {
	if c.n.Add(-1) < 0 {
		c.cancel()
	}
	return c.Context.Done()
}

// TestRegisterMismatch refuses ranks with another block size than the model. No key and no model remain.
func TestRegisterMismatch(t *testing.T) {
	s := newShimSite(t)
	endpoint := "tcp://" + loopback.Reserve(t)
	if err := s.ns.RegisterModel(t.Context(), jetstream.Model{Name: "m", BlockSize: 32}); err != nil {
		t.Fatal(err)
	}
	mixed := ranksOf("w", 3, endpoint)
	mixed[2].Model = "" // invalid
	for want, records := range map[error][]registry.Record{ErrMismatch: ranksOf("w", 3, endpoint), ErrBad: mixed} {
		if err := s.shims.Register(t.Context(), records...); !errors.Is(err, want) {
			t.Errorf("register: %v, want %v", err, want)
		}
		if keys := s.keys("w"); len(keys) > 0 || len(s.shims.Listeners()) > 0 {
			t.Errorf("after %v these are left: %v", want, keys)
		}
	}
}
