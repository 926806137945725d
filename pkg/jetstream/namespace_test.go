package jetstream

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestNamespace(t *testing.T) {
	t.Parallel()
	ctx := ctxFor(t)
	dir := t.TempDir()
	s := startServer(t, dir, "")
	c := connect(t, ConnOptions{Server: s})
	if _, err := OpenNamespace(ctx, c, "prod"); !errors.Is(err, ErrNoNamespace) {
		t.Fatalf("opened a missing namespace: %v", err)
	}
	ns, err := JoinNamespace(ctx, c, NamespaceConfig{Name: "prod", Partitions: 5})
	if err != nil || ns.Partitions() != 5 || ns.Name() != "prod" {
		t.Fatal(ns, err)
	}
	for _, partitions := range []uint32{0, 5} {
		again, err := JoinNamespace(ctx, c, NamespaceConfig{Name: "prod", Partitions: partitions})
		if err != nil || again.Partitions() != 5 {
			t.Fatal(again, err)
		}
	}
	_, err = JoinNamespace(ctx, c, NamespaceConfig{Name: "prod", Partitions: 6})
	if !errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), "5 partitions") ||
		!strings.Contains(err.Error(), " 6 ") {
		t.Fatalf("another number of partitions: %v", err)
	}
	if open, err := OpenNamespace(ctx, c, "prod"); err != nil || open.Partitions() != 5 {
		t.Fatal(open, err)
	}
	if other, err := JoinNamespace(ctx, c, NamespaceConfig{Name: "other"}); err != nil || other.Partitions() != 8 {
		t.Fatal(other, err)
	}
	for _, bad := range []NamespaceConfig{{Name: "A"}, {Name: ""}} {
		if _, err := JoinNamespace(ctx, c, bad); !errors.Is(err, ErrBadName) {
			t.Errorf("%+v: %v", bad, err)
		}
		if _, err := OpenNamespace(ctx, c, bad.Name); !errors.Is(err, ErrBadName) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if _, err := JoinNamespace(ctx, c, NamespaceConfig{Name: "big", Partitions: MaxPartitions + 1}); err == nil {
		t.Error("too many partitions")
	}
	c.Close()
	s.Stop()
	c = connect(t, ConnOptions{Server: startServer(t, dir, "")})
	if open, err := OpenNamespace(ctx, c, "prod"); err != nil || open.Partitions() != 5 {
		t.Fatalf("after a restart: %v, %v", open, err)
	}
}

// TestNamespaceRace: of indexers that start at once with different numbers of partitions, one creates the namespace,
// and the others get an error.
func TestNamespaceRace(t *testing.T) {
	t.Parallel()
	c := connect(t, ConnOptions{Server: startServer(t, t.TempDir(), "")})
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() {
			_, errs[i] = JoinNamespace(ctxFor(t), c, NamespaceConfig{Name: "race", Partitions: uint32(1 + i)})
		})
	}
	wg.Wait()
	ns, err := OpenNamespace(ctxFor(t), c, "race")
	if err != nil {
		t.Fatal(err)
	}
	for i, err := range errs {
		if won := uint32(1+i) == ns.Partitions(); won != (err == nil) || !won && !errors.Is(err, ErrMismatch) {
			t.Errorf("wanted %d, there are %d: %v", 1+i, ns.Partitions(), err)
		}
	}
}

func TestNamespaceRecords(t *testing.T) {
	t.Parallel()
	ctx := ctxFor(t)
	c := connect(t, ConnOptions{Server: startServer(t, t.TempDir(), "")})
	if _, err := JoinNamespace(ctx, c, NamespaceConfig{Name: "a"}); err != nil {
		t.Fatal(err)
	}
	meta := openBucket(c, Names("a").MetaBucket())
	for _, bad := range []struct{ record, says string }{
		{`{"version":2,"partitions":4}`, "version 2"},
		{`{"version":0,"partitions":4}`, "version 0"},
		{`{"node":"n","problems":[]}`, "version 0"},
		{`{"version":1,"partitions":0}`, "0 partitions"},
		{`{"version":1,"partitions":100000}`, "100000 partitions"},
		{`not json`, "cannot be read"},
		{``, "cannot be read"},
	} {
		there, _, err := meta.last(ctx, namespaceKey)
		if err == nil {
			err = meta.replace(ctx, namespaceKey, []byte(bad.record), there.Revision)
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := OpenNamespace(ctx, c, "a"); err == nil || !strings.Contains(err.Error(), bad.says) {
			t.Errorf("record %q: %v", bad.record, err)
		}
		if _, err := JoinNamespace(ctx, c, NamespaceConfig{Name: "a"}); err == nil ||
			!strings.Contains(err.Error(), bad.says) {
			t.Errorf("record %q: %v", bad.record, err)
		}
	}
}

func TestModels(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	if _, err := w.ns.Model(w.ctx, "m"); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
	want := []Model{{"a/b c", 16}, {"m", 64}, {"*", 1}}
	for range 2 {
		for _, m := range want {
			if err := w.ns.RegisterModel(w.ctx, m); err != nil {
				t.Fatal(err)
			}
		}
	}
	err := w.ns.RegisterModel(w.ctx, Model{"m", 32})
	if !errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), "64") || !strings.Contains(err.Error(), "32") {
		t.Fatal(err)
	}
	for _, bad := range []Model{{"", 1}, {"x", 0}, {strings.Repeat("x", 256), 1}} {
		if err := w.ns.RegisterModel(w.ctx, bad); err == nil {
			t.Errorf("%+v was registered", bad)
		}
	}
	for _, m := range want {
		if got, err := w.ns.Model(w.ctx, m.Name); err != nil || got != m {
			t.Fatal(got, err)
		}
	}
	if m, err := w.ns.ForgetModel(w.ctx, "m"); err != nil || m != (Model{"m", 64}) {
		t.Fatal(m, err)
	}
	if _, err := w.ns.ForgetModel(w.ctx, "m"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("the second time: %v", err)
	}
	for _, m := range want[:1] {
		if got, err := w.ns.Model(w.ctx, m.Name); err != nil || got != m {
			t.Fatal(got, err)
		}
	}
	if err := w.ns.RegisterModel(w.ctx, Model{"m", 32}); err != nil {
		t.Fatal(err)
	}
	if err := w.ns.RegisterModel(w.ctx, Model{"m", 64}); !errors.Is(err, ErrMismatch) {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() { errs[i] = w.ns.RegisterModel(w.ctx, Model{"race", uint32(1 + i%2)}) })
	}
	wg.Wait()
	m, err := w.ns.Model(w.ctx, "race")
	if err != nil {
		t.Fatal(err)
	}
	for i, err := range errs {
		if same := uint32(1+i%2) == m.BlockSize; same != (err == nil) {
			t.Errorf("%d against %d: %v", 1+i%2, m.BlockSize, err)
		}
	}
}

