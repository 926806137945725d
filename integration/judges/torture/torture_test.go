//go:build judges

package torture

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	ours "github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/pyenv"
	"github.com/nats-io/nats.go/jetstream"
)

// TestTorture runs a deployment of real processes under load with all kinds of faults: processes are killed and paused,
// connections are closed, stalled and refused, messages are dropped, the store is filled, and the log is trimmed,
// rolled back and deleted. After a round all processes run again, and the index must have the announced blocks. For an
// engine with permanently lost messages, the index must not have a block that the engine does not hold. Rounds share a
// history; now and then a new deployment begins.
//
// The seed determines the schedule, but not the position of a fault in a process's work.
func TestTorture(t *testing.T) {
	pyenv.Python(t)
	seed, rounds := scheduleSeed(), roundsOr(8)
	r := &torture{T: t, mayhem: newMayhem(rand.New(rand.NewPCG(seed, 1))), prompts: allPaths(),
		programs: func(name string) string { return harness.Program(t, name) }}
	if *tortureRace {
		r.programs = racingPrograms(t)
	}
	begun := time.Now()
	defer func() {
		if t.Failed() {
			t.Logf("seed %d, round %d; transcript:\n%s", seed, r.round, strings.Join(r.transcript, "\n"))
			for _, d := range r.w.daemons() {
				t.Logf("the end of the output of %s (full output in %s):\n%s", d.name, d.said, d.tail(60))
			}
		}
		if r.w != nil {
			r.w.end()
		}
		t.Logf("seed %d, %d rounds in %v", seed, r.round, time.Since(begun).Round(time.Second))
		for _, name := range slices.Sorted(maps.Keys(r.counts)) {
			t.Logf("%7d %s", r.counts[name], name)
		}
	}()
	for r.round = 1; r.round <= rounds; r.round++ {
		r.play()
		if r.round%10 == 0 {
			t.Logf("%d rounds in %v", r.round, time.Since(begun).Round(time.Second))
		}
	}
	r.round--
}

type torture struct {
	*testing.T
	mayhem
	programs func(string) string
	w        *world
	round    int
	prompts  []path

	// engines with permanently lost messages in this round, and the offsets of their shims' output
	losses map[*tortured]int64
}

func (r *torture) any() *tortured { return r.w.engines[r.rng.IntN(len(r.w.engines))] }

func (r *torture) anyProcess() *daemon { return r.w.daemons()[r.rng.IntN(2+len(r.w.shims))] }

func (r *torture) shimOf(e *tortured) *daemon { return r.w.shims[slices.Index(r.w.engines, e)] }

// play plays a round.
func (r *torture) play() {
	r.transcript, r.losses, r.begun = nil, map[*tortured]int64{}, time.Now()
	if r.w == nil || r.rng.IntN(15) == 0 {
		if r.w != nil {
			r.settle()
			r.w.end()
		}
		r.count("deployments")
		r.w = startWorld(r.T, r.rng, r.programs, r.counts)
		r.stage = r.w.stage
		r.note("a new deployment in %s", r.w.dir)
	}
	for _, d := range r.w.daemons() {
		if !d.alive() && r.rng.IntN(4) > 0 {
			r.note("%s starts", d.name)
			d.start()
		}
	}
	for _, e := range r.w.engines {
		if !e.replayable() && r.rng.IntN(3) == 0 {
			if r.rng.IntN(2) == 0 {
				r.note("%s clears", e.name)
				e.flush()
				e.clear()
			} else {
				r.restartEngine(e)
			}
		}
	}
	if r.rng.IntN(2) == 0 {
		defer r.snapshotAllTheTime()()
	}
	for range 15 + r.rng.IntN(50) {
		r.step()
	}
	switch r.rng.IntN(9) {
	case 0:
		r.settle()
		r.fillStore()
	case 1:
		r.settle()
		r.trimLog()
	case 2:
		r.settle()
		r.rollBack()
	case 3:
		r.settle()
		r.deleteStream()
	}
	r.settle()
	r.verify()
}

