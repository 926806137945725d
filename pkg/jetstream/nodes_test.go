package jetstream

import (
	"fmt"
	"testing"
	"time"
)

// TestNodesBucket writes values, and reads all at once.
func TestNodesBucket(t *testing.T) {
	w := newWorld(t, 1)
	b, err := w.ns.EnsureNodes(w.ctx, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if list, err := b.All(w.ctx); err != nil || len(list) != 0 {
		t.Fatalf("an empty bucket: %v, %v", list, err)
	}
	revisions := map[string]uint64{}
	for round := range 2 {
		for i := range 70 {
			key := fmt.Sprint("node-", i)
			if revisions[key], err = b.Commit(w.ctx, nil, Value{key, fmt.Append(nil, i+100*round)},
				revisions[key]); err != nil {
				t.Fatal(err)
			}
		}
	}
	list, err := b.All(w.ctx)
	if err != nil || len(list) != 70 {
		t.Fatalf("%d entries, %v", len(list), err)
	}
	for _, e := range list {
		var i int
		fmt.Sscanf(e.Key, "node-%d", &i)
		if e.Revision != revisions[e.Key] || string(e.Value) != fmt.Sprint(i+100) || e.Written.IsZero() {
			t.Errorf("%+v, want revision %d", e, revisions[e.Key])
		}
	}
	if _, err := w.ns.EnsureNodes(w.ctx, time.Hour); err != nil {
		t.Errorf("opened again: %v", err)
	}
}
