package registry

import (
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestSource: the source of a rank is the configured or the detected source, and empty after the end of the
// registration.
func TestSource(t *testing.T) {
	r := New(Config{})
	key := events.RankKey{Instance: "w"}
	name, err := jetstream.WorkerKey(0, key)
	if err != nil {
		t.Fatal(err)
	}
	record := Record{Version: 1, Instance: "w", Model: "m", BlockSize: 16, Source: "auto", LeaseMS: 30_000, State: Held}
	r.apply(jetstream.Watched{Anew: true, Current: true})
	for i, step := range []struct {
		shim    *ShimState
		deleted bool
		want    string
	}{
		{nil, false, "auto"}, {&ShimState{}, false, "auto"}, {&ShimState{Speaks: "vllm"}, false, "vllm"}, {nil, true, ""},
	} {
		record.Shim = step.shim
		text, err := record.encode()
		if err != nil {
			t.Fatal(err)
		}
		r.apply(jetstream.Watched{Entries: []jetstream.Entry{{Key: name, Value: text, Revision: uint64(i + 1),
			Deleted: step.deleted}}})
		if got := r.Source(key); got != step.want {
			t.Errorf("step %d: %q, want %q", i, got, step.want)
		}
	}
}