// step performs a single action, usually an announcement.
func (r *torture) step() {
	r.undo(false)
	e := r.any()
	switch n := r.rng.IntN(100); {
	case n < 52:
		e.announce()
	case n < 60:
		k := 5 + r.rng.IntN(40)
		r.note("%s announces %d messages", e.name, k)
		for range k {
			e.announce()
		}
	case n < 66:
		d := 100 // long enough for faults during all kinds of work; some faults last
		if r.rng.IntN(4) == 0 {
			d = 1500
		}
		time.Sleep(time.Duration(r.rng.IntN(d)) * time.Millisecond)
	case n < 68:
		r.snapshotNow()
	case n < 78:
		r.kill(r.anyProcess())
	case n < 82:
		r.hold(r.anyProcess())
	case n < 90:
		r.spoilConnection()
	case n < 93:
		k := 1 + r.rng.IntN(5)
		r.note("the next %d messages of %s are dropped; they can be replayed", k, e.name)
		r.count("messages dropped, to be replayed")
		e.drop(k, true)
	case n == 93:
		if r.rng.IntN(2) == 0 {
			k := 1 + r.rng.IntN(3)
			r.note("the next %d messages of %s are lost for good", k, e.name)
			r.losses[e] = r.shimOf(e).spoken()
			e.drop(k, false)
			e.flush()
		}
	case n == 94:
		if r.rng.IntN(2) == 0 {
			k := r.rng.IntN(4)
			r.note("%s keeps only %d messages", e.name, k)
			r.count("replay buffers forgotten")
			e.forget(k)
		}
	case n == 95:
		r.restartEngine(e)
	case n == 96:
		r.note("%s clears", e.name)
		e.clear()
	case n < 99:
		r.hideEngine(e)
	default:
		r.startAll()
	}
}

// hideEngine closes an engine's ports and connections for a while, as the end of the process does. The engine lives on.
// After the return, the index must have the blocks that the shim cleared.
func (r *torture) hideEngine(e *tortured) {
	r.note("the ports of %s refuse", e.name)
	r.count("engines with closed ports")
	for _, p := range r.w.ways[e] {
		p.leave()
	}
	// a shim needs about 200 ms to detect the end
	back := time.Now().Add(time.Duration(100+r.rng.IntN(1000)) * time.Millisecond)
	r.later = append(r.later, undoing{back, func() {
		r.note("the ports of %s are open", e.name)
		for _, p := range r.w.ways[e] {
			if err := p.open(); err != nil {
				r.Fatal(err)
			}
		}
	}})
}

func (r *torture) restartEngine(e *tortured) {
	seen := r.rng.IntN(2) == 0
	r.note("%s begins a new life; its connections end: %v", e.name, seen)
	r.count("engine restarts")
	e.restart(seen)
}

// snapshotNow requests a snapshot without waiting.
func (r *torture) snapshotNow() {
	w := r.w
	r.note("a snapshot is requested")
	r.count("snapshots asked for")
	go func() {
		var list api.SnapshotList
		_ = w.ask(w.indexer, "POST", "/v1/snapshot", nil, &list) // the node may be stopped
	}()
}

// snapshotAllTheTime writes snapshots in a loop, until the returned function is called.
func (r *torture) snapshotAllTheTime() (end func()) {
	r.note("from here on snapshots are written all the time")
	r.count("rounds of snapshots all the time")
	w, stop, done := r.w, make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for tick := time.Tick(30 * time.Millisecond); ; {
			select {
			case <-stop:
				return
			case <-tick:
				var list api.SnapshotList
				_ = w.ask(w.indexer, "POST", "/v1/snapshot", nil, &list)
			}
		}
	}()
	return func() {
		close(stop)
		<-done
	}
}

