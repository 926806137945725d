package registry

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// absence has the shims that are not connected to NATS.
type absence struct {
	mu    sync.Mutex
	ranks map[events.RankKey]bool
}

func (a *absence) of(_ context.Context, ranks []events.RankKey) (list []events.RankKey, _ error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, key := range ranks {
		if a.ranks[key] {
			list = append(list, key)
		}
	}
	return list, nil
}

func (a *absence) set(name events.WorkerID, absent bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ranks[events.RankKey{Instance: name}] = absent
}

// watchful is a site with a node that checks for absent shims, and with the addresses of engines.
type watchful struct {
	*site
	absence
	node *Registry
	ends chan logtest.Line // about leases that the node has ended
}

func newWatchful(t *testing.T) *watchful {
	w := &watchful{site: newSite(t), absence: absence{ranks: map[events.RankKey]bool{}},
		ends: make(chan logtest.Line, 100)}
	w.node = New(Config{Namespace: w.ns, Bucket: w.bucket, Absent: w.absence.of, Clear: w.nodes[0].cfg.Clear,
		Log: logtest.New(func(l logtest.Line) {
			if l.Text == "a worker's engine is gone; its lease is ended" || l.Text == "a worker's lease has expired" {
				w.ends <- l
			}
		})})
	running, stop := context.WithCancel(w.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.node.Run(running)
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})
	return w
}

// serving registers a worker with a shim on NATS, and with a lease longer than the test.
func (w *watchful) serving(name, address string, since time.Time) *Lease {
	r := record(name, time.Hour)
	r.Source, r.Control, r.Worker = "vllm", true, &api.WorkerSpec{Endpoint: "http://" + address}
	l := must(NewLease(w.ns, r, nil))
	l.record.Holder.Since = since
	l.data = must(l.record.encode())
	_, _, err := l.renew(w.ctx, 0)
	w.must(err)
	w.until(name+" is known", func() bool { _, ok := w.node.Worker(r.Key()); return ok })
	return l
}

// answered waits until the node has connected to an address.
func (w *watchful) answered(address string) {
	w.until("the node has connected to "+address, func() bool {
		w.node.vigil.mu.Lock()
		defer w.node.vigil.mu.Unlock()
		p := w.node.vigil.places[address]
		return p != nil && p.state == placeAnswered
	})
}

func (w *watchful) present(name events.WorkerID) {
	w.until("the node has seen the shim of "+string(name), func() bool {
		w.node.vigil.mu.Lock()
		defer w.node.vigil.mu.Unlock()
		return w.node.vigil.present[events.RankKey{Instance: name}] != ""
	})
}

func listener(t *testing.T) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// TestDeadAddress: a node ends the lease of a rank without a shim and with a refusing serving address. A rank with an
// accepting address stays, and so does a rank with a shim.
func TestDeadAddress(t *testing.T) {
	w := newWatchful(t)
	now := time.Now()
	dead, lives, served := listener(t), listener(t), listener(t)
	w.serving("dead", dead.Addr().String(), now)
	w.serving("shimless", lives.Addr().String(), now)
	w.serving("served", served.Addr().String(), now)
	for _, l := range []net.Listener{dead, lives, served} {
		w.answered(l.Addr().String())
	}
	w.present("dead")
	w.present("shimless")
	w.set("dead", true)
	w.set("shimless", true)
	served.Close() // the shim is connected, and would report a gone engine
	dead.Close()
	w.until("the dead worker is cleared", func() bool { return w.wasCleared("dead") })
	w.until("it is gone", func() bool { return w.know("served", "shimless") })
	for _, node := range append(w.nodes, w.node) {
		w.until("the node lists the dead worker alone", func() bool {
			list := node.Expired(time.Now())
			return len(list) == 1 && list[0].Instance == "dead"
		})
	}
	if l := <-w.ends; !strings.Contains(fmt.Sprint(l.Attrs["why"]),
		"its shim has left NATS, and its serving address "+dead.Addr().String()+" refuses") {
		t.Errorf("the line is %+v", l)
	}
	if w.wasCleared("shimless") || w.wasCleared("served") {
		t.Error("a worker with an accepting address or with a shim was cleared")
	}
}

