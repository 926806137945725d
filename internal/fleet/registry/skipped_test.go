package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestSkippedRegistrations: leases with another block size than the model's, and leases of ranks beyond the limit, are
// counted and named, and are in no pool. The memory is bounded.
func TestSkippedRegistrations(t *testing.T) {
	s := newSite(t)
	var size atomic.Uint32
	size.Store(16)
	var mu sync.Mutex
	skips := map[string]int{}
	node := New(Config{
		Namespace: s.ns, Bucket: s.bucket, Clear: s.nodes[0].cfg.Clear,
		BlockSize: func(model string) uint32 {
			if model == "m" {
				return size.Load()
			}
			return 0
		},
		Log: logtest.New(func(l logtest.Line) {
			if err, _ := l.Attrs["error"].(error); l.Text == "a registration is skipped" {
				mu.Lock()
				defer mu.Unlock()
				skips[fmt.Sprint(errors.Is(err, errOtherSize), errors.Is(err, errOtherRank))]++
			}
		}),
	})
	running, end := context.WithCancel(s.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		node.Run(running)
	}()
	defer func() {
		end()
		<-done
	}()
	defer s.hold(record("good", time.Hour))()
	evil := record("evil", time.Hour)
	evil.BlockSize = 65535
	endEvil := s.hold(evil)
	p, err := s.ns.PartitionOf("evil")
	s.must(err)
	const beyond = 500
	for i := range beyond {
		evil.Rank = events.Rank(events.MaxRanks + i)
		text, err := evil.encode()
		s.must(err)
		_, err = s.bucket.Put(s.ctx, fmt.Sprintf("%d.evil.%d", p, evil.Rank), text)
		s.must(err)
	}
	defer s.hold(record("later", time.Hour))()
	s.until("all is seen", func() bool { return len(node.Workers()) == 3 })
	status := &api.Status{}
	node.MarkStatus(status)
	said := strings.Join(status.Problems, "\n")
	if status.Events["registrations_block_size"] == 0 || status.Events["registrations_rank_beyond_limit"] != beyond ||
		!strings.Contains(said, "evil/0") || !strings.Contains(said, "states 65535") ||
		!strings.Contains(said, fmt.Sprintf("%d registrations of ranks", beyond)) {
		t.Errorf("%v\n%s", status.Events, said)
	}
	names := func() (list []string) {
		for _, r := range node.Pool("m").Ranks {
			list = append(list, r.RankKey.String())
		}
		return list
	}
	if got := fmt.Sprint(names()); got != "[good/0 later/0]" {
		t.Errorf("the pool has %v", got)
	}
	size.Store(65535) // removed, and registered again
	node.ModelsChanged()
	if got := fmt.Sprint(names()); got != "[evil/0]" {
		t.Errorf("with another registered size the pool has %v", got)
	}
	size.Store(16)
	node.ModelsChanged()
	status = &api.Status{}
	if node.MarkStatus(status); !strings.Contains(strings.Join(status.Problems, "\n"), "states 65535") {
		t.Errorf("problems %q", status.Problems)
	}
	endEvil()
	evil.Rank, evil.BlockSize = 0, 16 // the shim restarts with the registered size
	defer s.hold(evil)()
	s.until("the pool has the shim with the registered size", func() bool {
		return fmt.Sprint(names()) == "[evil/0 good/0 later/0]"
	})
	status = &api.Status{}
	if node.MarkStatus(status); strings.Contains(strings.Join(status.Problems, "\n"), "states 65535") {
		t.Errorf("problems %q", status.Problems)
	}
	mu.Lock()
	defer mu.Unlock()
	if skips["true false"] != 1 || skips["false true"] != 1 {
		t.Errorf("log lines: %v", skips)
	}
}

// TestUnreadableReports: every unreadable record is counted, and one per second is reported.
func TestUnreadableReports(t *testing.T) {
	var s skipped
	now, reported := time.Unix(1000, 0), 0
	for i := range 30_000 {
		if s.unreadable(now.Add(time.Duration(i) * 100 * time.Microsecond)) {
			reported++
		}
	}
	if s.bad != 30_000 || reported != 3 {
		t.Errorf("%d counted, %d reported", s.bad, reported)
	}
}

// TestLeaseOverForeignRecord: a record that no shim of the rank wrote does not end the holder of the lease.
func TestLeaseOverForeignRecord(t *testing.T) {
	s := newSite(t)
	l := must(NewLease(s.ns, record("w", time.Hour), nil))
	other := record("w", time.Hour)
	other.Instance, other.Holder.ID = "another", "x"
	foreign := must(other.encode())
	for _, bad := range []string{"", "{", "{}", "null", `{"holder":{"id":""}}`, string(foreign)} {
		revision, _, err := l.renew(s.ctx, 0)
		s.must(err)
		must(s.bucket.Put(s.ctx, l.name, []byte(bad)))
		if _, expired, err := l.renew(s.ctx, revision); err != nil || expired {
			t.Errorf("%q: %v, expired %v", bad, err, expired)
		}
		if e := must(s.bucket.Latest(s.ctx, l.name)); string(e.Value) != string(l.text()) {
			t.Errorf("%q is still there: %s", bad, e.Value)
		}
	}
	second := must(NewLease(s.ns, record("w", time.Hour), nil)) // a real shim
	revision, _, err := l.renew(s.ctx, 0)
	s.must(err)
	_, _, err = second.renew(s.ctx, 0)
	s.must(err)
	if _, _, err := l.renew(s.ctx, revision); !errors.Is(err, ErrTaken) {
		t.Errorf("another shim: %v", err)
	}
}

// TestUnreadableOperatorRecord: a change by an operator replaces an unreadable record, and keeps the node's last
// version. A record of a later version stays.
func TestUnreadableOperatorRecord(t *testing.T) {
	s := newSite(t)
	defer s.hold(record("w", time.Hour))()
	key := record("w", time.Hour)
	s.seen(key.Key(), api.WorkerSchedulable, "")
	yes := true
	must(s.nodes[0].Change(s.ctx, &api.WorkerChange{Instance: "w", Drain: &yes, Why: "repair"}))
	name := must(jetstream.OperatorKey("w"))
	capacity := uint64(7)
	for _, bad := range []string{"", "[", `{"version":0}`, `{"version":1,"instance":"another"}`} {
		must(s.bucket.Put(s.ctx, name, []byte(bad)))
		capacity++
		_, err := s.nodes[0].Change(s.ctx, &api.WorkerChange{Instance: "w",
			WorkerSpec: api.WorkerSpec{TotalKVBlocks: capacity}})
		s.must(err)
		var o Operator
		s.must(json.Unmarshal(must(s.bucket.Latest(s.ctx, name)).Value, &o))
		if o.Drain == nil || o.Drain.Why != "repair" || o.Change.TotalKVBlocks != capacity {
			t.Errorf("after %q: %+v", bad, o)
		}
	}
	must(s.bucket.Put(s.ctx, name, []byte(`{"version":2,"instance":"w"}`)))
	if _, err := s.nodes[0].Change(s.ctx, &api.WorkerChange{Instance: "w", Drain: &yes}); code(err) != api.CodeConflict {
		t.Errorf("a later version: %v", err)
	}
}
