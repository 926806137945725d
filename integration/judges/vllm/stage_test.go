//go:build realvllm

package vllm

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// stage is an engine, its shim, an indexer with an embedded NATS server, and a twin.
type stage struct {
	t      *testing.T
	engine *engine
	table  *table

	data, nats string
	indexer    *harness.Indexer
	shim       *harness.Process
	corrected  int // correction events of restarted shims

	twin     *twin
	stopTwin func()
	fences   *generator // of prompts outside of all other generators
}

// newStage starts all parts for a model.
func newStage(t *testing.T, m model, into *table) *stage {
	t.Helper()
	s := &stage{t: t, engine: newEngine(t, m), table: into}
	s.data, s.nats = filepath.Join(t.TempDir(), "data"), loopback.Reserve(t)
	s.fences = newGenerator(1<<32, 1<<32, blockSize, false)
	s.startIndexer()
	s.startShim()
	s.startEngine()
	return s
}

func (s *stage) startIndexer() {
	s.t.Helper()
	s.indexer = harness.StartIndexer(s.t, s.data, s.nats)
}

// startShim starts a shim with full flags, or a shim that reads the settings from the engine.
func (s *stage) startShim() {
	s.t.Helper()
	about := []string{"--engine-http", "http://" + s.engine.http}
	if !s.engine.model.learned {
		about = []string{
			"--engine", "tcp://" + s.engine.events, "--replay", "tcp://" + s.engine.replay,
			"--model", s.engine.model.name, "--block-size", fmt.Sprint(blockSize),
		}
	}
	args := append([]string{"run", "--nats", s.nats, "--worker", instance}, about...)
	s.shim = harness.Start(s.t, "worker-shim", args...)
}

// instance is the engine's worker name.
const instance = "engine-1"

// startEngine starts the engine and a new twin, which subscribes before the first event. It returns the time of
// readiness.
func (s *stage) startEngine() time.Time {
	s.t.Helper()
	s.corrected = 0
	if s.stopTwin != nil {
		s.stopTwin()
	}
	var opened func()
	s.twin, opened, s.stopTwin = newListener(s.t, s.engine.events, blockSize)
	s.engine.start()
	ready := time.Now()
	opened()
	return ready
}

// newListener returns a twin that subscribes to the events of an engine, which may start later. opened waits for the
// twin's connection. stop ends the subscription; the end of the test does too.
func newListener(t *testing.T, events string, blockSize int) (of *twin, opened, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	often := zmtp.Config{BackoffMin: 10 * time.Millisecond, BackoffMax: 50 * time.Millisecond}
	sub, err := zmtp.DialSub(ctx, "tcp://"+events, []string{""}, often)
	if err != nil {
		t.Fatal(err)
	}
	stop = func() {
		cancel()
		sub.Stop()
	}
	t.Cleanup(stop)
	of = newTwin(blockSize)
	connected := make(chan struct{})
	go listen(sub, of, connected)
	return of, func() {
		t.Helper()
		select {
		case <-connected:
		case <-time.After(harness.Patience):
			t.Fatal("the twin cannot connect")
		}
	}, stop
}

// listen passes the engine's messages to the twin until the end of the connection. opened is closed at the start.
func listen(sub *zmtp.Sub, into *twin, opened chan<- struct{}) {
	for {
		m, err := sub.Recv(context.Background())
		switch {
		case err != nil:
			into.fail(err)
			return
		case m.Kind == zmtp.Opened:
			close(opened)
		case m.Kind == zmtp.Closed:
			into.fail(fmt.Errorf("the twin's connection has ended: %w", m.Err))
			return
		default:
			if into.apply(m.Frames) != nil {
				return
			}
		}
	}
}

