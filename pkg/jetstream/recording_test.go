package jetstream

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"
)

// TestRecording: batches are stored once and read in order, the limits are applied, all nodes have one secret, and the
// namespace's streams include the recording.
func TestRecording(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	ctx := ctxFor(t)
	reader := OpenRecording(w.c, w.ns.Name())
	if _, err := reader.Info(ctx); !errors.Is(err, ErrNotFound) {
		t.Fatalf("without a stream: %v", err)
	}
	r, err := w.ns.EnsureRecording(ctx, RecordingConfig{MaxBytes: 1 << 20, MaxAge: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"a", "b", "a"} { // the last is a repeated attempt
		if err := r.Store(ctx, "node 1", id, []byte("batch "+id)); err != nil {
			t.Fatal(err)
		}
	}
	info, err := reader.Info(ctx)
	if err != nil || info.Batches != 2 || info.First != 1 || info.Last != 2 || info.MaxAge != time.Hour ||
		info.MaxBytes != 1<<20 || time.Since(info.Oldest) > time.Hour {
		t.Fatalf("%+v, %v", info, err)
	}
	got := ""
	for seq := info.First; seq <= info.Last; {
		b, err := reader.Next(ctx, seq)
		if err != nil {
			t.Fatal(err)
		}
		got += fmt.Sprintf("%d %s %s;", b.Seq, b.Node, b.Data)
		seq = b.Seq + 1
	}
	if got != "1 node 1 batch a;2 node 1 batch b;" {
		t.Error(got)
	}
	if _, err := reader.Next(ctx, info.Last+1); !errors.Is(err, ErrNotFound) {
		t.Errorf("beyond the end: %v", err)
	}
	if err := r.Store(ctx, "n", "c", make([]byte, 2<<20)); !errors.Is(err, ErrTooLarge) {
		t.Error(err)
	}
	if r, err = w.ns.EnsureRecording(ctx, RecordingConfig{MaxAge: 2 * time.Hour}); err != nil {
		t.Fatal(err)
	}
	if info, err = r.Info(ctx); err != nil || info.MaxAge != 2*time.Hour || info.MaxBytes != 1<<20 {
		t.Errorf("after a change: %+v, %v", info, err)
	}
	secret, err := w.ns.Secret(ctx, bytes.Repeat([]byte{1}, 32))
	other, err2 := w.ns.Secret(ctx, bytes.Repeat([]byte{2}, 32))
	if err != nil || err2 != nil || !bytes.Equal(secret, other) || secret[0] != 1 {
		t.Errorf("%x, %v; %x, %v", secret, err, other, err2)
	}
	list, err := w.c.NamespaceStreams(ctx, w.ns.Name())
	there := map[string]bool{}
	for _, s := range list {
		there[s.Name] = true
	}
	if err != nil || !there[w.ns.name.RecordingStream()] || !there[BucketStream(w.ns.name.SecretBucket())] {
		t.Errorf("%+v, %v", list, err)
	}
	subject, err := Names("ns").record("a.b")
	node, ok := Names("ns").parseRecord(subject)
	if err != nil || !ok || node != "a.b" {
		t.Errorf("%s: %q, %v, %v", subject, node, ok, err)
	}
	if ns, ok := ParseNamespace("$JS.API.STREAM.INFO.KV_RECORD_prod"); !ok || ns != "prod" {
		t.Errorf("namespace %q, %v", ns, ok)
	}
}
