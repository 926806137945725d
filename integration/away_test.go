package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestNATSAwayForLong stops the NATS server for longer than the capacity of the shim's queue and of the engine's replay
// buffer. The shim stops reading, and then the engine drops messages. The memory of the shim is bounded. After the
// return of the server, the rank is cleared, with a log line and a count. The index never has blocks that the engine
// does not hold, and soon has all blocks.
func TestNATSAwayForLong(t *testing.T) {
	t.Parallel()
	addr, conf := loopback.Reserve(t), filepath.Join(t.TempDir(), "nats.conf")
	text := fmt.Sprintf("listen: %q\njetstream { store_dir: %q, max_file_store: 1TB }\n", addr, t.TempDir())
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	startServer := func() *harness.Process {
		server := harness.Start(t, "nats-server", "-c", conf)
		server.WaitFor("Server is ready")
		return server
	}
	server := startServer()
	x := harness.Start(t, "indexer", "serve", "--nats", "nats://"+addr, "--http-listen", "127.0.0.1:0", "--partitions",
		"4")
	http := x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
	x.WaitFor(`msg=ready`)
	e := followEngine(t, enginesim.Config{Buffer: 10, HighWater: 10})
	shim := harness.StartSimShim(t, e.Engine, addr, "w1", "--queue-bytes", strconv.Itoa(1<<20), "--log-repeat", "1s")
	shim.WaitFor("connected to the engine")
	e.serve(t, 5)
	e.await(t, http)

	server.Kill()
	// After a single drop, the replay buffer may still have the message. A longer run of drops exceeds the buffer.
	testkit.Eventually(t, "the shim stops reading", func() bool {
		before := e.State()
		e.serve(t, 100)
		now := e.State()
		said := uint64(now.NextSeq - before.NextSeq)
		return said > 10 && now.Dropped-before.Dropped == said
	})
	if peak := peakMemory(t, shim); peak > 256<<20 {
		t.Errorf("the shim has taken %d bytes", peak)
	}
	if err := e.judge(http, "w1", false); err == nil {
		t.Error("the index has unpublished blocks")
	}
	startServer()
	e.serve(t, 1)
	shim.WaitFor(`could not be replayed; the rank's holdings are cleared`)
	mark := harness.Tokens(77_000_000, harness.BlockSize)
	harness.ServePrompt(t, e.Engine, mark)
	locals := e.hasher.Hash(nil, mark)
	harness.Eventually(t, "the index has all events", func() (bool, string) {
		depth, err := deviceDepth(http, "w1", locals)
		return depth == 1, fmt.Sprint(depth, err)
	})
	if err := e.judge(http, "w1", true); err != nil {
		t.Error(err)
	}
	if err := e.Clear(); err != nil {
		t.Fatal(err)
	}
	e.serve(t, 5)
	e.await(t, http)
}

// deviceDepth returns the number of a prompt's blocks on a worker.
func deviceDepth(addr, worker string, locals []events.LocalHash) (uint32, error) {
	a, err := harness.FindLocals(addr, locals)
	if err != nil {
		return 0, err
	}
	for _, o := range a.Workers {
		if string(o.Instance) == worker {
			return o.Device, nil
		}
	}
	return 0, nil
}

// peakMemory returns the peak memory of a process in bytes; 0 if unknown.
func peakMemory(t *testing.T, p *harness.Process) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Cmd.Process.Pid))
	if err != nil {
		t.Logf("the shim's memory is not looked at: %v", err)
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			n, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	return 0
}

// TestStopWhileNATSIsAway checks that a node in a cluster and a shim stop soon and without an error during an outage or
// a hang of the NATS server, for any drain time.
func TestStopWhileNATSIsAway(t *testing.T) {
	t.Parallel()
	var subtests testkit.Group
	defer subtests.Wait()
	for name, away := range map[string]os.Signal{"gone": syscall.SIGKILL, "hangs": syscall.SIGSTOP} {
		subtests.Run(t, name, func(t *testing.T) {
			addr := loopback.Reserve(t)
			server := harness.Start(t, "nats-server", "-js", "-sd", t.TempDir(), "-a", "127.0.0.1", "-p",
				addr[strings.LastIndex(addr, ":")+1:])
			server.WaitFor("Server is ready")
			serve := func(id string) *harness.Process {
				return harness.Start(t, "indexer", "serve", "--nats", "nats://"+addr, "--http-listen", "", "--node-id", id,
					"--partitions", "4", "--drain-timeout", "24h")
			}
			a, b := serve("a"), serve("b")
			a.WaitFor(`msg=ready`)
			b.WaitFor(`msg=ready`)
			e := harness.StartSimEngine(t)
			shim := harness.StartSimShim(t, e, addr, "w1")
			shim.WaitFor("registered")
			harness.ServePrompt(t, e, harness.Tokens(1, 10*harness.BlockSize))
			if err := server.Cmd.Process.Signal(away); err != nil {
				t.Fatal(err)
			}
			shim.Stop()
			a.Stop()
		})
	}
}