// settle ends all faults and waits until the index has applied all announced events and has no replayable gap.
func (r *torture) settle() {
	r.undo(true)
	r.note("all faults end")
	r.w.mend()
	r.w.awaitMarks()
	r.w.until("the status is in order", func() error {
		_, err := r.w.inOrder(r.w.indexer, 0)
		return err
	})
	r.w.awaitMarks() // the index then has the shims' resyncs too
	r.note("settled")
}

// verify queries every prompt and reads the programs' output.
func (r *torture) verify() {
	w := r.w
	r.counts["answers judged"] += w.judge(w.indexer, r.prompts)
	for e, from := range r.losses {
		said := r.shimOf(e).words(from)
		if !strings.Contains(said, "could not be replayed") && !strings.Contains(said, "a new incarnation") {
			r.Fatalf("%s has permanently lost messages, but the shim does not log the loss", e.name)
		}
		r.count("losses for good, noticed")
	}
	for _, e := range w.engines {
		if e.exact() {
			r.count("engines with all blocks at a round's end")
		} else {
			r.count("engines with some blocks at a round's end")
		}
		r.counts["events announced"] += e.events
		r.counts["messages dropped for good"] += e.dropped
		e.events, e.dropped = 0, 0
	}
	r.listen(r.T)
	r.count("rounds")
}

// admin calls the server without the proxies, until success.
func (r *torture) admin(what string, do func(ctx context.Context, js jetstream.JetStream) error) {
	r.w.until(what, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		js, err := jetstream.New(r.w.admin)
		if err != nil {
			return err
		}
		return do(ctx, js)
	})
}

// fillStore fills the server's storage with other data. The log refuses events, and the events wait in the shims. With
// free space the log continues, without restarts of processes.
func (r *torture) fillStore() {
	r.note("the store is filled")
	r.count("stores filled")
	lives := r.lives()
	from := map[*tortured]int64{}
	for _, e := range r.w.engines {
		from[e] = r.shimOf(e).spoken()
	}
	junk := make([]byte, 900_000)
	fill := func(ctx context.Context, js jetstream.JetStream) error {
		if _, err := js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: "FILLER",
			Subjects: []string{"filler"}}); err != nil {
			return err
		}
		for size := len(junk); size > 0; size /= 16 { // use smaller messages when a size no longer fits
			for {
				_, err := js.Publish(ctx, "filler", junk[:size])
				var refused *jetstream.APIError
				if errors.As(err, &refused) {
					break
				} else if err != nil {
					return err
				}
			}
		}
		return nil
	}
	for _, e := range r.w.engines {
		r.admin("the shim of "+e.name+" reports a full log",
			func(ctx context.Context, js jetstream.JetStream) error {
				if err := fill(ctx, js); err != nil { // again and again: a snapshot makes room
					return err
				}
				e.announce()
				e.flush()
				if said := r.shimOf(e).words(from[e]); !strings.Contains(said, "no room") {
					return errors.New("it does not")
				}
				return nil
			})
	}
	for range 5 {
		r.any().announce()
	}
	r.snapshotNow()
	r.note("there is room again")
	r.admin("there is room again", func(ctx context.Context, js jetstream.JetStream) error {
		if err := js.DeleteStream(ctx, "FILLER"); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return err
		}
		return nil
	})
	r.settle()
	if now := r.lives(); !slices.Equal(now, lives) {
		r.Fatal("a process had to be started again after the store was full")
	}
}

func (r *torture) lives() (all []*running) {
	for _, d := range r.w.daemons() {
		all = append(all, d.running)
	}
	return all
}

