package jetstream

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestRollupRefused sends the rollups that the user of one key could send. None removes another key, in a new bucket
// and in a bucket of an earlier release, which allowed them.
func TestRollupRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	nc := plainConn(t, w.srv.URL())
	test := Names("test")
	for _, name := range []string{test.MetaBucket(), test.WorkersBucket(), test.SnapshotBucket(),
		test.NodesBucket()} {
		ensure := func() *Bucket {
			var b *Bucket
			var err error
			switch name {
			case Names("test").MetaBucket():
				if w.ns, err = JoinNamespace(w.ctx, w.c, NamespaceConfig{Name: "test"}); err == nil {
					b = w.ns.meta
				}
			case Names("test").WorkersBucket():
				b, err = w.ns.EnsureWorkers(w.ctx, BucketConfig{})
			case Names("test").SnapshotBucket():
				b, err = w.ns.EnsureSnapshots(w.ctx, BucketConfig{})
			default:
				b, err = w.ns.EnsureNodes(w.ctx, time.Hour)
			}
			if err != nil {
				t.Fatal(name, err)
			}
			return b
		}
		attack := func() (refused bool) {
			for key, how := range map[string]string{"mine": "all", "mine.too": "sub"} {
				reply, err := nc.RequestMsgWithContext(w.ctx, &nats.Msg{Subject: KeySubject(name, key), Data: []byte("{}"),
					Header: nats.Header{"Nats-Rollup": {how}}})
				if err != nil {
					t.Fatal(err)
				}
				_, err = readAck(reply.Data, BucketStream(name))
				refused = err != nil
			}
			return refused
		}
		b := ensure()
		for _, old := range []bool{false, true} {
			if old {
				a, err := w.c.streamInfo(w.ctx, b.stream)
				if err != nil {
					t.Fatal(err)
				}
				a.Config.AllowRollup, a.Config.AllowAtomicPublish = true, true
				if err := w.c.call(w.ctx, "update", "STREAM.UPDATE."+b.stream, a.Config, nil); err != nil {
					t.Fatal(err)
				}
				b = ensure()
			}
			others := fmt.Sprint("others-", old)
			if _, err := b.Put(w.ctx, others, []byte("v")); err != nil {
				t.Fatal(err)
			}
			if !attack() {
				t.Errorf("%s, of an earlier release %v: a rollup was stored", name, old)
			}
			if v, err := b.Latest(w.ctx, others); err != nil || string(v.Value) != "v" {
				t.Errorf("%s, of an earlier release %v: %v, %v", name, old, v, err)
			}
			a, err := w.c.streamInfo(w.ctx, b.stream)
			if err != nil || a.Config.AllowRollup || a.Config.AllowAtomicPublish != (name == Names("test").SnapshotBucket()) {
				t.Errorf("%s, of an earlier release %v: %+v, %v", name, old, a.Config, err)
			}
		}
	}
}

// TestPerMessageHeadersRefused sends headers that make the server remove, republish or count messages.
func TestPerMessageHeadersRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b, err := w.ns.EnsureWorkers(w.ctx, BucketConfig{})
	if err != nil {
		t.Fatal(err)
	}
	nc := plainConn(t, w.srv.URL())
	p := w.publisher(w1)
	for subject, stream := range map[string]string{KeySubject(b.name, "k"): b.stream, p.Subject(): p.stream} {
		for header, value := range map[string]string{"Nats-TTL": "1s", "Nats-Rollup": "all", "Nats-Incr": "+1",
			"Nats-Schedule": "@at 2030-01-01T00:00:00Z"} {
			h := nats.Header{header: {value}}
			if header == "Nats-Schedule" {
				h["Nats-Schedule-Target"] = []string{subject}
			}
			reply, err := nc.RequestMsgWithContext(w.ctx, &nats.Msg{Subject: subject, Data: []byte("1"), Header: h})
			if err != nil {
				t.Fatal(err)
			}
			if seq, err := readAck(reply.Data, stream); err == nil {
				t.Errorf("%s with %s: stored at %d", subject, header, seq)
			}
		}
	}
}