// TestEndedLeaseReturns: a node has ended the lease of a live shim, or the lease has expired, and the clear has not
// succeeded yet. The worker is unschedulable until the shim's next renewal.
func TestEndedLeaseReturns(t *testing.T) {
	for name, dead := range map[string]bool{"a dead address": true, "an expired lease": false} {
		t.Run(name, func(t *testing.T) {
			w := newWatchful(t)
			w.hangs = "w"
			key := events.RankKey{Instance: "w"}
			is := func(want api.WorkerState, why string) {
				t.Helper()
				w.until(fmt.Sprintf("the worker is %s", want), func() bool {
					r := w.node.Pool("m").Rank(key)
					return r != nil && r.Record.State == want && strings.Contains(strings.Join(r.Record.Reasons, "; "), why)
				})
			}
			renew := func() { w.shim("w", time.Hour) }
			if engine := listener(t); dead {
				l := w.serving("w", engine.Addr().String(), time.Now())
				held := must(w.bucket.Latest(w.ctx, l.name)).Revision
				w.answered(engine.Addr().String())
				w.present("w")
				is(api.WorkerSchedulable, "")
				w.set("w", true)
				engine.Close()
				renew = func() {
					w.set("w", false)
					if _, expired, err := l.renew(w.ctx, held); err != nil || !expired {
						t.Errorf("the renewal after the end: expired %v, %v", expired, err)
					}
				}
			} else {
				w.shim("w", MinLease)()
			}
			<-w.hanging
			is(api.WorkerUnschedulable, "its lease has expired")
			renew()
			is(api.WorkerSchedulable, "")
			if w.wasCleared("w") {
				t.Error("the worker was cleared")
			}
		})
	}
}

// TestAddressIsTaken: a new worker at the address of a worker without a shim replaces the old worker, although the
// address accepts. With the old shim, both stay.
func TestAddressIsTaken(t *testing.T) {
	w := newWatchful(t)
	now, l := time.Now(), listener(t)
	address := l.Addr().String()
	w.serving("away", address, now.Add(-2*time.Minute))
	w.serving("there", address, now.Add(-time.Minute))
	w.present("away")
	w.set("away", true)
	w.serving("new", address, now)
	w.until("the old worker is cleared", func() bool { return w.wasCleared("away") })
	w.until("it is gone", func() bool { return w.know("new", "there") })
}

// TestStoppedShim: a shim that stops before the engine records that in the lease. The worker may be chosen until the
// address refuses.
func TestStoppedShim(t *testing.T) {
	w := newWatchful(t)
	engine := listener(t)
	l := w.serving("w", engine.Addr().String(), time.Now())
	w.answered(engine.Addr().String())
	w.must(l.Leave(w.ctx))
	state := func() (api.WorkerState, string) {
		ranks := w.nodes[0].Pool("m").Ranks
		if len(ranks) != 1 {
			return "", ""
		}
		return ranks[0].Record.State, strings.Join(ranks[0].Record.Reasons, "; ")
	}
	w.until("the stop of the shim is recorded", func() bool {
		state, why := state()
		return state == api.WorkerSchedulable && strings.Contains(why, "its shim was stopped at")
	})
	engine.Close()
	w.until("the worker is cleared", func() bool { return w.wasCleared("w") })
	w.until("it is gone", func() bool { return w.know() })
	if list := w.nodes[0].Expired(time.Now()); len(list) != 0 {
		t.Errorf("a worker with a stopped shim and engine is listed as expired: %+v", list)
	}
}