// find queries kvatlas for the number of a prompt's reusable blocks.
func (s *stage) find(p prompt) (int, error) {
	asked := p.reusable()
	if len(asked.tokens) < blockSize {
		return 0, nil
	}
	q := api.Query{Model: s.engine.model.name, Tokens: asked.tokens, LoRA: asked.lora, CacheSalt: asked.salt}
	var a api.Answer
	if err := harness.HTTPDo(s.indexer.HTTP, "POST", "/v1/find", q, &a); err != nil {
		return 0, err
	}
	if !a.Complete {
		return 0, fmt.Errorf("an incomplete answer: %+v", a)
	}
	for _, w := range a.Workers {
		if w.Instance == instance {
			if w.Bound != "" {
				return 0, fmt.Errorf("the answer is but an upper bound: %+v", w)
			}
			return int(w.Device), nil
		}
	}
	return 0, nil
}

// worker returns kvatlas's information about the engine.
func (s *stage) worker() (w api.WorkerInfo, err error) {
	var list api.WorkerList
	if err := harness.HTTPDo(s.indexer.HTTP, "GET", "/v1/workers", nil, &list); err != nil {
		return w, err
	}
	for _, w := range list.Workers {
		if w.Instance == instance {
			return w, nil
		}
	}
	return w, errors.New("kvatlas does not have the worker")
}

// known returns kvatlas's number of the engine's events. An incarnation begins with an event of the shim.
func (s *stage) known() (int, error) {
	w, err := s.worker()
	return int(w.LastEvent) - 1 - s.corrected, err
}

// restartShim starts a shim that continues after a killed shim, and waits until the log has all catch-up events.
func (s *stage) restartShim() {
	s.t.Helper()
	s.startShim()
	s.shim.WaitFor(`caught up`)
	for _, line := range regexp.MustCompile(`published again.* events=(\d+)`).FindAllStringSubmatch(s.shim.Said(), -1) {
		n, err := strconv.Atoi(line[1])
		if err != nil {
			s.t.Fatal(err)
		}
		s.corrected += n
	}
	s.catchUp()
}

// settle waits until kvatlas has all events of the engine. It returns the result of fence.
func (s *stage) settle() (heldBack int) {
	s.t.Helper()
	heldBack = s.fence()
	s.catchUp()
	return heldBack
}

// fence waits until the twin has all events of the engine. It sends a request that stores a single block: the
// announcement of the block follows all earlier events. It returns the number of removals that the engine held back.
func (s *stage) fence() (heldBack int) {
	s.t.Helper()
	r := request{prompt: prompt{tokens: s.fences.tokens(blockSize)}, maxTokens: 1, n: 1}
	_, before, _ := s.twin.now()
	if _, err := s.engine.complete(r); err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	if err := s.twin.wait(ctx, func() bool { return s.twin.holdsAll(r.prompt) }); err != nil {
		s.t.Fatal(err)
	}
	messages := s.twin.messagesFrom(before)
	// a new block of every group may evict another block
	return max(0, messages[len(messages)-1].removed-s.twin.groupCount())
}

// catchUp waits until kvatlas has the twin's events.
func (s *stage) catchUp() {
	s.t.Helper()
	_, _, events := s.twin.now()
	err := s.await(func() (bool, error) {
		known, err := s.known()
		if known > events {
			s.t.Fatalf("kvatlas has %d of %d events", known, events)
		}
		return known == events, err
	})
	if err != nil {
		s.t.Fatalf("kvatlas does not receive %d events: %v", events, err)
	}
}

// await polls a condition.
func (s *stage) await(condition func() (bool, error)) error {
	for deadline := time.Now().Add(harness.Patience); ; time.Sleep(2 * time.Millisecond) {
		ok, err := condition()
		if ok {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.Join(errors.New("in vain"), err)
		}
	}
}

// check compares kvatlas's and the twin's numbers of held blocks.
func (s *stage) check() {
	s.t.Helper()
	w, err := s.worker()
	if err != nil {
		s.t.Fatal(err)
	}
	if want := s.twin.fullBlocks(); int(w.Blocks.Device) != want {
		s.t.Errorf("kvatlas has %d blocks, the twin %d", w.Blocks.Device, want)
	}
}
