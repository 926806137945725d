package registry

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

func record(name string, lease time.Duration) Record {
	return Record{Version: recordVersion, Instance: events.WorkerID(name), Model: "m", BlockSize: 16,
		LeaseMS: lease.Milliseconds(), State: Held}
}

func all(events.RankKey) bool { return true }

// world steps a machine, and probes while the bucket is writable.
type world struct {
	t   *testing.T
	m   *Machine
	now time.Duration
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, m: NewMachine()}
	w.m.Anew()
	w.m.Current()
	return w
}

// run lets time pass and returns the due workers, with the time of the first due.
func (w *world) run(d time.Duration, up bool) map[events.WorkerID]time.Duration {
	due := map[events.WorkerID]time.Duration{}
	for end := w.now + d; w.now < end; {
		w.now += max(w.m.Every(), 10*time.Millisecond)
		if up {
			w.m.Probed(w.now)
		}
		for _, d := range w.m.Due(w.now, all) {
			if _, ok := due[d.Record.Instance]; !ok {
				due[d.Record.Instance] = w.now
			}
		}
	}
	return due
}

func TestALeaseExpiresAfterItsLength(t *testing.T) {
	w := newWorld(t)
	w.m.Seen(record("a", 8*time.Second), 1, w.now)
	w.m.Seen(record("b", 80*time.Second), 2, w.now)
	w.m.Probed(w.now)
	due := w.run(20*time.Second, true)
	if at, ok := due["a"]; !ok || at < 8*time.Second || at > 11*time.Second || len(due) != 1 {
		t.Fatalf("due: %v", due)
	}
	// The same revision is not a renewal; another revision is.
	w = newWorld(t)
	for i := range 100 {
		w.m.Seen(record("a", 8*time.Second), uint64(i+1), w.now)
		w.m.Seen(record("b", 8*time.Second), 1000, w.now)
		if due := w.run(4*time.Second, true); due["a"] != 0 {
			t.Fatalf("a renewed lease was due: %v", due)
		} else if i > 4 && due["b"] == 0 {
			t.Fatal("an unrenewed lease is not due again")
		}
	}
}

// TestAnUnreadRecordRenewsNothing: the previous lease expires, and is due without a clear.
func TestAnUnreadRecordRenewsNothing(t *testing.T) {
	w := newWorld(t)
	a := record("a", 8*time.Second)
	w.m.Seen(a, 1, w.now)
	w.m.Probed(w.now)
	for range 2 {
		w.m.Unread(a.Key())
		if due := w.run(3*time.Second, true); len(due) > 0 {
			t.Fatalf("due: %v", due)
		}
	}
	w.m.Anew()
	w.m.Unread(a.Key())
	if gone := w.m.Current(); len(gone) > 0 {
		t.Errorf("gone: %v", gone)
	}
	w.m.Probed(w.now)
	for end := w.now + 8*time.Second; w.now < end; w.m.Probed(w.now) {
		w.now += w.m.Every()
	}
	none := func(events.RankKey) bool { return false }
	if due := w.m.Due(w.now, none); len(due) != 1 || !due[0].Unread || due[0].Revision != 1 {
		t.Errorf("due: %+v", due)
	}
	w.m.Seen(a, 2, w.now)
	if w.m.Seen(a, 3, w.now); len(w.run(3*time.Second, true)) > 0 {
		t.Error("due after a renewal")
	}
	for _, d := range w.m.Due(w.now+10*time.Second, all) {
		t.Errorf("due without a probe: %+v", d)
	}
}

func TestNoLeaseExpiresDuringAnOutage(t *testing.T) {
	for name, away := range map[string]func(*world){
		"no acknowledged probe": func(w *world) { w.run(100*time.Second, false) },
		"the watch is broken": func(w *world) {
			w.m.Broken()
			w.m.Probed(w.now) // the bucket accepts writes meanwhile
			if due := w.run(100*time.Second, true); len(due) != 0 {
				t.Errorf("due without a watch: %v", due)
			}
			w.m.Resumed()
			w.m.Anew()
			w.m.Seen(record("a", 8*time.Second), 1, w.now)
			w.m.Current()
		},
		"the node was paused": func(w *world) { w.now += 100 * time.Second },
		"probes without a watch": func(w *world) {
			w.m.Anew()
			w.run(100*time.Second, true)
			w.m.Seen(record("a", 8*time.Second), 1, w.now)
			w.m.Current()
		},
	} {
		w := newWorld(t)
		w.m.Seen(record("a", 8*time.Second), 1, w.now)
		if due := w.run(6*time.Second, true); len(due) != 0 {
			t.Fatalf("%s: due before: %v", name, due)
		}
		away(w)
		back := w.now
		due := w.run(20*time.Second, true)
		if at, ok := due["a"]; !ok || at-back < 8*time.Second {
			t.Errorf("%s: back at %v, due: %v; want a whole lease after", name, back, due)
		}
	}
}