// TestVigilSteps drives the decisions about an address: the probes, and the meaning of results.
func TestVigilSteps(t *testing.T) {
	const address = "10.0.0.1:8000"
	key := events.RankKey{Instance: "w"}
	rank := func(why string) []suspect {
		return []suspect{{key: key, holder: "h", address: address, watched: true, why: why}}
	}
	refused := fmt.Errorf("dial: %w", syscall.ECONNREFUSED)
	v := newVigil()
	now := time.Duration(0)
	step := func(what, why string, wantProbe bool) *vigilStep {
		t.Helper()
		got := v.step(now, rank(why), 1)[address]
		if probe := got != nil && got.probe; probe != wantProbe {
			t.Errorf("%s: probe is %v", what, probe)
		}
		return got
	}
	probed := func(what string, err error, want bool) {
		t.Helper()
		if v.probed(address, err, now) != want {
			t.Errorf("%s: gone is not %v", what, want)
		}
	}
	if len(v.step(now, rank(""), 0)) != 0 {
		t.Error("a new address is probed beyond the limit")
	}
	step("a new address", "", true)
	step("while it is probed", "", false)
	probed("a refusal before the first connection", refused, false)
	step("at once after a refusal", "it is late", false)
	now += vigilPauseMin
	step("after the pause", "it is late", true)
	probed("a second refusal before the first connection", refused, false)
	now += vigilPauseMin
	step("the pause doubles", "", false)
	now += vigilPauseMin
	step("after two pauses", "", true)
	probed("the first connection", nil, false)
	step("no suspicion", "", false)
	if got := step("a suspicion", "it is late", true); len(got.suspects) != 1 {
		t.Errorf("the suspects are %+v", got)
	}
	probed("a time-out", context.DeadlineExceeded, false)
	step("again", "it is late", true)
	probed("it accepts", nil, false)
	step("and again", "it is late", true)
	probed("a refusal", refused, true)
	suspects := rank("it is late")
	suspects[0].successor = "other"
	if got := v.step(now, suspects, 1)[address]; len(got.replaced) != 1 || got.probe {
		t.Errorf("for an address of another worker: %+v", got)
	}
	if v.step(now, nil, 1); len(v.places) != 0 {
		t.Errorf("places without a rank: %+v", v.places)
	}
	step("registered again", "", true)
	probed("the rule forbids it", dial.ErrDenied, false)
	now += time.Hour
	step("forbidden", "it is late", false)

	marked := func(absent ...events.RankKey) string {
		list := rank("")
		v.mark(list, absent)
		return list[0].why
	}
	v = newVigil()
	for i, c := range []struct{ got, want string }{{marked(key), ""}, {marked(), ""},
		{marked(key), "its shim has left NATS"}, {marked(key), "its shim has left NATS"}, {marked(), ""}} {
		if c.got != c.want {
			t.Errorf("look %d: %q, want %q", i, c.got, c.want)
		}
	}
	next := rank("")
	next[0].holder = "another"
	if v.mark(next, []events.RankKey{key}); next[0].why != "" {
		t.Errorf("a shim that was never connected: %q", next[0].why)
	}
}

