//go:build judges

package zmq

import (
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// TestEngineSnapshots runs an engine on real libzmq with snapshots of the held blocks, in the frames of both proposals
// for vLLM. If the replay buffer has moved on, the index has the held blocks and not the dropped blocks.
func TestEngineSnapshots(t *testing.T) {
	x := harness.StartIndexer(t, t.TempDir(), "")
	for _, c := range []struct {
		name string
		opt  pyenv.PublisherOptions
	}{
		{"replay", pyenv.PublisherOptions{Snapshots: "replay"}},
		{"own", pyenv.PublisherOptions{Snapshots: "own", Form: "array"}},
		{"own-without-replay", pyenv.PublisherOptions{Snapshots: "own", NoReplay: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.opt.BlockSize = harness.BlockSize
			engine := pyenv.StartPublisher(t, c.opt)
			at := engine.Snapshot
			if at == "" {
				at = engine.Replay
			}
			prompt := harness.Tokens(1, 12*harness.BlockSize)
			var last *uint64
			store := func(from, to int) (names []uint64) {
				_, names = engine.Store(prompt[from*harness.BlockSize:to*harness.BlockSize], last)
				last = &names[len(names)-1]
				return names
			}
			first := store(0, 6)
			engine.Remove(first[2]) // the children remain
			engine.Store(prompt[:harness.BlockSize], nil)
			engine.Forget(1)

			args := []string{"--engine-snapshot", at, "--replay-timeout", "300ms"}
			shim := startShim(t, x, engine, c.name, args...)
			x.WaitDepth(t, "m", prompt, c.name, 2)
			shim.WaitFor("had from the engine's snapshot")
			engine.Publish(pyenv.Event{Op: "store", Tokens: prompt[2*harness.BlockSize : 3*harness.BlockSize],
				Parent: &first[1], Hashes: first[2:3]})
			x.WaitDepth(t, "m", prompt, c.name, 6)
			engine.Remove(first[0]) // a copy of two
			store(6, 7)
			x.WaitDepth(t, "m", prompt, c.name, 7)

			// A gap without a replay.
			engine.Drop(3, false)
			store(7, 9)
			engine.Remove(first[5])
			engine.Remove(first[4])
			engine.Store(harness.Tokens(9000, harness.BlockSize), nil)
			x.WaitDepth(t, "m", prompt, c.name, 4)

			// While the shim is away.
			shim.Kill()
			engine.Store(prompt[:5*harness.BlockSize], nil)
			engine.Publish(pyenv.Event{Op: "store", Tokens: prompt[5*harness.BlockSize : 6*harness.BlockSize],
				Parent: &first[4], Hashes: first[5:6]})
			engine.Forget(1)
			shim = startShim(t, x, engine, c.name, args...)
			x.WaitDepth(t, "m", prompt, c.name, 9)

			// Without a snapshot for a while, the index has no blocks, and the shim requests a snapshot again.
			engine.SnapshotMode("never")
			engine.Drop(1, false)
			engine.Store(harness.Tokens(9100, harness.BlockSize), nil)
			engine.Store(harness.Tokens(9200, harness.BlockSize), nil)
			x.WaitDepth(t, "m", prompt, c.name, 0)
			shim.WaitFor("the engine gave no snapshot")
			engine.SnapshotMode("answer")
			x.WaitDepth(t, "m", prompt, c.name, 9)

			engine.Restart()
			engine.Store(prompt[:3*harness.BlockSize], nil)
			x.WaitDepth(t, "m", prompt, c.name, 3)
		})
	}
	t.Run("not offered", func(t *testing.T) {
		t.Parallel()
		engine := pyenv.StartPublisher(t, pyenv.PublisherOptions{BlockSize: harness.BlockSize})
		prompt := harness.Tokens(1, 4*harness.BlockSize)
		engine.Store(prompt[:harness.BlockSize], nil)
		engine.Store(harness.Tokens(9000, harness.BlockSize), nil)
		engine.Forget(1)
		shim := startShim(t, x, engine, "none", "--engine-snapshot", engine.Replay)
		shim.WaitFor("the engine does not offer snapshots")
		_, names := engine.Store(prompt, nil)
		x.WaitDepth(t, "m", prompt, "none", 4)
		engine.Remove(names[3])
		x.WaitDepth(t, "m", prompt, "none", 3)
	})
}
