package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/enginesim"
	"github.com/kvatlas/kvatlas/internal/loopback"
	"github.com/kvatlas/kvatlas/internal/twin"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// followed is a simulated engine that serves prompts at random, and what is true of it.
type followed struct {
	*enginesim.Engine
	rng    *rand.Rand
	hasher *events.Hasher

	mu    sync.Mutex
	truth *twin.Rank
}

func followEngine(t *testing.T, cfg enginesim.Config) *followed {
	f := &followed{rng: rand.New(rand.NewPCG(1, 2)), truth: harness.NewTruth()}
	var err error
	if f.hasher, err = events.NewHasher(harness.BlockSize, events.Space{}); err != nil {
		t.Fatal(err)
	}
	cfg.BlockSize, cfg.Capacity = harness.BlockSize, 600
	cfg.Announced = func(a enginesim.Announced) {
		e := events.Event{Kind: a.Kind, Tier: events.Device, HasParent: a.HasParent, Parent: a.Parent, Blocks: append([]events.BlockHash{}, a.Blocks...)}
		if a.Kind == events.Stored {
			e.Locals = f.hasher.Hash(nil, a.Tokens)
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.truth.Apply(1, []events.Event{e})
	}
	f.Engine, err = enginesim.Start(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Crash)
	return f
}

// prompt is one of a few families that share their beginnings.
func (f *followed) prompt() []uint32 {
	family, length := f.rng.IntN(12), 1+f.rng.IntN(80)
	p := harness.Tokens(family*100_000, length*harness.BlockSize)
	for i := f.rng.IntN(length) * harness.BlockSize; i < len(p) && f.rng.IntN(2) == 0; i += 8 * harness.BlockSize {
		p[i]++
	}
	return p
}

func (f *followed) serve(t *testing.T, n int) {
	t.Helper()
	for range n {
		harness.ServePrompt(t, f.Engine, f.prompt())
	}
}

// judge compares answers on prompts at random with the truth; atMost allows them to know less.
func (f *followed) judge(addr, worker string, atMost bool) error {
	rng := rand.New(rand.NewPCG(3, 4))
	g := &followed{rng: rng, hasher: f.hasher}
	for range 60 {
		locals := f.hasher.Hash(nil, g.prompt())
		a, err := harness.FindLocals(addr, locals)
		if err != nil {
			return err
		}
		f.mu.Lock()
		want := f.truth.Match(locals)
		f.mu.Unlock()
		got := uint32(0)
		for _, o := range a.Workers {
			if string(o.Instance) == worker {
				got = o.Device
			}
		}
		if got != want[0] && !(atMost && got < want[0]) || !a.Complete {
			return fmt.Errorf("%d blocks are held and the index says %d: %+v", want[0], got, a)
		}
	}
	return nil
}

func (f *followed) await(t *testing.T, addr string) {
	t.Helper()
	harness.Eventually(t, "the index says what the engine holds", func() (bool, string) {
		err := f.judge(addr, "w1", false)
		return err == nil, fmt.Sprint(err)
	})
}

// TestDiskFull fills the disk under a running deployment, and makes room again. Meanwhile events wait, status and metrics say why, and
// queries are answered from what is known. Afterwards all goes on with no process of ours started again, and nothing is lost that was
// acknowledged: the shim says nothing twice, and the index is what the engine says, also in a process that begins from the disk.
func TestDiskFull(t *testing.T) {
	if testing.Short() {
		t.Skip("left out under -short: mounts a small disk, which needs root or user namespaces")
	}
	for _, c := range []struct {
		name     string
		embedded bool
	}{{"server in the indexer", true}, {"server of its own", false}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if disk, ok := smallDisk(t, "24m"); ok {
				diskFull(t, disk, c.embedded)
			}
		})
	}
}

