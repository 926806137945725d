//go:build judges

package torture

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

const (
	// healedBy is how many heartbeats nodes have, twice a second, to come to the same loads after the last fault.
	healedBy = 4

	// lateMost is the longest time after the expiry for which a delayed booking may be visible.
	lateMost = 5 * time.Second
)

// TestTortureLoad applies the faults of TestTortureCluster to the shared loads and sessions of nodes. Routers book
// requests, some with sessions, report progress and end requests, over HTTP and NATS, on any of three nodes, and die.
// Nodes and NATS servers are killed, restarted, paused, disconnected and delayed. Some ids are sent to two nodes at the
// same time.
//
// After a round all processes run again. When NATS carries messages between the surviving nodes, these nodes have four
// heartbeats, two seconds, until their digests, loads and session bindings are equal. Every node is queried separately.
// The restarted nodes have the same time after their readiness. Then every id is looked up and must satisfy the
// promises of internal/choose/load:
//
//   - A booking exists, unless ended, if a living node acknowledged it or all nodes had it after an earlier round.
//     Bookings that only a killed node acknowledged may be lost; the test counts them.
//   - A request is gone if a living node acknowledged the end, or if the request is older than the expiry.
//   - The load of every rank is the sum of the existing requests.
//   - Every node refuses the id of a running request. If two disconnected nodes have booked the same id, a single
//     booking remains; the test counts such ids.
func TestTortureLoad(t *testing.T) {
	seed, rounds := scheduleSeed(), roundsOr(3)
	r := &loadTorture{T: t, mayhem: newMayhem(rand.New(rand.NewPCG(seed, 4))),
		programs: func(name string) string { return harness.Program(t, name) }}
	if *tortureRace {
		r.programs = racingPrograms(t)
	}
	begun := time.Now()
	defer func() {
		if r.routers != nil {
			r.routers.end()
			maps.Copy(r.counts, r.routers.counts)
		}
		if t.Failed() {
			t.Logf("seed %d, round %d; transcript:\n%s", seed, r.round, strings.Join(r.transcript, "\n"))
			for _, d := range r.w.daemons() {
				t.Logf("the end of the output of %s (full output in %s):\n%s", d.name, d.said, d.tail(40))
			}
		}
		if r.w != nil {
			r.w.end()
		}
		t.Logf("seed %d, %d rounds in %v", seed, r.round, time.Since(begun).Round(time.Second))
		for _, name := range slices.Sorted(maps.Keys(r.counts)) {
			t.Logf("%7d %s", r.counts[name], name)
		}
		t.Logf("from the last fault's end until NATS carried messages between the nodes that had lived on: %s",
			spread(r.heard))
		t.Logf("from then on, and from the start of the others, until loads were equal: %s; at most %d heartbeats",
			spread(r.healed), r.beats)
	}()
	r.deploy()
	for r.round = 1; r.round <= rounds; r.round++ {
		r.play()
	}
	r.round--
	r.expire()
}

type loadTorture struct {
	*testing.T
	mayhem
	programs  func(string) string
	w         *clusterWorld
	routers   *routers
	round     int
	survivors int       // nodes that survive this round
	mortal    []*daemon // nodes that may be killed in this round
	// bookings that nodes ended because of another booking with the same id, up to the last round
	rivals map[life]uint64
	heard  []time.Duration // from the end of the last fault until NATS carried messages between all nodes
	healed []time.Duration // from then on, until loads were equal
	beats  uint64          // the longest recovery
}

// deploy starts a cluster without engines, and registers workers without events.
func (r *loadTorture) deploy() {
	r.begun = time.Now()
	routing := filepath.Join(r.TempDir(), "routing.yaml")
	if err := os.WriteFile(routing, []byte("session_affinity: {ttl_secs: 60, mode: soft}\n"), 0o600); err != nil {
		r.Fatal(err)
	}
	r.w = startClusterWorld(r.T, r.rng, r.programs, r.counts, 0, "--request-expiry", loadExpiry.String(),
		"--drain-timeout", "1s", "--routing-config", routing,
		"--guess-policy", "off") // charge the whole prompt of a request
	r.stage = r.w.stage
	for _, d := range r.w.nodes {
		usual := d.excused
		d.excused = func(code int, last string) bool {
			// The record write of the life before arrived late: a supervisor restarts the node.
			late := code == 1 && strings.Contains(last, "another process uses this node's name, and it is alive")
			if late {
				r.counts["restarts of nodes after a late write of their own record"]++
			}
			return late || usual(code, last)
		}
	}
	r.w.mend()
	r.routers = newRouters(r.w)
	for _, k := range loadRanks {
		w := &api.WorkerRegistration{Instance: k.Instance, Model: loadModel, BlockSize: harness.BlockSize}
		w.Events, w.RankSize = api.EventsNone, 1
		if k.Rank > 0 || k.Instance == "w1" {
			w.RankSize = 2
		}
		r.w.until("worker "+string(k.Instance)+" is registered", func() error {
			ctx, cancel := context.WithTimeout(context.Background(), overHTTP)
			defer cancel()
			_, err := r.routers.nats[0].RegisterWorker(ctx, w)
			return err
		})
	}
	r.w.until("the nodes are in order", r.w.settled)
	for _, d := range r.w.nodes {
		r.w.until(d.name+" knows the workers", func() error {
			var list api.LoadList
			body := api.LoadsRequest{Model: loadModel}
			if err := r.w.ask(d, "POST", "/v1/loads", body, &list); err != nil {
				return err
			}
			if n := len(list.Models[0].Ranks); n != len(loadRanks) {
				return fmt.Errorf("%d ranks", n)
			}
			return nil
		})
	}
}

