package integration

import (
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// firstPrompt returns the common prefix of all prompts of a simulated engine with blocks of 64 tokens: the trace's
// block 0, eight blocks of the engine.
func firstPrompt() []uint32 {
	prompt := make([]uint32, 512)
	for i := range prompt {
		prompt[i] = uint32(i / 64)
	}
	return prompt
}

// simulated runs a simulated engine at fixed endpoints in a separate process.
func simulated(t *testing.T, endpoint, replay string) *harness.Process {
	t.Helper()
	p := harness.Start(t, "worker-shim", "simulate", "--endpoint", endpoint, "--replay", replay, "--rate", "20",
		"--block-size", "64")
	p.WaitFor("simulated engine runs")
	return p
}

// TestEngineIsKilled kills an engine beside a live shim. The index has no blocks of the engine, although the lease
// continues, until the engine returns.
func TestEngineIsKilled(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	endpoint, replay := "tcp://"+loopback.Reserve(t), "tcp://"+loopback.Reserve(t)
	engine := simulated(t, endpoint, replay)
	shim := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", endpoint, "--replay", replay,
		"--worker", "sim", "--model", "m", "--block-size", "64")
	x.WaitDepth(t, "m", firstPrompt(), "sim", 8)
	first := harness.WaitLease(t, x, "sim", true).Incarnation
	engine.Kill()
	shim.WaitFor(`the engine is gone.*why="its ports refuse`)
	x.WaitDepth(t, "m", firstPrompt(), "sim", 0)
	seen(t, x, "sim", api.EngineGone)
	if w := harness.WaitLease(t, x, "sim", true); w.Blocks.Device != 0 || w.Lease.State != "held" ||
		w.EngineWhy != "its ports refuse connections" {
		t.Errorf("the worker of a dead engine is listed as %+v", w)
	}
	simulated(t, endpoint, replay)
	x.WaitDepth(t, "m", firstPrompt(), "sim", 8)
	seen(t, x, "sim", api.EngineConnected)
	if now := harness.WaitLease(t, x, "sim", true).Incarnation; now <= first {
		t.Errorf("incarnation %d follows incarnation %d", now, first)
	}
}

// TestRegisteredEngineDies is the same for a shim in an indexer: the engine is cleared at its death, and its blocks are
// in the index after its return.
func TestRegisteredEngineDies(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	engine := startRank(t, 0, 16)
	body := fmt.Sprintf(`{"instance_id":7,"endpoint":%q,"replay_endpoint":%q,"model_name":"m","block_size":16}`,
		engine.Endpoint(), engine.Replay())
	if status, text, err := harness.Request(x.HTTP, "POST", "/register", body); err != nil || status != 201 {
		t.Fatal(status, text, err)
	}
	prompt := harness.Tokens(1, 4*16)
	harness.ServePrompt(t, engine, prompt)
	x.WaitDepth(t, "m", prompt, "7", 4)
	engine.Crash()
	x.WaitFor(`a registered engine is gone.*worker=7/0`)
	x.WaitDepth(t, "m", prompt, "7", 0)
	harness.Eventually(t, "the list of workers has the state", func() (bool, string) {
		w := harness.WaitLease(t, x, "7", true)
		return w.Engine == api.EngineGone, fmt.Sprintf("%+v", w)
	})
	if err := engine.Restart(); err != nil {
		t.Fatal(err)
	}
	harness.ServePrompt(t, engine, prompt[:2*16])
	x.WaitDepth(t, "m", prompt, "7", 2)
}

// TestRegisteredEngineOfAnotherBlockSize registers an engine with a wrong block size. All blocks are skipped, and the
// shim in the indexer reports the fault as a worker-shim does.
func TestRegisteredEngineOfAnotherBlockSize(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	engine := startRank(t, 0, 8)
	body := fmt.Sprintf(`{"instance_id":7,"endpoint":%q,"replay_endpoint":%q,"model_name":"m","block_size":16}`,
		engine.Endpoint(), engine.Replay())
	if status, text, err := harness.Request(x.HTTP, "POST", "/register", body); err != nil || status != 201 {
		t.Fatal(status, text, err)
	}
	harness.ServePrompt(t, engine, harness.Tokens(1, 4*16))
	x.WaitFor(`blocks are not of the block_size that was registered.*worker=7/0.*register it with block_size 8`)
	harness.Eventually(t, "the status has the problem", func() (bool, string) {
		problems := strings.Join(harness.Status(t, x.NATS).Problems, "\n")
		return strings.Contains(problems, "what engines of 1 ranks announce is passed over: 7/0"), problems
	})
}

