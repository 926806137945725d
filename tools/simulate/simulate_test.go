package simulate

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// TestSimulateEndsWell ends a simulated engine many times in the middle of its work, as SIGTERM does. The end is not an
// error.
func TestSimulateEndsWell(t *testing.T) {
	for i := range 20 {
		s := &simulating{endpoint: "tcp://127.0.0.1:0", replay: "tcp://127.0.0.1:0", blockSize: 512, capacity: 100,
			requests: 10, rate: 10_000}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Millisecond)
		if err := s.run(ctx, slog.New(slog.DiscardHandler)); err != nil {
			t.Errorf("run %d ended with %v", i, err)
		}
		cancel()
	}
}

// TestPrintPrompt checks that --print-prompt leaves the whole last prompt.
func TestPrintPrompt(t *testing.T) {
	file := filepath.Join(t.TempDir(), "prompt.json")
	s := &simulating{
		endpoint: "tcp://127.0.0.1:0", replay: "tcp://127.0.0.1:0", blockSize: 512, capacity: 100, requests: 1,
		rate: 10_000, promptFile: file,
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.run(ctx, slog.New(slog.DiscardHandler)) }()
	var text []byte
	testkit.Eventually(t, "the file is written", func() bool {
		text, _ = os.ReadFile(file)
		return text != nil || len(ended) > 0
	})
	cancel()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	var tokens []uint32
	if err := json.Unmarshal(text, &tokens); err != nil || len(tokens) < 512 {
		t.Errorf("%d tokens, %v", len(tokens), err)
	}
	s.promptFile = filepath.Join(t.TempDir(), "absent", "prompt.json")
	if err := s.run(t.Context(), slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a missing folder is not an error")
	}
}

// TestOnce checks that an engine with --once writes the last of its requests and stays idle.
func TestOnce(t *testing.T) {
	file, first := filepath.Join(t.TempDir(), "prompt.json"), ""
	for range 2 {
		log := &recorded{idle: make(chan struct{})}
		s := &simulating{endpoint: "tcp://127.0.0.1:0", replay: "tcp://127.0.0.1:0", blockSize: 512, capacity: 100,
			seed: 1, requests: 10, rate: 10_000, once: true, promptFile: file}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.run(ctx, slog.New(log)) }()
		testkit.Eventually(t, "the engine is idle", func() bool {
			select {
			case <-log.idle:
				return true
			default:
				return len(ended) > 0
			}
		})
		cancel()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil || first != "" && string(text) != first {
			t.Errorf("the last prompts are %q and %q, %v", first, text, err)
		}
		if first = string(text); log.served != 10 {
			t.Errorf("%d requests were served", log.served)
		}
	}
}

// recorded counts served requests in the log, and closes idle.
type recorded struct {
	slog.Handler
	served int
	idle   chan struct{}
}

func (r *recorded) Enabled(context.Context, slog.Level) bool { return true }

func (r *recorded) Handle(_ context.Context, line slog.Record) error {
	switch {
	case line.Message == "served":
		r.served++
	case strings.HasSuffix(line.Message, "stays idle"):
		close(r.idle)
	}
	return nil
}