// play plays a round.
func (r *loadTorture) play() {
	r.transcript, r.begun = nil, time.Now()
	lives := r.routers.lives()
	r.mortal = r.mortal[:0]
	for _, i := range r.rng.Perm(len(r.w.nodes))[:r.rng.IntN(len(r.w.nodes)+1)] {
		r.mortal = append(r.mortal, r.w.nodes[i])
	}
	r.routers.start(r.rng)
	for range 15 + r.rng.IntN(25) {
		r.step()
	}
	r.undo(true)
	r.note("all faults end")
	ended := time.Now()
	r.w.mend()
	r.routers.quiet()
	var old []*daemon
	for _, l := range lives {
		if l.d.begun.Load() == l.begun {
			old = append(old, l.d)
		}
	}
	r.survivors = len(old)
	r.judge(r.settle(ended, old))
	r.listen(r.T)
	r.counts["rounds"]++
}

// step performs a single action.
func (r *loadTorture) step() {
	r.undo(false)
	switch n := r.rng.IntN(100); {
	case n < 40:
		d := 300
		if r.rng.IntN(4) == 0 {
			d = 1500
		}
		time.Sleep(time.Duration(r.rng.IntN(d)) * time.Millisecond)
	case n < 55:
		if len(r.mortal) > 0 {
			r.kill(r.mortal[r.rng.IntN(len(r.mortal))])
		}
	case n < 60:
		r.hold(r.w.nodes[r.rng.IntN(len(r.w.nodes))])
	case n < 65:
		d := r.w.servers[r.rng.IntN(len(r.w.servers))]
		if !slices.ContainsFunc(r.w.servers, func(d *daemon) bool { return !d.alive() || r.held[d] }) {
			r.kill(d)
		}
	case n < 80:
		r.spoilConnection()
	case n < 88:
		r.cutOff(r.w.nodes[r.rng.IntN(len(r.w.nodes))])
	default:
		r.startAll()
	}
}

// cutOff closes all connections of a node to NATS for a while. The node continues to serve HTTP.
func (r *loadTorture) cutOff(d *daemon) {
	who := strings.Fields(d.name)[1] + "→"
	r.note("%s is cut off", d.name)
	r.count("nodes cut off")
	for i, name := range r.w.names {
		if strings.HasPrefix(name, who) {
			p := r.w.proxies[i]
			p.set(false, true)
			p.cut()
			r.later = append(r.later, undoing{time.Now().Add(2 * time.Second), func() { p.set(false, false) }})
		}
	}
}

// reading is a node's reply about loads.
type reading struct {
	at       time.Time // before the request
	status   api.LoadStatus
	sessions api.SessionStatus
	loads    api.ModelLoads
}

// digest returns the part that must be equal on all nodes.
func (s *reading) digest() (d api.ModelDigest) {
	for _, m := range s.status.Models {
		if m.Model == loadModel {
			d = m
		}
	}
	d.Conflicts, d.Rivals, d.Expired = 0, 0, 0
	d.Booked, d.Freed, d.Full, d.Gone = 0, 0, 0, 0
	d.Hash = cmp.Or(d.Hash, fmt.Sprintf("%016x", 0)) // a table of nothing is as none
	d.Model = loadModel
	return d
}

