package integration

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/vmihailenco/msgpack/v5"
)

// newLives returns how many new incarnations a shim has reported.
func newLives(p *harness.Process) int {
	return strings.Count(p.Said(), "a new incarnation of the engine begins")
}

// TestSeveralEnginesAtOneWorker connects three engines without separate topics to the shim of a worker. The shim
// follows a single engine: every answer has the blocks of this engine. The shim, the status and the doctor report the
// other engines until the end, and no message begins an incarnation.
func TestSeveralEnginesAtOneWorker(t *testing.T) {
	t.Parallel()
	var subtests testkit.Group
	defer subtests.Wait()
	for name, topics := range map[string][]string{
		"one topic": {"kv-events", "kv-events", "kv-events"},
		"no topic":  {"", "", ""},
		"topics":    {"kv@10.0.0.1:8000@m", "kv@10.0.0.2:8000@m", "kv@10.0.0.3@m"},
	} {
		subtests.Run(t, name, func(t *testing.T) {
			x := harness.StartIndexer(t, t.TempDir(), "")
			shim := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", "ipc://"+t.TempDir()+"/shim", "--listen",
				"--worker", "w", "--model", "m", "--block-size", "16")
			shim.WaitFor("msg=registered")
			c := &central{t: t, x: x, shim: shim, where: "ipc://" + shim.WaitFor(`engine=ipc://(\S+)`)[1]}
			var engines []*enginesim.Engine
			prompts := [][]uint32{harness.Tokens(1, 4*16), harness.Tokens(1000, 6*16), harness.Tokens(2000, 8*16)}
			for i, topic := range topics {
				engines = append(engines, c.engine(enginesim.Config{Topic: topic, Seed: uint64(i)}))
				harness.ServePrompt(t, engines[i], prompts[i])
				if i == 0 {
					c.answers("with the first alone", engines[0], prompts)
				}
			}
			shim.WaitFor("several engines publish to this shim; a single engine is followed")
			for range 30 {
				for i, e := range engines {
					harness.ServePrompt(t, e, prompts[i])
					harness.ServePrompt(t, e, append(harness.Tokens(5000*(i+1), 2*16), prompts[i][:16]...))
					if err := e.Clear(); err != nil {
						t.Fatal(err)
					}
					harness.ServePrompt(t, e, prompts[i])
				}
			}
			followed := engines[2] // the newest connection of the topic
			if name == "topics" {
				followed = engines[0]
			}
			c.answers("with three", followed, prompts)
			if n := newLives(shim); n > len(engines) { // at most one for every followed engine
				t.Errorf("%d incarnations\n%s", n, shim.Said())
			}
			harness.Eventually(t, "status and doctor report the engines", func() (bool, string) {
				status := strings.Join(harness.Status(t, x.NATS).Problems, "\n")
				doctor := harness.Run(t, "indexer", "doctor", "--nats", x.NATS, "--json").Stdout
				return strings.Contains(status, "several engines publish to the shims of 1 ranks") &&
					strings.Contains(doctor, "several_engines"), status + "\n" + doctor
			})
			for _, e := range engines {
				if e != followed {
					e.Crash()
				}
			}
			shim.WaitFor("one engine publishes to this shim again")
			harness.Eventually(t, "the status no longer reports the engines", func() (bool, string) {
				status := strings.Join(harness.Status(t, x.NATS).Problems, "\n")
				return !strings.Contains(status, "several engines"), status
			})
			c.answers("with one again", followed, prompts)
			followed.Crash()
			other := c.engine(enginesim.Config{Topic: topics[1], Seed: 9})
			harness.ServePrompt(t, other, prompts[1])
			c.answers("with another engine", other, prompts)
		})
	}
}

// answers waits until every answer about worker w has an engine's blocks.
func (c *central) answers(when string, e *enginesim.Engine, prompts [][]uint32) {
	c.t.Helper()
	c.agrees(when, simulatedFleet{"w/0": {"m", e}}, []string{"m"}, prompts)
}

