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
	f := &followed{rng: rand.New(rand.NewPCG(1, 2)), truth: newTruth()}
	var err error
	if f.hasher, err = events.NewHasher(blockSize, events.Space{}); err != nil {
		t.Fatal(err)
	}
	cfg.BlockSize, cfg.Capacity = blockSize, 600
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
	p := tokens(family*100_000, length*blockSize)
	for i := f.rng.IntN(length) * blockSize; i < len(p) && f.rng.IntN(2) == 0; i += 8 * blockSize {
		p[i]++
	}
	return p
}

func (f *followed) serve(t *testing.T, n int) {
	t.Helper()
	for range n {
		serve(t, f.Engine, f.prompt())
	}
}

// judge compares answers on prompts at random with the truth; atMost allows them to know less.
func (f *followed) judge(addr, worker string, atMost bool) error {
	rng := rand.New(rand.NewPCG(3, 4))
	g := &followed{rng: rng, hasher: f.hasher}
	for range 60 {
		locals := f.hasher.Hash(nil, g.prompt())
		a, err := findLocals(addr, locals)
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
	eventually(t, "the index says what the engine holds", func() (bool, string) {
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
	var x *indexerProcess
	var server *process
	data, conf, addr := filepath.Join(disk, "data"), filepath.Join(t.TempDir(), "nats.conf"), loopback.Reserve(t)
	startServer := func() {
		server = start(t, "nats-server", "-c", conf)
		server.waitFor("Server is ready")
	}
	begin := func() {
		if embedded {
			x = startIndexer(t, data, addr, "--snapshot-interval", "2s")
			return
		}
		x = &indexerProcess{nats: addr}
		x.process = start(t, "indexer", "serve", "--nats", "nats://"+addr, "--http-listen", "127.0.0.1:0", "--partitions", "4", "--snapshot-interval", "2s", "--log-bytes", "1048576")
		x.http = x.waitFor(`HTTP is served" listen=(\S+)`)[1]
		x.waitFor(`msg=ready`)
	}
	if !embedded {
		text := fmt.Sprintf("listen: %q\njetstream { store_dir: %q, sync_interval: always }\n", addr, data)
		if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		startServer()
	}
	begin()
	shim := shimOf(t, e.Engine, x.nats, "w1", "--log-repeat", "1s")
	e.serve(t, 60)
	e.await(t, x.http)
	if r := run(t, "indexer", "snapshot", "now", "--nats", x.nats); r.code != 0 {
		t.Fatalf("snapshot now: %+v", r)
	}
	before := ask[api.WorkerList](t, x.nats, "workers").Workers
	e.serve(t, 20)
	e.await(t, x.http)

	makeRoom := fillDisk(t, disk)
	e.serve(t, 100)
	shim.waitFor(`the log does not take events; they wait`)
	x.waitFor(`the log of partition \d takes nothing more.*no space left on device`)
	var s api.Status
	status := func() string {
		if err := httpDo(x.http, "GET", "/v1/status", nil, &s); err != nil {
			t.Fatal(err)
		}
		return strings.Join(s.Problems, "\n")
	}
	eventually(t, "status and metrics say that the disk is full", func() (bool, string) {
		e.serve(t, 1) // whatever makes room, it is taken
		var metrics string
		if err := httpDo(x.http, "GET", "/metrics", nil, &metrics); err != nil {
			t.Fatal(err)
		}
		said := status()
		return strings.Contains(said, "no space left on device") && (!embedded || strings.Contains(said, "the storage of the NATS server is 100 % full")) && s.Ready &&
			strings.Contains(metrics, `kvatlas_log_writable{partition="1"} 0`) && !strings.Contains(metrics, "kvatlas_problems 0"), said + "\n" + metrics
	})
	if err := httpDo(x.http, "POST", "/v1/find", api.Query{Model: "m", Hashes: api.Hashes{1}}, &api.Answer{}); err != nil {
		t.Errorf("queries are not answered: %v", err)
	}
	// A server on a full disk is left alone: nobody was parted from it.
	for _, p := range []*process{x.process, shim} {
		for line := range strings.Lines(p.saying()) {
			if strings.Contains(line, "NATS connection lost") && !strings.Contains(line, "stale connection") { // who stands still is left, on any disk
				t.Errorf("the server went away: %s", line)
			}
		}
	}
	if embedded { // whoever starts it now is no worse off
		x.kill()
		begin()
		e.serve(t, 20)
		x.waitFor(`takes nothing more`)
	}

	makeRoom()
	e.serve(t, 20)
	if embedded {
		x.waitFor(`the NATS server in this process is well again`)
	} else {
		server.stop()
		startServer()
	}
	e.await(t, x.http)
	shim.waitFor(`the log takes events again`)
	eventually(t, "the status is in order", func() (bool, string) { said := status(); return said == "" && s.Snapshots.Written > 0, said })
	if s.Events["gaps"] != 0 || s.Resyncs.Asked != 0 {
		t.Errorf("events were lost: %v, %+v", s.Events, s.Resyncs)
	}
	after := ask[api.WorkerList](t, x.nats, "workers").Workers
	if len(after) != 1 || after[0].Incarnation != before[0].Incarnation || after[0].LastEvent <= before[0].LastEvent {
		t.Errorf("the worker was %+v and is %+v", before, after)
	}
	if said := shim.saying(); strings.Count(said, "a new incarnation") != 1 || strings.Contains(said, "could not be replayed") {
		t.Errorf("the shim began anew:\n%s", said)
	}
	eventually(t, "all snapshots are what was written", func() (bool, string) { // one may be replaced while it is read
		r := run(t, "indexer", "snapshot", "verify", "--nats", x.nats)
		return r.code == 0, fmt.Sprintf("%+v", r)
	})
	x.kill()
	begin()
	if err := e.judge(x.http, "w1", false); err != nil {
		t.Errorf("from the disk: %v", err)
	}
}