func diskFull(t *testing.T, disk string, embedded bool) {
	e := followEngine(t, enginesim.Config{})
	var x *harness.Indexer
	var server *harness.Process
	data, conf, addr := filepath.Join(disk, "data"), filepath.Join(t.TempDir(), "nats.conf"), loopback.Reserve(t)
	startServer := func() {
		server = harness.Start(t, "nats-server", "-c", conf)
		server.WaitFor("Server is ready")
	}
	begin := func() {
		if embedded {
			x = harness.StartIndexer(t, data, addr, "--snapshot-interval", "2s")
			return
		}
		x = &harness.Indexer{NATS: addr}
		x.Process = harness.Start(t, "indexer", "serve", "--nats", "nats://"+addr, "--http-listen", "127.0.0.1:0", "--partitions", "4", "--snapshot-interval", "2s", "--log-bytes", "1048576")
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
	}
	if !embedded {
		text := fmt.Sprintf("listen: %q\njetstream { store_dir: %q, sync_interval: always }\n", addr, data)
		if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		startServer()
	}
	begin()
	shim := harness.StartSimShim(t, e.Engine, x.NATS, "w1", "--log-repeat", "1s")
	e.serve(t, 60)
	e.await(t, x.HTTP)
	if r := harness.Run(t, "indexer", "snapshot", "now", "--nats", x.NATS); r.Code != 0 {
		t.Fatalf("snapshot now: %+v", r)
	}
	before := harness.IndexerJSON[api.WorkerList](t, x.NATS, "workers").Workers
	e.serve(t, 20)
	e.await(t, x.HTTP)

	makeRoom := fillDisk(t, disk)
	e.serve(t, 100)
	shim.WaitFor(`the log does not take events; they wait`)
	x.WaitFor(`the log of partition \d takes nothing more.*no space left on device`)
	var s api.Status
	status := func() string {
		if err := harness.HTTPDo(x.HTTP, "GET", "/v1/status", nil, &s); err != nil {
			t.Fatal(err)
		}
		return strings.Join(s.Problems, "\n")
	}
	harness.Eventually(t, "status and metrics say that the disk is full", func() (bool, string) {
		e.serve(t, 1) // whatever makes room, it is taken
		var metrics string
		if err := harness.HTTPDo(x.HTTP, "GET", "/metrics", nil, &metrics); err != nil {
			t.Fatal(err)
		}
		said := status()
		return strings.Contains(said, "no space left on device") && (!embedded || strings.Contains(said, "the storage of the NATS server is 100 % full")) && s.Ready &&
			strings.Contains(metrics, `kvatlas_log_writable{partition="1"} 0`) && !strings.Contains(metrics, "kvatlas_problems 0"), said + "\n" + metrics
	})
	if err := harness.HTTPDo(x.HTTP, "POST", "/v1/find", api.Query{Model: "m", Hashes: api.Hashes{1}}, &api.Answer{}); err != nil {
		t.Errorf("queries are not answered: %v", err)
	}
	// A server on a full disk is left alone: nobody was parted from it.
	for _, p := range []*harness.Process{x.Process, shim} {
		for line := range strings.Lines(p.Said()) {
			if strings.Contains(line, "NATS connection lost") && !strings.Contains(line, "stale connection") { // who stands still is left, on any disk
				t.Errorf("the server went away: %s", line)
			}
		}
	}
	if embedded { // whoever starts it now is no worse off
		x.Kill()
		begin()
		e.serve(t, 20)
		x.WaitFor(`takes nothing more`)
	}

	makeRoom()
	e.serve(t, 20)
	if embedded {
		x.WaitFor(`the NATS server in this process is well again`)
	} else {
		server.Stop()
		startServer()
	}
	e.await(t, x.HTTP)
	shim.WaitFor(`the log takes events again`)
	harness.Eventually(t, "the status is in order", func() (bool, string) { said := status(); return said == "" && s.Snapshots.Written > 0, said })
	if s.Events["gaps"] != 0 || s.Resyncs.Asked != 0 {
		t.Errorf("events were lost: %v, %+v", s.Events, s.Resyncs)
	}
	after := harness.IndexerJSON[api.WorkerList](t, x.NATS, "workers").Workers
	if len(after) != 1 || after[0].Incarnation != before[0].Incarnation || after[0].LastEvent <= before[0].LastEvent {
		t.Errorf("the worker was %+v and is %+v", before, after)
	}
	if said := shim.Said(); strings.Count(said, "a new incarnation") != 1 || strings.Contains(said, "could not be replayed") {
		t.Errorf("the shim began anew:\n%s", said)
	}
	harness.Eventually(t, "all snapshots are what was written", func() (bool, string) { // one may be replaced while it is read
		r := harness.Run(t, "indexer", "snapshot", "verify", "--nats", x.NATS)
		return r.Code == 0, fmt.Sprintf("%+v", r)
	})
	x.Kill()
	begin()
	if err := e.judge(x.HTTP, "w1", false); err != nil {
		t.Errorf("from the disk: %v", err)
	}
}
