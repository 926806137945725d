package jetstream

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
)

// watchModels runs Models until the test ends.
func (w *world) watchModels(log *slog.Logger, changed func()) *Models {
	w.t.Helper()
	m := NewModels(w.ns, log, changed)
	ctx, end := context.WithCancel(w.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.Run(ctx)
	}()
	w.t.Cleanup(func() {
		end()
		<-done
	})
	return m
}

// TestModelsAreStoredBeforeAwait: a node that has waited for the records must not see an unknown model.
func TestModelsAreStoredBeforeAwait(t *testing.T) {
	t.Parallel()
	key, err := modelKey("m")
	if err != nil {
		t.Fatal(err)
	}
	var m *Models
	early := false
	m = NewModels(nil, logtest.New(func(logtest.Line) {}), func() {
		select {
		case <-m.current:
			early = true
		default:
		}
	})
	m.observe(Watched{Anew: true, Current: true,
		Entries: []Entry{{Key: key, Value: []byte(`{"model":"m","block_size":16}`)}}})
	if <-m.current; early || m.BlockSize("m") != 16 {
		t.Errorf("Await ends before the sizes are stored: %v; block size %d", early, m.BlockSize("m"))
	}
}

func TestModelsAreWatched(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2)
	changed, bad := make(chan struct{}, 100), make(chan string, 100)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(w.ns.RegisterModel(w.ctx, Model{"a/b c", 16}))
	m := w.watchModels(logtest.New(func(l logtest.Line) {
		key, _ := l.Attrs["key"].(string)
		if err, _ := l.Attrs["error"].(error); !errors.Is(err, errBadModel) {
			t.Errorf("%s %s: %v", l.Text, key, err)
		}
		bad <- key
	}), func() { changed <- struct{}{} })
	if m.Await(w.ctx); m.BlockSize("a/b c") != 16 || m.BlockSize("m") != 0 {
		t.Fatalf("%d, %d", m.BlockSize("a/b c"), m.BlockSize("m"))
	}
	<-changed
	until := func(model string, size uint32) {
		t.Helper()
		for m.BlockSize(model) != size {
			select {
			case <-changed:
			case <-w.ctx.Done():
				t.Fatalf("%s has %d, not %d", model, m.BlockSize(model), size)
			}
		}
	}
	must(w.ns.RegisterModel(w.ctx, Model{"m", 32}))
	until("m", 32)
	key, _ := modelKey("m")
	for _, text := range []string{"", "{", `{"model":"other","block_size":8}`, `{"model":"m","block_size":0}`,
		`{"model":"m","block_size":65536}`} {
		there, err := w.ns.meta.Latest(w.ctx, key)
		must(err)
		must(w.ns.meta.replace(w.ctx, key, []byte(text), there.Revision))
		if <-bad != key || m.BlockSize("m") != 32 {
			t.Errorf("%q: block size %d", text, m.BlockSize("m"))
		}
		if err := w.ns.RegisterModel(w.ctx, Model{"m", 32}); err != nil { // a shim that starts
			t.Errorf("%q: %v", text, err)
		}
		if got, err := w.ns.Model(w.ctx, "m"); err != nil || got.BlockSize != 32 {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	_, err := w.ns.ForgetModel(w.ctx, "m")
	must(err)
	until("m", 0)
	must(w.ns.RegisterModel(w.ctx, Model{"m", 64}))
	until("m", 64)
}

// TestRecordIsKept: a running node writes the namespace's record again after every kind of loss.
func TestRecordIsKept(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3)
	restored := make(chan error, 10)
	log := logtest.New(func(l logtest.Line) {
		if l.Text != "the namespace's record was lost; it is written again" {
			t.Errorf("%s %v", l.Text, l.Attrs)
		}
		err, _ := l.Attrs["error"].(error)
		restored <- err
	})
	m := w.watchModels(log, func() {})
	m.Await(w.ctx)
	revision := func() uint64 {
		e, _, err := w.ns.meta.last(w.ctx, namespaceKey)
		if err != nil {
			t.Fatal(err)
		}
		return e.Revision
	}
	for name, lose := range map[string]func() error{
		"garbled": func() error {
			return w.ns.meta.replace(w.ctx, namespaceKey, []byte(`{"node":"n1","problems":[]}`), revision())
		},
	} {
		if err := lose(); err != nil {
			t.Fatal(name, err)
		}
		if err := <-restored; !recordLost(err) {
			t.Errorf("%s: %v", name, err)
		}
		if ns, err := JoinNamespace(w.ctx, w.c, NamespaceConfig{Name: "test"}); err != nil || ns.Partitions() != 3 {
			t.Errorf("%s: %v, %v", name, ns, err)
		}
	}
	// Erased without a marker while no watch ran: the next watch detects the loss.
	if err := w.ns.meta.Erase(w.ctx, namespaceKey, revision()); err != nil {
		t.Fatal(err)
	}
	w.watchModels(log, func() {})
	if err := <-restored; !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
}

// TestModelsAreRegisteredOnce: the server refuses to replace or delete a model's record, also in buckets of earlier
// releases with delete markers. Only a node can erase the record.
func TestModelsAreRegisteredOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	stream := BucketStream(Names("test").MetaBucket())
	a, err := w.c.streamInfo(w.ctx, stream)
	if err != nil {
		t.Fatal(err)
	}
	a.Config.DiscardNewPerSubject = false
	if err := w.c.call(w.ctx, "update", "STREAM.UPDATE."+stream, a.Config, nil); err != nil {
		t.Fatal(err)
	}
	if err := w.ns.RegisterModel(w.ctx, Model{"old", 8}); err != nil {
		t.Fatal(err)
	}
	key, _ := modelKey("old")
	there, err := w.ns.meta.Latest(w.ctx, key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.ns.meta.Delete(w.ctx, key, there.Revision); err != nil {
		t.Fatal(err)
	}
	if _, err := JoinNamespace(w.ctx, w.c, NamespaceConfig{Name: "test"}); err != nil {
		t.Fatal(err)
	}
	for _, model := range []string{"old", "new"} {
		if err := w.ns.RegisterModel(w.ctx, Model{model, 16}); err != nil {
			t.Fatal(err)
		}
		key, _ := modelKey(model)
		for _, header := range []nats.Header{nil, {headerKVOperation: {"DEL"}}, {headerKVOperation: {"PURGE"}}} {
			if _, err := w.c.store(w.ctx, stream, &nats.Msg{Subject: KeySubject(Names("test").MetaBucket(), key), Header: header,
				Data: []byte(`{"model":"m","block_size":999}`)}); err == nil {
				t.Errorf("%s: a record was replaced with headers %v", model, header)
			}
		}
		if m, err := w.ns.Model(w.ctx, model); err != nil || m.BlockSize != 16 {
			t.Errorf("%s: %v, %v", model, m, err)
		}
		for range 2 {
			if _, err := w.ns.ForgetModel(w.ctx, model); err != nil {
				t.Fatal(err)
			}
			if err := w.ns.RegisterModel(w.ctx, Model{model, 32}); err != nil {
				t.Errorf("%s, after ForgetModel: %v", model, err)
			}
		}
	}
}