func TestAnExpiredRecordIsDueUntilItIsGone(t *testing.T) {
	w := newWorld(t)
	r := record("a", 8*time.Second)
	r.State = Expired
	w.m.Seen(r, 1, w.now)
	for range 3 {
		if due := w.run(4*time.Second, true); len(due) != 1 {
			t.Fatal("not due")
		}
	}
	w.m.Probed(w.now)
	if due := w.m.Due(w.now, func(events.RankKey) bool { return false }); len(due) != 0 && w.now < 4*time.Second {
		t.Errorf("not left to the owner: %v", due)
	}
	w.m.Gone(r.Key())
	if w.m.Every() != 0 {
		t.Error("probes without leases")
	}
}

func TestMissingKeysAreGone(t *testing.T) {
	w := newWorld(t)
	w.m.Seen(record("a", 8*time.Second), 1, w.now)
	w.m.Seen(record("b", 8*time.Second), 2, w.now)
	w.m.Anew()
	w.m.Seen(record("b", 8*time.Second), 2, w.now)
	if gone := w.m.Current(); len(gone) != 1 || gone[0].Instance != "a" {
		t.Fatalf("gone: %v", gone)
	}
}

// TestAtRandom compares with a naive rule: a due lease was not renewed for the whole length, and the bucket was
// writable at every probe in the meantime.
func TestAtRandom(t *testing.T) {
	for seed := range uint64(testkit.Rounds(120)) {
		rng := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(t)
		const lease = 8 * time.Second
		changed := map[events.WorkerID]time.Duration{}
		lastTrouble := time.Duration(0)
		expired := 0
		for step := range 2000 {
			w.now += time.Second
			for i := range 4 {
				if name := fmt.Sprint("w", i); rng.IntN(6) == 0 && (i > 0 || step < 100) {
					w.m.Seen(record(name, lease), uint64(step+1), w.now)
					changed[events.WorkerID(name)] = w.now
				}
			}
			if rng.IntN(40) == 0 { // an outage longer than the gap
				w.now += 5 * time.Second
				lastTrouble = w.now
			}
			w.m.Probed(w.now)
			for _, d := range w.m.Due(w.now, all) {
				expired++
				if since := max(changed[d.Record.Instance], lastTrouble); w.now-since < lease {
					t.Fatalf("seed %d: %s was due %v after %v", seed, d.Record.Instance, w.now-since, since)
				}
			}
		}
		if expired == 0 {
			t.Fatalf("seed %d: no lease was ever due", seed)
		}
	}
}

// TestTheShortestLeaseSetsThePace compares the interval of probes with the naive shortest lease.
func TestTheShortestLeaseSetsThePace(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 2))
	m := newWorld(t).m
	leases := map[events.WorkerID]time.Duration{}
	for step := range 5000 {
		r := record(fmt.Sprint("w", rng.IntN(12)), time.Duration(1+rng.IntN(5))*time.Second)
		switch rng.IntN(12) {
		case 0, 1, 2, 3, 4:
			m.Gone(r.Key())
			delete(leases, r.Instance)
		case 5: // the watch restarts; missing keys are gone
			m.Anew()
			for name, lease := range leases {
				if rng.IntN(4) == 0 {
					delete(leases, name)
				} else {
					m.Seen(record(string(name), lease), uint64(step), 0)
				}
			}
			m.Current()
		default:
			leases[r.Instance] = r.Lease()
			m.Seen(r, uint64(step), 0)
		}
		want := time.Duration(0)
		for _, l := range leases {
			if want == 0 || l < want {
				want = l
			}
		}
		if got := m.Every(); got != min(want/8, 5*time.Second) {
			t.Fatalf("step %d: probed every %v; leases %v", step, got, leases)
		}
	}
}
