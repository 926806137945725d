package capacity

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// curveSource computes reports for the board of a test.
type curveSource struct {
	mu       sync.Mutex
	models   []string
	failing  string // a model
	computed []string
	takes    time.Duration
}

func (s *curveSource) list() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.models
}

func (s *curveSource) compute(_ context.Context, model string) (*api.Capacity, error) {
	time.Sleep(s.takes)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.computed = append(s.computed, model); model == s.failing {
		return nil, errors.New("not ready")
	}
	return curveReport(), nil
}

// change sets the models and the failing one, and returns the computed models since the last call.
func (s *curveSource) change(failing string, models ...string) (computed string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	computed = strings.Join(s.computed, " ")
	s.models, s.failing, s.computed = models, failing, nil
	return computed
}

func curveReport() *api.Capacity {
	return &api.Capacity{Samples: 1, Tiers: make([]api.CapacityTier, 1)}
}

// runBoard runs a board until the returned function is called.
func runBoard(s *curveSource) (b *Board, stop func()) {
	b = NewBoard(BoardConfig{Models: s.list, Compute: s.compute})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { b.Run(ctx); close(done) }()
	return b, func() { cancel(); <-done }
}

// TestBoard: a reader starts a round, at most once a minute. Without a reader nothing is computed. A removed model, a
// failure, and old age remove the figures.
func TestBoard(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &curveSource{takes: time.Microsecond}
		s.change("", "a", "b")
		b, stop := runBoard(s)
		defer stop()
		for _, step := range []struct {
			what         string
			pause        time.Duration
			has          string // at the read after the pause
			computed     string // until a moment after the read
			failing, now string // from then on
		}{
			{"the first read", time.Hour, "", "a b", "", "a b"},
			{"within the minute", time.Second, "a b", "", "a", "a c"},
			{"a minute later, a fails and b is gone", boardEvery, "c", "a c", "", "a c"},
			{"the read before starts a round", boardEvery, "a c", "a c", "", "a c"},
			{"the last read starts a round too", boardEvery, "a c", "a c", "", "a c"},
			{"after a pause of the reader", 2 * boardAge, "", "a c a c", "", "a c"},
		} {
			time.Sleep(step.pause)
			if got := strings.Join(slices.Sorted(maps.Keys(b.Tiers())), " "); got != step.has {
				t.Errorf("%s: %q, want %q", step.what, got, step.has)
			}
			time.Sleep(time.Second)
			if got := s.change(step.failing, strings.Fields(step.now)...); got != step.computed {
				t.Errorf("%s: computed %q, want %q", step.what, got, step.computed)
			}
		}
	})
}

// TestBoardPost: a report without requests, or without the samples of a node, removes the figures.
func TestBoardPost(t *testing.T) {
	t.Parallel()
	b := NewBoard(BoardConfig{})
	for what, change := range map[string]func(*api.Capacity){
		"missing":  func(c *api.Capacity) { c.Missing = []string{"n"} },
		"disabled": func(c *api.Capacity) { c.Disabled = []string{"n"} },
		"empty":    func(c *api.Capacity) { c.Samples = 0 },
	} {
		if b.post("a", curveReport(), nil); len(b.Tiers()["a"]) != 1 {
			t.Errorf("%s: a complete report is missing", what)
		}
		c := curveReport()
		change(c)
		if b.post("a", c, nil); len(b.Tiers()) != 0 {
			t.Errorf("%s: %v", what, b.Tiers())
		}
	}
}

// TestBoardPause: a board computes during at most 1 % of the time, also with too many models.
func TestBoardPause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &curveSource{takes: 50 * time.Millisecond}
		s.change("", make([]string, 2*maxModels)...)
		b, stop := runBoard(s)
		defer stop()
		const pause, reads = 15 * time.Second, 100
		for range reads {
			b.Tiers()
			time.Sleep(pause)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		busy := time.Duration(len(s.computed)) * s.takes
		if busy < reads*pause/200 || busy > reads*pause/100+s.takes {
			t.Errorf("%v of %v", busy, reads*pause)
		}
	})
}