// read reads the loads of a node.
func (r *loadTorture) read(d *daemon) (s reading, err error) {
	s.at = time.Now()
	var status api.Status
	if err := r.w.ask(d, "GET", "/v1/status", nil, &status); err != nil {
		return s, err
	}
	if !status.Ready || status.Load == nil || !status.Load.Ready {
		return s, fmt.Errorf("%s is not ready", d.name)
	}
	s.status, s.sessions = *status.Load, *status.Sessions
	var list api.LoadList
	err = r.w.ask(d, "POST", "/v1/loads", api.LoadsRequest{Model: loadModel}, &list)
	if err == nil && len(list.Models) != 1 {
		err = fmt.Errorf("%s has loads %+v", d.name, list)
	}
	if err == nil {
		s.loads = list.Models[0]
	}
	return s, err
}

func (r *loadTorture) readAll(nodes []*daemon) (all []reading, err error) {
	for _, d := range nodes {
		s, err := r.read(d)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// connected returns an error unless every NATS server carries messages to the given nodes.
func (r *loadTorture) connected(nodes []*daemon) error {
	for i, of := range r.routers.nodes {
		for _, d := range nodes {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			_, err := of[slices.Index(r.w.nodes, d)].Status(ctx)
			cancel()
			if err != nil {
				return fmt.Errorf("%s, by way of server %d: %w", d.name, i+1, err)
			}
		}
	}
	return nil
}

// settle waits until all nodes run, are connected, and have equal loads. The surviving nodes come first.
func (r *loadTorture) settle(ended time.Time, old []*daemon) []reading {
	if len(old) > 1 {
		r.counts["rounds with two or more surviving nodes"]++
		first := r.hearing(old)
		r.heard = append(r.heard, time.Since(ended))
		r.equal(old, first)
	}
	return r.equal(r.w.nodes, r.hearing(r.w.nodes))
}

// hearing waits until nodes are connected, and returns their readings.
func (r *loadTorture) hearing(nodes []*daemon) (first []reading) {
	r.w.until("nodes are ready and connected", func() (err error) {
		if first, err = r.readAll(nodes); err != nil {
			return err
		}
		return r.connected(nodes)
	})
	r.note("%d nodes are connected", len(nodes))
	return first
}

// equal waits until nodes have equal loads. first are the earlier readings.
func (r *loadTorture) equal(nodes []*daemon, first []reading) []reading {
	begun := time.Now()
	for all := first; ; {
		r.w.await("nodes report their loads", func() (err error) {
			all, err = r.readAll(nodes)
			return err
		})
		differ := ""
		for _, s := range all {
			if a, b := all[0].digest(), s.digest(); a != b || a.Twice > 0 {
				differ = fmt.Sprintf("%+v and %+v", a, b)
			}
			if !slices.Equal(all[0].loads.Ranks, s.loads.Ranks) || all[0].loads.Requests != s.loads.Requests {
				differ += fmt.Sprintf("\n%+v and %+v", all[0].loads, s.loads)
			}
			if a, b := all[0].sessions, s.sessions; a.Sessions != b.Sessions || a.Hash != b.Hash {
				differ += fmt.Sprintf("\n%+v and %+v", a, b)
			}
		}
		passed := all[0].status.Beats - first[0].status.Beats // on the node with the fewest heartbeats
		for i := range all {
			passed = min(passed, all[i].status.Beats-first[i].status.Beats)
		}
		if differ == "" {
			r.note("%d nodes have the same loads: %d requests, %d sessions", len(nodes), all[0].loads.Requests,
				all[0].sessions.Sessions)
			r.counts["sessions that were bound after a round"] += all[0].sessions.Sessions
			r.healed = append(r.healed, time.Since(begun))
			r.beats = max(r.beats, passed)
			return all
		}
		if passed > healedBy {
			r.Fatalf("after %v and %d heartbeats loads differ: %s", time.Since(begun), passed, differ)
		}
		time.Sleep(15 * time.Millisecond)
	}
}

// judge looks up every request, and compares the result with the promises and with the loads.
func (r *loadTorture) judge(all []reading) {
	now := all[0].at
	var list []*tracked
	for _, q := range r.routers.all {
		list = append(list, q)
	}
	slices.SortFunc(list, func(a, b *tracked) int { return a.tried.Compare(b.tried) })
	lives := r.routers.lives()
	known := func(f *fact) { // all nodes have a single node's data now
		if f.survives() {
			*f = nil
			for _, l := range lives {
				*f = append(*f, ack{l})
			}
		}
	}
	twice := 0
	for _, q := range list {
		if earliest, _ := q.deadline(); q.twice && !q.judged && q.booked[:1].survives() && q.booked[1:].survives() &&
			time.Now().Before(earliest) {
			twice++
		}
		known(&q.booked)
		known(&q.done)
		for i := range q.outputs {
			known(&q.outputs[i])
		}
	}
	r.judgeRivals(all, twice)

	wrong := make([]string, len(list))
	expect := newExpected()
	var looking sync.WaitGroup
	room := make(chan bool, 16)
	for i, q := range list {
		by := r.routers.to(r.w.nodes[r.rng.IntN(len(r.w.nodes))])
		looking.Go(func() {
			room <- true
			defer func() { <-room }()
			done := q.done.survives()
			maybe := done || q.maybeDone || len(q.done) > 0
			acked, sure := len(q.booked) > 0, q.booked.survives()
			before := q.latest // the look is progress, and restarts the expiry
			if v := r.routers.prefillComplete(q, by); v != unknown {
				after := q.latest
				q.latest = before
				wrong[i] = r.judgeOne(q, v == yes, acked, sure, now)
				expect.add(q, done, maybe, now)
				q.latest = after
			} else {
				wrong[i] = "the state is unknown"
			}
		})
	}
	looking.Wait()
	for i, q := range list {
		if wrong[i] != "" {
			r.Errorf("request %s, tried %v ago: %s: %+v", q.id, time.Since(q.tried), wrong[i], q)
		}
	}
	for _, l := range all[0].loads.Ranks {
		if err := expect.judge(l); err != nil {
			r.Errorf("%s/%d: %v", l.Worker, l.Rank, err)
		}
	}
	r.judgeIDs(list)
	if r.Failed() {
		r.FailNow()
	}
	for _, q := range list {
		late := q.maybeBooked && !q.judged // a call without an answer may be carried out yet
		q.judged = true
		switch {
		case !q.there && !late:
			delete(r.routers.all, q.id)
		case q.there:
			if q.maybeBooked = false; !q.booked.survives() {
				q.booked = nil
				for _, l := range lives {
					q.booked = append(q.booked, ack{l})
				}
			}
			if len(q.freed) > 0 && !q.freed.survives() {
				q.freed, q.maybeFreed = nil, true
			}
		}
	}
}

// judgeOne checks the promises for a request, from the acknowledgement of the booking and the life of the node.
func (r *loadTorture) judgeOne(q *tracked, there, acked, sure bool, now time.Time) (wrong string) {
	r.routers.mu.Lock()
	defer r.routers.mu.Unlock()
	q.there = there
	earliest, latest := q.deadline()
	ended := len(q.freed) > 0 || q.maybeFreed
	switch {
	case there && q.freed.survives():
		return "the request was freed but exists"
	case there && now.After(latest.Add(lateMost)):
		return "the request should have expired"
	case there && len(q.freed) > 0:
		r.routers.counts["ends lost with the acknowledging node"]++
	case !there && time.Now().After(earliest):
		r.routers.counts["requests that expired"]++
	case !there && !ended && sure:
		return "it is missing"
	case !there && !ended && acked:
		r.routers.counts[fmt.Sprintf("bookings lost with all acknowledging nodes, with %d surviving nodes",
			r.survivors)]++
	case there && acked && !sure:
		r.routers.counts["bookings that outlived the acknowledging node"]++
	}
	return ""
}

// judgeIDs books some ids again. Every node must refuse the id of a running request.
func (r *loadTorture) judgeIDs(list []*tracked) {
	tried := 0
	for _, q := range list {
		earliest, _ := q.deadline()
		if !q.there || tried >= 3 && !q.twice || time.Until(earliest) < time.Second {
			continue
		}
		tried++
		for _, d := range r.w.nodes {
			_, _, err := r.routers.call(r.routers.to(d), func(ctx context.Context, c *client.Client) error {
				_, err := c.Book(ctx, &api.BookRequest{Prompt: api.Prompt{Model: loadModel}, RequestID: q.id,
					Worker: loadRanks[2].Instance})
				return err
			})
			if client.CodeOf(err) != api.CodeConflict && time.Now().Before(earliest) {
				r.Errorf("request %s is running, and %s replies to a second request: %v", q.id, d.name, err)
			}
		}
		if q.twice {
			r.routers.free(q, r.routers.to(r.w.nodes[r.rng.IntN(len(r.w.nodes))]))
		}
	}
	r.counts["running ids sent again to all nodes"] += tried
}

// judgeRivals compares the nodes' count of bookings ended because of another booking with the ids booked by two nodes.
// Any node may end such a booking first, and a killed node loses the count. So the check applies only to rounds in
// which all nodes survive.
func (r *loadTorture) judgeRivals(all []reading, twice int) {
	counted, before := uint64(0), r.rivals
	r.rivals = map[life]uint64{}
	for i, l := range r.routers.lives() {
		for _, m := range all[i].status.Models {
			r.rivals[l] += m.Rivals
		}
		counted += r.rivals[l] - before[l]
	}
	if r.survivors == len(r.w.nodes) && counted < uint64(twice) {
		r.Errorf("%d ids were booked twice by living nodes; %d bookings were ended because of that", twice, counted)
	}
	r.counts["ids booked by two living nodes"] += twice
	r.counts["bookings ended because of another booking with the id"] += int(counted)
}

// expire waits until all requests have expired. Nothing is left then.
func (r *loadTorture) expire() {
	r.transcript, r.begun = nil, time.Now()
	r.w.until("all requests expire", func() error {
		all, err := r.readAll(r.w.nodes)
		if err != nil {
			return err
		}
		for _, s := range all {
			if s.loads.Requests > 0 {
				return fmt.Errorf("%d requests are left", s.loads.Requests)
			}
		}
		for _, s := range all {
			for _, l := range s.loads.Ranks {
				if l.ActiveBlocks+l.ActivePrefillTokens+l.ActiveRequests > 0 {
					r.Fatalf("without a request, %+v", l)
				}
			}
		}
		return nil
	})
	r.Logf("the last requests expired %v after the last round, at an expiry of %v", time.Since(r.begun), loadExpiry)
}

// spread formats the distribution of times, and sorts the times.
func spread(took []time.Duration) string {
	n := len(took)
	if n == 0 {
		return "never"
	}
	slices.Sort(took)
	return fmt.Sprintf("p50 %v, p90 %v, longest %v", took[n/2].Round(time.Millisecond),
		took[n*9/10].Round(time.Millisecond), took[n-1].Round(time.Millisecond))
}

// expected is the expected load of every rank, from a least to a greatest load.
type expected struct {
	sync.Mutex
	requests, tokens, outputs map[events.RankKey][2]uint64
	blocks                    [2]map[events.RankKey]map[string]bool
}

func newExpected() *expected {
	x := &expected{requests: map[events.RankKey][2]uint64{}, tokens: map[events.RankKey][2]uint64{},
		outputs: map[events.RankKey][2]uint64{}}
	for i := range x.blocks {
		x.blocks[i] = map[events.RankKey]map[string]bool{}
	}
	return x
}

// add adds a request that was looked up after the reading of the loads. done is the last known state of the prefill.
func (x *expected) add(q *tracked, done, maybeDone bool, read time.Time) {
	earliest, latest := q.deadline()
	// the request may have existed at the time of the reading
	near := time.Now().After(earliest) && read.Before(latest.Add(lateMost))
	if !q.there && !near {
		return
	}
	x.Lock()
	defer x.Unlock()
	for _, k := range q.at {
		sure := 0
		if q.there && len(q.at) == 1 {
			sure = 1
		}
		add := func(m map[events.RankKey][2]uint64, least, most uint64) {
			v := m[k]
			m[k] = [2]uint64{v[0] + uint64(sure)*least, v[1] + most}
		}
		add(x.requests, 1, 1)
		least, most := q.tokens, q.tokens
		if maybeDone {
			least = 0
		}
		if done {
			most = 0
		}
		add(x.tokens, least, most)
		outs := uint64(0)
		for _, o := range q.outputs {
			if o.survives() {
				outs++
			}
		}
		add(x.outputs, outs, uint64(len(q.outputs)+q.maybeOuts))
		for i := 1 - sure; i < 2; i++ {
			if x.blocks[i][k] == nil {
				x.blocks[i][k] = map[string]bool{}
			}
			for _, b := range q.blocks {
				x.blocks[i][k][b] = true
			}
		}
	}
}

func (x *expected) judge(l api.RankLoad) error {
	k := events.RankKey{Instance: l.Worker, Rank: l.Rank}
	check := func(what string, got, least, most uint64) error {
		if got < least || got > most {
			return fmt.Errorf("%s are %d, not from %d to %d: %+v", what, got, least, most, l)
		}
		return nil
	}
	blocks := func(i int) uint64 { return uint64(len(x.blocks[i][k])) + x.outputs[k][i] }
	if err := check("requests", l.ActiveRequests, x.requests[k][0], x.requests[k][1]); err != nil {
		return err
	}
	if err := check("prefill tokens", l.ActivePrefillTokens, x.tokens[k][0], x.tokens[k][1]); err != nil {
		return err
	}
	if k == loadRanks[3] {
		return check("blocks", l.ActiveBlocks, 0, blocks(1))
	}
	return check("blocks", l.ActiveBlocks, blocks(0), blocks(1))
}