// TestSeveralRanksAtOneSocket has a publisher with the messages of two ranks in a single sequence. The messages of the
// other rank are skipped, including the clear.
func TestSeveralRanksAtOneSocket(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	shim := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", "ipc://"+t.TempDir()+"/shim", "--listen",
		"--worker", "w", "--model", "m", "--block-size", "16", "--source", "vllm")
	shim.WaitFor("msg=registered")
	pub := dialIn(t, "ipc://"+shim.WaitFor(`engine=ipc://(\S+)`)[1])
	prompt := harness.Tokens(1, 3*16)
	seq := uint64(0)
	say := func(rank events.Rank, events ...[]any) {
		t.Helper()
		payload := msgpackOf(t, []any{1.0, events, rank})
		if err := pub.Send([]byte("kv"), number(seq), payload); err != nil {
			t.Fatal(err)
		}
		seq++
	}
	stored := func(first uint64, tokens []uint32) []any {
		var names []uint64
		for i := range len(tokens) / 16 {
			names = append(names, first+uint64(i))
		}
		return []any{"BlockStored", names, nil, tokens, 16, nil, "GPU"}
	}
	say(3, stored(1, prompt)) // of another rank, which is credited until the shimmed rank publishes
	x.WaitDepth(t, "m", prompt, "w", 3)
	shim.WaitFor("the engine's messages name a different data-parallel rank; the blocks are credited to this " +
		"rank.*engine_rank=3")
	say(0, stored(11, prompt[:32]))
	x.WaitDepth(t, "m", prompt, "w", 2)
	say(1, []any{"AllBlocksCleared"})
	say(3, stored(1, prompt))
	say(0, stored(21, harness.Tokens(900, 16)))
	x.WaitDepth(t, "m", harness.Tokens(900, 16), "w", 1)
	x.WaitDepth(t, "m", prompt, "w", 2)
	shim.WaitFor("several data-parallel ranks publish through one socket")
	if n := newLives(shim); n != 1 {
		t.Errorf("%d incarnations", n)
	}
}

// TestSeveralEnginesBehindAForwarder connects two engines through a single connection with the same topic. Only the
// message numbers distinguish the engines. The shim does not begin an incarnation with every message, and the worker
// holds no block.
func TestSeveralEnginesBehindAForwarder(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	shim := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", "ipc://"+t.TempDir()+"/shim", "--listen",
		"--worker", "w", "--model", "m", "--block-size", "16")
	shim.WaitFor("msg=registered")
	pub := dialIn(t, "ipc://"+shim.WaitFor(`engine=ipc://(\S+)`)[1])
	prompts := [][]uint32{harness.Tokens(1, 16), harness.Tokens(900, 16)}
	for seq := range uint64(200) {
		for i, prompt := range prompts {
			payload := msgpackOf(t, []any{1.0, []any{[]any{"BlockStored", []uint64{seq*2 + uint64(i) + 1}, nil, prompt, 16, nil,
				"GPU"}}, 0})
			if err := pub.Send(nil, number(seq+uint64(i)*50), payload); err != nil {
				t.Fatal(err)
			}
		}
	}
	shim.WaitFor("several engines publish to this shim.*message numbers contradict each other")
	for _, prompt := range prompts {
		x.WaitDepth(t, "m", prompt, "w", 0)
	}
	if n := newLives(shim); n > 6 {
		t.Errorf("%d incarnations\n%s", n, shim.Said())
	}
	harness.Eventually(t, "the engine is connected", func() (bool, string) {
		w := harness.WaitLease(t, x, "w", true)
		return w.Engine == api.EngineConnected, fmt.Sprintf("%+v", w)
	})
}

func msgpackOf(t *testing.T, v any) []byte {
	t.Helper()
	b, err := msgpack.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
