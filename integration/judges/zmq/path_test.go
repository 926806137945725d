//go:build judges

package zmq

import (
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

func startShim(t testing.TB, x *harness.Indexer, p *pyenv.Publisher, instance string, args ...string) *harness.Process {
	t.Helper()
	args = append([]string{"run", "--engine", p.Endpoint, "--worker", instance, "--model", "m", "--block-size", "16",
		"--nats", x.NATS, "--log-repeat", "0"}, args...)
	if p.Replay != "" {
		args = append(args, "--replay", p.Replay)
	}
	return harness.Start(t, "worker-shim", args...)
}

// TestFromEngineToAnswer tests the whole path, from a publisher on real libzmq to a user's answer. The answer must stay
// right while every part is killed in turn.
func TestFromEngineToAnswer(t *testing.T) {
	for _, form := range []string{"map", "array"} {
		t.Run(form, func(t *testing.T) {
			engine := pyenv.StartPublisher(t, pyenv.PublisherOptions{Form: form, BlockSize: harness.BlockSize})
			data := t.TempDir()
			x := harness.StartIndexer(t, data, "")
			prompt := harness.Tokens(1000, 12*harness.BlockSize)
			_, first := engine.Store(prompt[:4*harness.BlockSize], nil) // before the first subscriber

			shim := startShim(t, x, engine, "w1")
			x.WaitDepth(t, "m", prompt, "w1", 4)

			_, second := engine.Store(prompt[4*harness.BlockSize:6*harness.BlockSize], &first[3])
			a := x.WaitDepth(t, "m", prompt, "w1", 6)
			if a.Blocks != 12 || a.BlockSize != harness.BlockSize || !a.Complete || len(a.Workers) != 1 ||
				len(a.Partitions) != 1 || a.Partitions[0].Seq == 0 {
				t.Fatalf("the answer is %+v", a)
			}
			engine.Remove(second[1])
			x.WaitDepth(t, "m", prompt, "w1", 5)

			// An undecodable message is skipped, without another effect, and the connection stays.
			engine.Raw([]byte("\xc1 this is no MessagePack"))
			engine.Raw(nil)
			engine.Frames([]byte("one"), []byte("two"))
			_, third := engine.Store(prompt[5*harness.BlockSize:7*harness.BlockSize], &second[0])
			x.WaitDepth(t, "m", prompt, "w1", 7)
			shim.WaitFor(`cannot be decoded`)
			shim.WaitFor(`no engine event`)
			said := shim.Said()
			// a paused engine is disconnected
			silent := len(regexp.MustCompile(`the engine's connection has ended.*peer is silent`).FindAllString(said,
				-1))
			if n := strings.Count(said, "connected to the engine"); n != 1+silent {
				t.Fatalf("the shim connected %d times:\n%s", n, said)
			}

			// A gap is filled from the engine's replay buffer.
			engine.Drop(1, true)
			_, fourth := engine.Store(prompt[7*harness.BlockSize:8*harness.BlockSize], &third[1])
			_, fifth := engine.Store(prompt[8*harness.BlockSize:9*harness.BlockSize], &fourth[0])
			x.WaitDepth(t, "m", prompt, "w1", 9)

			// The indexer and the NATS server crash while the engine continues.
			x.Kill()
			_, sixth := engine.Store(prompt[9*harness.BlockSize:10*harness.BlockSize], &fifth[0])
			x = harness.StartIndexer(t, data, x.NATS)
			x.WaitDepth(t, "m", prompt, "w1", 10)

			// So does the shim.
			shim.Kill()
			_, seventh := engine.Store(prompt[10*harness.BlockSize:11*harness.BlockSize], &sixth[0])
			shim = startShim(t, x, engine, "w1")
			x.WaitDepth(t, "m", prompt, "w1", 11)

			// The log may be trimmed beyond the shim's last message, because the snapshot has the cursor.
			for range 2 {
				if r := harness.Run(t, "indexer", "snapshot", "now", "--nats", x.NATS); r.Code != 0 {
					t.Fatalf("snapshot now: %+v", r)
				}
			}
			shim.Kill()
			shim = startShim(t, x, engine, "w1")
			shim.WaitFor("connected to the engine")

			// After a stop in good order there is a snapshot to begin with.
			x.Stop()
			engine.Store(prompt[11*harness.BlockSize:], &seventh[0])
			x = harness.StartIndexer(t, data, x.NATS)
			x.WaitFor(`msg=restored`)
			x.WaitDepth(t, "m", prompt, "w1", 12)

			if n := strings.Count(shim.Said(), "a new incarnation of the engine begins"); n != 0 {
				t.Fatalf("the shim detected %d new lives of a running engine:\n%s", n, shim.Said())
			}
			engine.Clear()
			if a := x.WaitDepth(t, "m", prompt, "w1", 0); a.Reason != api.ReasonNotCached {
				t.Fatalf("the reason is %q", a.Reason)
			}
		})
	}
}

// TestWhatCannotBeReplayedIsCleared permanently loses messages. The index must drop all earlier blocks.
func TestWhatCannotBeReplayedIsCleared(t *testing.T) {
	engine := pyenv.StartPublisher(t, pyenv.PublisherOptions{BlockSize: harness.BlockSize})
	x := harness.StartIndexer(t, t.TempDir(), "")
	shim := startShim(t, x, engine, "w1")
	prompt := harness.Tokens(1, 4*harness.BlockSize)
	engine.Store(prompt, nil)
	x.WaitDepth(t, "m", prompt, "w1", 4)

	engine.Drop(1, false)
	engine.Clear() // lost
	other := harness.Tokens(9000, 2*harness.BlockSize)
	engine.Store(other, nil)
	x.WaitDepth(t, "m", other, "w1", 2)
	x.WaitDepth(t, "m", prompt, "w1", 0)
	shim.WaitFor(`could not be replayed`)

	// A new life of the engine without notice: the sequence restarts.
	engine.Do(map[string]any{"op": "restart"}, nil)
	engine.Store(prompt[:harness.BlockSize], nil)
	x.WaitDepth(t, "m", prompt, "w1", 1)
	x.WaitDepth(t, "m", other, "w1", 0)
}