// seen waits until an indexer shows the state of a worker's engine in all places: answers over HTTP and NATS, the list
// of workers, the table of workers, the status, the metrics and /readyz.
func seen(t *testing.T, x *harness.Indexer, worker string, want api.EngineState) {
	t.Helper()
	inAnswer := want
	if want == api.EngineConnected {
		inAnswer = ""
	}
	harness.Eventually(t, fmt.Sprintf("%s's engine is %s", worker, want), func() (bool, string) {
		w := harness.WaitLease(t, x, worker, true)
		return w.Engine == want && !w.CatchingUp && w.EngineSince != nil, fmt.Sprintf("%+v", w)
	})
	q := api.Query{Model: "m", Tokens: firstPrompt(), Idle: true}
	var overHTTP, overNATS api.Answer
	if err := harness.HTTPDo(x.HTTP, "POST", "/v1/find", q, &overHTTP); err != nil {
		t.Fatal(err)
	}
	overNATS, failure := x.Query(t, "--model", "m", "--tokens", harness.CommaList(firstPrompt()))
	if failure != nil {
		t.Fatal(failure)
	}
	for over, a := range map[string]api.Answer{"HTTP": overHTTP, "NATS": overNATS} {
		i := slices.IndexFunc(a.Workers, func(o api.Overlap) bool { return string(o.Instance) == worker })
		if i < 0 && over == "NATS" && want == api.EngineGone {
			continue // the worker holds no block, and the query excludes idle workers
		}
		if i < 0 || a.Workers[i].Engine != inAnswer || a.Workers[i].CatchingUp {
			t.Errorf("over %s the answer has %+v, want an engine that is %q", over, a.Workers, want)
		}
	}
	var metrics, ready string
	if err := errors.Join(harness.HTTPDo(x.HTTP, "GET", "/metrics", nil, &metrics),
		harness.HTTPDo(x.HTTP, "GET", "/readyz", nil, &ready)); err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(fmt.Sprintf(`(?m)^kvatlas_engines\{state="%s"\} [1-9]`, want)).MatchString(metrics) {
		t.Errorf("no engine that is %s in the metrics", want)
	}
	var status api.Status
	if err := harness.HTTPDo(x.HTTP, "GET", "/v1/status", nil, &status); err != nil {
		t.Fatal(err)
	}
	problems := strings.Join(status.Problems, "\n")
	ill := want == api.EngineSilent // a dead engine may be starting
	if ill != strings.Contains(problems, worker+"/0 (on ") ||
		(inAnswer != "") != strings.Contains(ready, worker+"/0") || inAnswer != "" &&
		!strings.Contains(ready, string(want)+": ") {
		t.Errorf("with an engine that is %s the status has the problems %q, and /readyz says %q", want, problems, ready)
	}
	if table := harness.Run(t, "indexer", "workers", "--nats", x.NATS).Stdout; !regexp.MustCompile(`(?m)^` + worker +
		` .*\b` + string(want)).MatchString(table) {
		t.Errorf("with an engine that is %s the table is\n%s", want, table)
	}
}

// TestShimIsCatchingUp runs a shim with a slow replay socket. Until the reply, answers, the list of workers and /readyz
// show that the shim is catching up.
func TestShimIsCatchingUp(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	engine := harness.StartSimEngine(t)
	harness.ServePrompt(t, engine, harness.Tokens(1, 4*16))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	shim := harness.Start(t, "worker-shim", "run", "--nats", x.NATS, "--engine", engine.Endpoint(), "--replay",
		"tcp://"+l.Addr().String(), "--replay-timeout", "15m",
		"--worker", "w", "--model", "m", "--block-size", "16")
	shim.WaitFor("connected to the engine")
	is := func(x *harness.Indexer, want bool) {
		t.Helper()
		harness.Eventually(t, fmt.Sprintf("catching up: %v", want), func() (bool, string) {
			var a api.Answer
			if err := harness.HTTPDo(x.HTTP, "POST", "/v1/find", api.Query{Model: "m", Tokens: harness.Tokens(1, 4*16),
				Idle: true}, &a); err != nil {
				return false, err.Error()
			}
			return len(a.Workers) == 1 && a.Workers[0].CatchingUp == want, fmt.Sprintf("%+v", a.Workers)
		})
		if w := harness.WaitLease(t, x, "w", true); w.CatchingUp != want {
			t.Errorf("the list of workers has %+v", w)
		}
		var ready string
		if err := harness.HTTPDo(x.HTTP, "GET", "/readyz", nil, &ready); err != nil ||
			want != strings.Contains(ready, "catching_up: 1 ranks") {
			t.Errorf("/readyz: %q, %v", ready, err)
		}
	}
	is(x, true)
	shim.Kill()
	shim = harness.StartSimShim(t, engine, x.NATS, "w")
	is(x, false)
	x.WaitDepth(t, "m", harness.Tokens(1, 4*16), "w", 4)

	// A restarted indexer does not have the state of a shim without a report since.
	shim.Cmd.Process.Signal(syscall.SIGSTOP)
	x.Kill()
	x = harness.StartIndexer(t, x.Data, x.NATS)
	is(x, true)
	shim.Cmd.Process.Signal(syscall.SIGCONT)
	is(x, false)
}

// TestEngineHangs pauses an engine's process. A pause is no proof of an end: the shim reports the silence with advice,
// and the blocks stay until --engine-gone-after. After the pause, all blocks are in the index again, because the life
// is the same.
func TestEngineHangs(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	endpoint, replay := "tcp://"+loopback.Reserve(t), "tcp://"+loopback.Reserve(t)
	engine := simulated(t, endpoint, replay)
	args := []string{"run", "--nats", x.NATS, "--engine", endpoint, "--replay", replay, "--model", "m", "--block-size",
		"64", "--engine-silent-after", "1s"}
	waits := harness.Start(t, "worker-shim", append(args, "--worker", "waits")...)
	clears := harness.Start(t, "worker-shim", append(args, "--worker", "clears", "--engine-gone-after", "2s")...)
	for _, w := range []string{"waits", "clears"} {
		x.WaitDepth(t, "m", firstPrompt(), w, 8)
	}
	engine.Cmd.Process.Signal(syscall.SIGSTOP)
	clears.WaitFor(`the engine is gone.*why="silent for 2s"`)
	waits.WaitFor(`the engine is silent.*whether the engine's process hangs or is stopped.*nothing is cleared`)
	x.WaitDepth(t, "m", firstPrompt(), "clears", 0)
	x.WaitDepth(t, "m", firstPrompt(), "waits", 8)
	seen(t, x, "waits", api.EngineSilent)
	seen(t, x, "clears", api.EngineGone)
	engine.Cmd.Process.Signal(syscall.SIGCONT)
	x.WaitDepth(t, "m", firstPrompt(), "clears", 8)
	x.WaitDepth(t, "m", firstPrompt(), "waits", 8)
}