// TestSuspects lists the ranks to check, and the suspects by record.
func TestSuspects(t *testing.T) {
	r := New(Config{Namespace: &jetstream.Namespace{}, Mine: func(p events.Partition) bool { return p == 0 },
		Absent: func(context.Context, []events.RankKey) ([]events.RankKey, error) { return nil, nil }})
	r.apply(jetstream.Watched{Anew: true, Current: true})
	revision := uint64(0)
	put := func(p events.Partition, name string, change func(*Record)) {
		of := record(name, time.Minute)
		of.Control, of.Worker = true, &api.WorkerSpec{Endpoint: "http://10.0.0.1:8000"}
		change(&of)
		revision++
		r.apply(jetstream.Watched{Entries: []jetstream.Entry{{Key: must(jetstream.WorkerKey(p, of.Key())),
			Value: must(of.encode()), Revision: revision}}})
	}
	put(0, "plain", func(of *Record) { of.Holder.Since = time.Unix(1, 0) })
	put(0, "older", func(of *Record) { of.Holder.Since = time.Unix(1, 0) })
	put(0, "other-model", func(of *Record) { of.Model = "n" })
	put(0, "stopped", func(of *Record) {
		of.Shim = &ShimState{Stopped: time.Unix(3, 0)}
		of.Worker.Endpoint = "http://10.0.0.2:8000"
	})
	put(0, "no-control", func(of *Record) { of.Control, of.Worker.Endpoint = false, "http://10.0.0.3" })
	put(0, "no-address", func(of *Record) { of.Worker = nil })
	put(0, "no-port", func(of *Record) { of.Worker.Endpoint = "grpc://h" })
	put(0, "expired", func(of *Record) { of.State = Expired })
	put(1, "of-another-node", func(of *Record) { of.Holder.Since = time.Unix(3, 0) })
	look := func(when string, want ...string) {
		t.Helper()
		list := r.suspects()
		r.findTakers(list)
		var got []string
		for _, s := range list {
			got = append(got, fmt.Sprintf("%s %s watched:%v why:%q successor:%q", s.key, s.address, s.watched, s.why,
				s.successor))
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("%s, the list is\n%s\nwant\n%s", when, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	look("at first", `no-control/0 10.0.0.3:80 watched:false why:"" successor:""`,
		`older/0 10.0.0.1:8000 watched:true why:"" successor:""`,
		`other-model/0 10.0.0.1:8000 watched:true why:"" successor:""`,
		`plain/0 10.0.0.1:8000 watched:true why:"" successor:""`,
		`stopped/0 10.0.0.2:8000 watched:false why:"its shim was stopped" successor:""`)
	for _, e := range r.machine.entries {
		e.seen = -time.Hour
	}
	r.machine.proved, r.machine.since, r.machine.confirmed = true, -time.Hour, r.now()
	late := `watched:false why:"its lease is not renewed"`
	look("half a lease later", `no-control/0 10.0.0.3:80 `+late+` successor:""`,
		`older/0 10.0.0.1:8000 `+late+` successor:"of-another-node"`, `other-model/0 10.0.0.1:8000 `+late+` successor:""`,
		`plain/0 10.0.0.1:8000 `+late+` successor:"of-another-node"`,
		`stopped/0 10.0.0.2:8000 watched:false why:"its shim was stopped" successor:""`)
}

// BenchmarkSuspects measures a check of 10,000 ranks, once a second in a node.
func BenchmarkSuspects(b *testing.B) {
	r := New(Config{Namespace: &jetstream.Namespace{}})
	r.apply(jetstream.Watched{Anew: true, Current: true})
	for i := range 10_000 {
		of := record(fmt.Sprint("worker-", i), time.Minute)
		of.Control, of.Worker = true, &api.WorkerSpec{Endpoint: fmt.Sprintf("http://10.0.%d.%d:8000", i/250, i%250)}
		r.apply(jetstream.Watched{Entries: []jetstream.Entry{{Key: must(jetstream.WorkerKey(0, of.Key())),
			Value: must(of.encode()), Revision: uint64(i + 1)}}})
	}
	b.ReportAllocs()
	for b.Loop() {
		list := r.suspects()
		r.vigil.mark(list, nil)
		r.findTakers(list)
		r.vigil.step(0, list, 64)
	}
}

// TestVigilOfManyRanks: with many ranks, every second look is left out.
func TestVigilOfManyRanks(t *testing.T) {
	v := newVigil()
	for i, c := range []struct {
		ranks int
		rests bool
	}{{vigilOften, false}, {vigilOften, false}, {vigilOften + 1, true}, {vigilOften + 1, false}, {vigilOften + 1, true},
		{1, false}, {1, false}} {
		if got := v.rests(c.ranks); got != c.rests {
			t.Errorf("look %d at %d ranks: rests %t", i, c.ranks, got)
		}
	}
}