// trimLog makes the log drop unread messages: the indexer is paused or dead while engines publish more than the log may
// keep. The indexer detects the gap and requests resyncs of the shims, so that no block is missing at the end.
func (r *torture) trimLog() {
	e := r.any()
	p := r.partitionOf(e)
	r.note("the indexer is paused or dead while %s publishes more than the log of partition %d keeps", e.name, p)
	r.count("logs trimmed past the indexer")
	dead := r.rng.IntN(2) == 0
	if dead {
		r.w.indexer.kill()
	} else {
		r.w.indexer.signal(syscall.SIGSTOP)
	}
	var last uint64
	r.admin("the log is looked at", func(ctx context.Context, js jetstream.JetStream) error {
		s, err := js.Stream(ctx, ours.Names("default").Stream(p))
		if err == nil {
			last = s.CachedInfo().State.LastSeq
		}
		return err
	})
	e.burst(1200, 64, 0x1000_0000)
	e.announce()
	e.flush()
	deadline := time.Now().Add(harness.Patience)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		s, err := r.w.stream(ctx, p)
		cancel()
		if err == nil && s.CachedInfo().State.FirstSeq > last+1 {
			break
		}
		if time.Now().After(deadline) {
			r.Fatalf("the log of partition %d is not trimmed past %d: %v", p, last, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if !dead {
		r.w.indexer.signal(syscall.SIGCONT)
	}
	if r.rng.IntN(2) == 0 {
		r.kill(r.anyProcess())
	}
	r.settle()
	for range 5 + r.rng.IntN(10) {
		r.step()
	}
	if r.rng.IntN(4) > 0 {
		r.note("%s clears", e.name)
		e.flush()
		e.clear()
	}
}

// rollBack restores an earlier state of the server's files.
func (r *torture) rollBack() {
	store, backup := filepath.Join(r.w.dir, "store"), filepath.Join(r.w.dir, "backup")
	r.w.nats.kill()
	if r.w.backup == "" || r.rng.IntN(3) == 0 {
		r.note("the server is killed and its files are copied")
		os.RemoveAll(backup)
		if err := os.CopyFS(backup, os.DirFS(store)); err != nil {
			r.Fatal(err)
		}
		r.w.backup = backup
		return
	}
	part := ""
	if r.rng.IntN(2) == 0 {
		part = filepath.Join("jetstream", "KV", "streams",
			ours.Names("default").Stream(events.Partition(r.rng.IntN(partitionsT))))
	}
	r.note("the server is killed and comes back with files of an earlier time: %q", part)
	r.count("logs rolled back")
	if r.rng.IntN(2) == 0 {
		r.kill(r.anyProcess())
	}
	if r.rng.IntN(2) == 0 {
		r.note("the indexer is killed")
		r.w.indexer.kill()
	}
	if err := os.RemoveAll(filepath.Join(store, part)); err != nil {
		r.Fatal(err)
	}
	if err := os.CopyFS(filepath.Join(store, part), os.DirFS(filepath.Join(backup, part))); err != nil {
		r.Fatal(err)
	}
	r.w.nats.start()
	for range r.rng.IntN(60) { // perhaps more than was lost
		r.any().announce()
	}
	time.Sleep(time.Duration(r.rng.IntN(500)) * time.Millisecond)
}

// deleteStream deletes a partition's log. The indexer recreates the log at its start.
func (r *torture) deleteStream() {
	p := events.Partition(r.rng.IntN(partitionsT))
	r.note("the log of partition %d is deleted", p)
	r.count("logs deleted")
	r.admin("the log is deleted", func(ctx context.Context, js jetstream.JetStream) error {
		if err := js.DeleteStream(ctx, ours.Names("default").Stream(p)); err != nil &&
			!errors.Is(err, jetstream.ErrStreamNotFound) {
			return err
		}
		return nil
	})
	for range 5 {
		r.any().announce()
	}
	if r.rng.IntN(2) == 0 {
		r.kill(r.anyProcess())
	}
	r.note("the indexer is killed")
	r.w.indexer.kill()
}

func (r *torture) partitionOf(e *tortured) events.Partition {
	p, err := ours.PartitionOf(events.WorkerID(e.name), partitionsT)
	if err != nil {
		r.Fatal(err)
	}
	return p
}