// TestOddBucket: the error for a bucket with a setting that the server never turns off names the setting.
func TestOddBucket(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	for i, odd := range []map[string]any{{"allow_msg_ttl": true}, {"allow_msg_schedules": true, "discard": "old"},
		{"allow_msg_counter": true, "discard": "old"}, {"max_msgs_per_subject": 2}, {"discard": "old"},
		{"storage": "memory"}} {
		name := fmt.Sprint("odd", i)
		cfg := map[string]any{"name": BucketStream(name), "subjects": []string{KeySubject(name, ">")}, "storage": "file",
			"retention": "limits", "max_msgs_per_subject": 1, "discard": "new"}
		for k, v := range odd {
			cfg[k] = v
		}
		if err := w.c.call(w.ctx, "create", "STREAM.CREATE."+BucketStream(name), cfg, nil); err != nil {
			t.Fatal(odd, err)
		}
		if _, err := ensureBucket(w.ctx, w.c, name, BucketConfig{}, 1); !errors.Is(err, ErrMismatch) ||
			!strings.Contains(err.Error(), BucketStream(name)) {
			t.Errorf("%v: %v", odd, err)
		}
	}
}

// TestRecordLost: the error for a namespace with streams and without a readable record names both. The namespace is
// never created again with another number of partitions. Restore writes the record by the streams.
func TestRecordLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	join := func(cfg NamespaceConfig) (*Namespace, error) {
		cfg.Name = "test"
		return JoinNamespace(w.ctx, w.c, cfg)
	}
	revision := func() uint64 {
		e, _, err := w.ns.meta.last(w.ctx, namespaceKey)
		if err != nil && !errors.Is(err, ErrNotFound) {
			t.Fatal(err)
		}
		return e.Revision
	}
	put := func(text string) func() error {
		return func() error {
			return w.ns.meta.replace(w.ctx, namespaceKey, []byte(text), revision())
		}
	}
	for _, lost := range []struct {
		how  string
		lose func() error
		is   error
		says string
	}{
		{"erased", func() error { return w.ns.meta.Erase(w.ctx, namespaceKey, revision()) }, ErrNotFound, "is missing"},
		{"garbled", put("no record"), ErrBadRecord, "cannot be read"},
		{"empty", put(""), ErrBadRecord, "cannot be read"},
		{"an answer", put(`{"node":"n1","ready":true}`), ErrBadRecord, "cannot be read"},
		{"impossible", put(`{"version":1,"partitions":0}`), ErrBadRecord, "cannot be read"},
	} {
		if err := lost.lose(); err != nil {
			t.Fatal(lost.how, err)
		}
		for _, partitions := range []uint32{0, 3, 8} {
			_, err := join(NamespaceConfig{Partitions: partitions})
			record, is := errors.AsType[*RecordError](err)
			if !is || !errors.Is(err, lost.is) || record.Partitions != 3 || len(record.Streams) != 3 {
				t.Fatalf("%s, started with %d: %v", lost.how, partitions, err)
			}
			for _, part := range []string{lost.says, "KV_EVENTS_test_0", "KV_EVENTS_test_2", "3 partitions",
				"--restore-namespace", Names("test").MetaBucket()} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%s: %q is not in: %v", lost.how, part, err)
				}
			}
		}
		if found := LostRecord(w.ctx, w.c, "test"); found == nil || found.Partitions != 3 {
			t.Errorf("%s: %v", lost.how, found)
		}
		if _, err := join(NamespaceConfig{Partitions: 8, Restore: true}); !errors.Is(err, ErrMismatch) {
			t.Errorf("%s, restored with 8: %v", lost.how, err)
		}
		var all sync.WaitGroup // several nodes at once
		for range 4 {
			all.Go(func() {
				if ns, err := join(NamespaceConfig{Restore: true}); err != nil || ns.Partitions() != 3 {
					t.Errorf("%s, restored: %v, %v", lost.how, ns, err)
				}
			})
		}
		all.Wait()
		if ns, err := join(NamespaceConfig{}); err != nil || ns.Partitions() != 3 {
			t.Fatalf("%s, afterwards: %v, %v", lost.how, ns, err)
		}
		if found := LostRecord(w.ctx, w.c, "test"); found != nil {
			t.Errorf("%s, afterwards: %v", lost.how, found)
		}
	}
	// A record of a later version is readable to other programs: it is never replaced.
	if err := put(`{"version":2,"partitions":3}`)(); err != nil {
		t.Fatal(err)
	}
	if _, err := join(NamespaceConfig{Restore: true}); !errors.Is(err, ErrMismatch) {
		t.Errorf("a later version: %v", err)
	}
}

