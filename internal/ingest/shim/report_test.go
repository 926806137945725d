package shim

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestLogCrowded checks that the record has the reason for events stored one by one after a while, until the end of the
// state. The state of the engine does not change it.
func TestLogCrowded(t *testing.T) {
	w := newLogWorld(t)
	bucket, err := w.ns.EnsureWorkers(w.ctx, jetstream.BucketConfig{})
	if err != nil {
		t.Fatal(err)
	}
	r, err := NewReport(w.ns, registry.Record{Instance: "w", Model: "m", BlockSize: 16}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	kept := make(chan error, 1)
	go func() { kept <- r.Keep(ctx, func() {}) }()
	says := func(want string) {
		t.Helper()
		for text := ""; !strings.Contains(text, want) || want == "" && strings.Contains(text, "slowed"); {
			entry, err := bucket.Latest(w.ctx, "0.w.0")
			if err != nil && !errors.Is(err, jetstream.ErrNotFound) {
				t.Fatal(err)
			}
			text = string(entry.Value)
		}
	}
	for i := range 2 * crowdedFor {
		if changed := r.LogCrowded(jetstream.ErrCrowded); changed != (i == crowdedFor-1) {
			t.Errorf("refusal %d: %v", i, changed)
		}
	}
	r.SetState(State{})
	says(jetstream.ErrCrowded.Error())
	if !r.LogCrowded(nil) || r.LogCrowded(nil) {
		t.Error("its end is reported once")
	}
	says("")
	if r.LogCrowded(jetstream.ErrCrowded) || r.LogCrowded(nil) {
		t.Error("a moment is reported")
	}
	cancel()
	if err := <-kept; err != nil {
		t.Error(err)
	}
}
