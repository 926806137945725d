package registry

import (
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestJunkIsErased: a node erases meaningless keys that a shim may write, and leaves all other keys.
func TestJunkIsErased(t *testing.T) {
	ns := newSite(t).ns
	bucket, err := ns.EnsureWorkers(t.Context(), jetstream.BucketConfig{})
	if err != nil {
		t.Fatal(err)
	}
	r := New(Config{Namespace: ns, Bucket: bucket})
	keys := map[string]bool{
		"5.w1.0": false, "5.w1.4095": false, "operator.w1": false, jetstream.ProbeKey: false, "serves.w1.m": false,
		"5.w1.4096": true, "5.w1.4294967295": true, "5.w1.x0": true, "5.w1.01": true, "serves.w1.=zz": true,
		"kind-of-a-later-release.w1.0": false,
	}
	for key, junk := range keys {
		revision, err := bucket.Put(t.Context(), key, []byte("x"))
		if err != nil {
			t.Fatal(err)
		}
		r.junk.see(&jetstream.Entry{Key: key, Revision: revision})
		if _, noted := r.junk[key]; noted != junk {
			t.Errorf("%s: recorded %v, want %v", key, noted, junk)
		}
	}
	r.sweepJunk(t.Context())
	left, err := bucket.Keys(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	for _, key := range left {
		there[key] = true
	}
	for key, junk := range keys {
		if there[key] == junk {
			t.Errorf("%s: left %v, junk %v", key, there[key], junk)
		}
	}
	for i := range 2 * maxJunk {
		r.junk.see(&jetstream.Entry{Key: fmt.Sprint("5.w1.x", i)})
	}
	if len(r.junk) != maxJunk {
		t.Errorf("%d keys are recorded", len(r.junk))
	}
}