// TestRecordLostWithGaps: the number of partitions must be configured if the streams do not show it, and must fit the
// log.
func TestRecordLostWithGaps(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 4)
	for i := range 40 {
		key := w1
		key.Instance += "x"
		for range i {
			key.Instance += "y"
		}
		w.publish(w.publisher(key), 1, 1)
	}
	lose := func(stream int) {
		t.Helper()
		e, _, err := w.ns.meta.last(w.ctx, namespaceKey)
		if err == nil {
			err = w.ns.meta.Erase(w.ctx, namespaceKey, e.Revision)
		}
		if err == nil && stream >= 0 {
			err = w.c.call(w.ctx, "delete", "STREAM.DELETE."+Names("test").Stream(events.Partition(stream)), nil, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	restore := func(partitions uint32) (uint32, error) {
		ns, err := JoinNamespace(w.ctx, w.c, NamespaceConfig{Name: "test", Partitions: partitions, Restore: true})
		if err != nil {
			return 0, err
		}
		return ns.Partitions(), nil
	}
	lose(3) // the last stream: the rest looks like a log of 3 partitions
	if n, err := restore(0); !errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), "other partitions") {
		t.Fatalf("restored with %d of 4: %v", n, err)
	}
	if err := w.ns.EnsureStreams(w.ctx, LogConfig{MaxBytes: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	if n, err := restore(0); err != nil || n != 4 {
		t.Fatal(n, err)
	}
	lose(1)
	if _, err := restore(0); err == nil || !strings.Contains(err.Error(), "--partitions") {
		t.Fatalf("with a gap: %v", err)
	}
	for _, wrong := range []uint32{2, 3, 7} {
		if n, err := restore(wrong); !errors.Is(err, ErrMismatch) {
			t.Fatalf("with a gap and %d: %d, %v", wrong, n, err)
		}
	}
	if n, err := restore(4); err != nil || n != 4 {
		t.Fatal(n, err)
	}
}

// TestFirstStarts: an interrupted start at any step, and several nodes at once, create one namespace.
func TestFirstStarts(t *testing.T) {
	t.Parallel()
	ctx := ctxFor(t)
	c := connect(t, ConnOptions{Server: startServer(t, t.TempDir(), "")})
	// Interrupted after the bucket was created.
	if _, err := ensureBucket(ctx, c, Names("a").MetaBucket(), BucketConfig{}, 1); err != nil {
		t.Fatal(err)
	}
	ns, err := JoinNamespace(ctx, c, NamespaceConfig{Name: "a", Partitions: 5})
	if err != nil || ns.Partitions() != 5 {
		t.Fatal(ns, err)
	}
	// Interrupted between two streams.
	if err := ns.ensureStream(ctx, 0, LogConfig{MaxBytes: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	if ns, err = JoinNamespace(ctx, c, NamespaceConfig{Name: "a"}); err != nil || ns.Partitions() != 5 {
		t.Fatal(ns, err)
	}
	for round := range 5 {
		name := fmt.Sprint("race", round)
		var all sync.WaitGroup
		for range 6 {
			all.Go(func() {
				ns, err := JoinNamespace(ctx, c, NamespaceConfig{Name: name, Partitions: 4})
				if err == nil {
					err = ns.EnsureStreams(ctx, LogConfig{MaxBytes: 1 << 20})
				}
				if err != nil || ns.Partitions() != 4 {
					t.Errorf("%s: %v", name, err)
				}
			})
		}
		all.Wait()
	}
}