func TestEnsureStreams(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	before, err := w.ns.StreamInfo(w.ctx, 2)
	if err != nil {
		t.Fatal(err)
	}
	if before.Name != "KV_EVENTS_test_2" || before.First != 1 || before.Last != 0 || before.MaxBytes != 256<<20 ||
		before.MaxAge != 24*time.Hour || !before.atomic || before.Epoch == 0 {
		t.Fatalf("%+v", before)
	}
	if err := w.ns.EnsureStreams(w.ctx, LogConfig{}); err != nil {
		t.Fatal(err)
	}
	if same, err := w.ns.StreamInfo(w.ctx, 2); err != nil || same != before {
		t.Fatalf("%+v, %v", same, err)
	}
	if err := w.ns.EnsureStreams(w.ctx, LogConfig{MaxBytes: 1 << 20, MaxAge: time.Hour}); err != nil {
		t.Fatal(err)
	}
	after, err := w.ns.StreamInfo(w.ctx, 2)
	if err != nil || after.MaxBytes != 1<<20 || after.MaxAge != time.Hour || after.Epoch != before.Epoch {
		t.Fatalf("%+v, %v", after, err)
	}
	if _, err := w.ns.StreamInfo(w.ctx, 3); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}

	// A stream with settings that could cause unnoticed losses of events.
	w.deleteStream()
	for _, odd := range []map[string]any{
		{"retention": "workqueue"}, {"storage": "memory"}, {"max_msgs_per_subject": 1}, {"discard": "new",
			"max_bytes": 1 << 20},
		{"subjects": []string{"kv.v1.test.ev.0.w1.*"}}, {"allow_rollup_hdrs": true}, {"allow_msg_ttl": true},
	} {
		cfg := map[string]any{"name": Names("test").Stream(0), "subjects": []string{Names("test").streamSubjects(0)},
			"storage": "file", "retention": "limits"}
		for k, v := range odd {
			cfg[k] = v
		}
		if err := w.c.call(w.ctx, "create", "STREAM.CREATE."+Names("test").Stream(0), cfg, nil); err != nil {
			t.Fatal(odd, err)
		}
		if err := w.ns.EnsureStreams(w.ctx, LogConfig{}); !errors.Is(err, ErrMismatch) ||
			!strings.Contains(err.Error(), Names("test").Stream(0)) {
			t.Errorf("%v: %v", odd, err)
		}
		w.deleteStream()
	}
}

func TestPurge(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p := w.publisher(w1)
	w.publish(p, 1, 100)
	epoch := w.info().Epoch
	for _, bad := range []struct {
		epoch Epoch
		keep  uint64
	}{{epoch, 0}, {epoch, 102}, {epoch, 1 << 40}, {epoch + 1, 50}} {
		if err := w.ns.Purge(w.ctx, 0, bad.epoch, eventsSeq(bad.keep)); !errors.Is(err, ErrMismatch) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if info := w.info(); info.First != 1 || info.Last != 100 || info.Messages != 100 {
		t.Fatalf("%+v", info)
	}
	for range 2 {
		w.purge(51)
		if info := w.info(); info.First != 51 || info.Last != 100 || info.Messages != 50 {
			t.Fatalf("%+v", info)
		}
	}
	w.purge(20) // below the first message: no effect
	w.purge(101)
	if info := w.info(); info.First != 101 || info.Last != 100 || info.Messages != 0 {
		t.Fatalf("%+v", info)
	}
	w.publish(p, 101, 1)
	w.restart()
	if info := w.info(); info.First != 101 || info.Last != 101 || info.Epoch != epoch {
		t.Fatalf("%+v", info)
	}
}
