package load

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestReplicas runs random operations with faults. The network loses, delays, duplicates and reorders messages. Nodes
// are disconnected and restarted. Models stay idle until the nodes drop the tables. Two seconds after the faults, all
// tables are equal and agree with the recorded changes. After the expiry of all requests, all tables are empty.
func TestReplicas(t *testing.T) {
	var tables Counts
	var replicas shared.Counts
	for round := range uint64(*rounds) {
		if err := history(*seed+round, &tables, &replicas); err != nil {
			t.Errorf("-seed=%d -rounds=1: %v", *seed+round, err)
		}
	}
	t.Logf("%+v", tables)
	t.Logf("%+v", replicas)
	if *rounds >= 100 && (tables.Rivals == 0 || tables.Superseded == 0 || tables.Expired == 0 ||
		tables.Gone == 0 || tables.Conflicts == 0 || replicas.Healed == 0 || replicas.Pushed == 0) {
		t.Error("the histories did not cover all kinds of events")
	}
}

// history plays a random history.
func history(seed uint64, tables *Counts, replicas *shared.Counts) error {
	r := rand.New(rand.NewPCG(seed, 3))
	expiry := []time.Duration{8 * time.Second, 8 * time.Second, 300 * time.Second}[r.IntN(3)]
	w := newWorld(seed, 3+r.IntN(3), Limits{Expiry: expiry})
	w.Run(2 * time.Second)
	late := time.Duration(0)
	for range 4 + r.IntN(8) {
		pace := time.Millisecond
		switch r.IntN(8) {
		case 0:
			w.Loss = r.Float64() * 0.7
		case 1:
			w.Twice = r.Float64()
		case 2:
			w.Delay = time.Duration(1+r.IntN(3000)) * time.Millisecond
			late = max(late, w.Delay)
		case 3:
			for _, n := range w.Nodes {
				n.Group = r.IntN(3)
			}
		case 4:
			w.start(r.IntN(len(w.Nodes)))
		case 5:
			w.Heal()
		case 6: // some models are idle for a long time
			w.models, pace = testModels[r.IntN(2):][:1], 20*time.Millisecond
		case 7: // all models are idle
			w.Run(time.Duration(r.IntN(3)) * expiry)
		}
		for range r.IntN(80) {
			w.op()
			w.Run(time.Duration(r.IntN(60)) * pace)
		}
		w.models = testModels
	}
	w.Heal()
	w.Run(3 * time.Second) // two seconds, and a third to resolve a duplicate id of a dead node
	// A booking of a dead node lives longer on other nodes, by the transit time of the booking.
	late = 4*late + 3*time.Second
	if err := w.check(late); err != nil {
		return fmt.Errorf("%d nodes, after the faults: %w", len(w.Nodes), err)
	}
	w.Run(expiry + late)
	for _, n := range w.Nodes {
		replicas.Exchanges += n.Machine.Counts.Exchanges
		replicas.Pushed += n.Machine.Counts.Pushed
		replicas.Healed += n.Machine.Counts.Healed
		replicas.Unsynced += n.Machine.Counts.Unsynced
		for _, t := range n.tables {
			c := t.Counts
			tables.Booked += c.Booked
			tables.PrefillDone += c.PrefillDone
			tables.OutputBlocks += c.OutputBlocks
			tables.Freed += c.Freed
			tables.Conflicts += c.Conflicts
			tables.Expired += c.Expired
			tables.Gone += c.Gone
			tables.Rivals += c.Rivals
			tables.Superseded += c.Superseded
		}
		for _, m := range testModels {
			if t := n.Table(m); t.Len() > 0 || t.Blocks() > 0 || t.Digest() != (Digest{}) || t.Check() != nil {
				return fmt.Errorf("node %d has %d requests after all have expired, %v", n.Place, t.Len(), t.Check())
			}
		}
		if !n.Ready() || n.Machine.Counts.Malformed > 0 {
			return fmt.Errorf("node %d: ready %v, %+v", n.Place, n.Ready(), n.Counts)
		}
	}
	return nil
}

// TestEventsSuffice runs without faults. All tables are equal a few milliseconds after each operation.
func TestEventsSuffice(t *testing.T) {
	w := quiet(t, 4)
	w.Delay = 1 // messages of a node keep their order
	for range testkit.Rounds(1000) {
		w.op()
		w.Run(10 * time.Millisecond) // to the writer, and from the writer to all nodes
		if err := w.check(0); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range w.Nodes { // a digest may be older than events in transit
		if n.Machine.Counts.Exchanges > 20 || n.Machine.Counts.Pushed > 20 {
			t.Errorf("node %d: %+v", n.Place, n.Counts)
		}
	}
}

func TestDuplicateIsAConflictEverywhere(t *testing.T) {
	w := quiet(t, 3)
	m := testModels[0]
	book := func(place int) error { return w.Nodes[place].Book(w.Now, m, Booking{ID: "r", Rank: rankKey(place)}) }
	if err := book(0); err != nil {
		t.Fatal(err)
	}
	w.Run(5 * time.Millisecond)
	for i := range w.Nodes {
		if err := book(i); !errors.Is(err, ErrConflict) {
			t.Errorf("node %d: %v", i, err)
		}
	}
	// Two disconnected nodes may book the same id. After the reconnection, all nodes keep the request with the lesser key.
	if err := w.Nodes[1].Free(w.Now, m, "r"); err != nil {
		t.Fatal(err)
	}
	w.Run(5 * time.Millisecond)
	w.Nodes[2].Group = 1
	for _, i := range []int{0, 2} {
		if err := book(i); err != nil {
			t.Fatal(err)
		}
	}
	w.Run(10 * time.Second)
	w.Heal()
	w.Run(2 * time.Second)
	if err := w.check(0); err != nil {
		t.Fatal(err)
	}
	winner := rankKey(0)
	if w.Nodes[2].cfg.Origin < w.Nodes[0].cfg.Origin {
		winner = rankKey(2)
	}
	rivals := uint64(0)
	for _, n := range w.Nodes {
		rivals += n.Table(m).Counts.Rivals
		if r := n.Table(m).ids["r"]; n.Table(m).Len() != 1 || r.rank != winner {
			t.Errorf("node %d has %+v, want the request of %v", n.Place, r, winner)
		}
	}
	if rivals == 0 {
		t.Error("no node counted the rival")
	}
}

// TestStart starts a node in a running fleet. The node becomes ready only with all requests of the fleet, even if many
// messages are lost.
func TestStart(t *testing.T) {
	for _, loss := range []float64{0, 0.3} {
		w := quiet(t, 3)
		for i := range 2000 {
			err := w.Nodes[i%3].Book(w.Now, testModels[i%2], Booking{ID: fmt.Sprint(i), Rank: rankKey(i % 8),
				Hashes: prompt(w)})
			if err != nil {
				t.Fatal(err)
			}
		}
		w.Run(2 * time.Second)
		for i := 0; i < 2000; i += 3 {
			if err := w.Nodes[i%3].Free(w.Now, testModels[i%2], fmt.Sprint(i)); err != nil {
				t.Fatal(err)
			}
		}
		w.Run(2 * time.Second)
		w.start(2) // bookings of the earlier session stay
		w.Run(7 * time.Second)
		w.Loss = loss
		w.start(1)
		n := w.Nodes[1]
		began := w.Now
		for !n.Ready() {
			w.Run(time.Millisecond)
		}
		took := w.Now - began
		if n.Machine.Counts.Unsynced > 0 || loss == 0 && took > 50*time.Millisecond {
			t.Errorf("loss %v: ready after %v, %+v", loss, took, n.Counts)
		}
		for _, m := range testModels {
			if a, b := n.Table(m).Digest(), w.Nodes[0].Table(m).Digest(); a != b {
				t.Errorf("loss %v: ready with %+v, want %+v", loss, a, b)
			}
			if got, want := len(n.ended[m]), len(w.Nodes[0].ended[m]); loss == 0 && got != want {
				t.Errorf("ready with %d of %d ended requests", got, want)
			}
		}
	}
}

// TestStartSendsRequestsOnce measures the traffic of a start. The starting node receives all requests. The running
// nodes do not receive the requests again.
func TestStartSendsRequestsOnce(t *testing.T) {
	w := quiet(t, 4)
	for i := range 1000 {
		if err := w.Nodes[i%4].Book(w.Now, testModels[0], Booking{ID: fmt.Sprint(i), Rank: rankKey(i % 8),
			Hashes: make([]events.SeqHash, 32)}); err != nil {
			t.Fatal(err)
		}
	}
	w.Run(2 * time.Second)
	before := w.Nodes[0].Received
	w.start(3)
	w.Run(400 * time.Millisecond)
	if n := w.Nodes[3]; !n.Ready() || n.Received < 256_000 || n.Table(testModels[0]).Len() != 1000 {
		t.Errorf("the starting node is ready: %v, received %d bytes, has %d requests", n.Ready(), n.Received,
			n.Table(testModels[0]).Len())
	}
	if n := w.Nodes[0].Received - before; n > 64_000 { // beats, and half of a summary
		t.Errorf("a running node received %d bytes", n)
	}
}

// TestAlone runs a node without peers. The node becomes ready after a call of Alone, or after a time without messages.
// The node does not send bookings without peers. A later node receives the bookings at its start.
func TestAlone(t *testing.T) {
	w := newWorld(*seed, 1, Limits{})
	n, m := w.Nodes[0], testModels[0]
	if n.Alone(); !n.Ready() {
		t.Error("not ready after Alone")
	}
	w.start(0)
	n = w.Nodes[0]
	if w.Run(time.Second); n.Ready() {
		t.Error("ready before a peer could answer")
	}
	if w.Run(time.Second); !n.Ready() {
		t.Error("not ready without peers")
	}
	w.Run(10 * time.Second)
	before := w.Published
	for i := range 100 {
		if err := n.Book(w.Now, m, Booking{ID: fmt.Sprint(i), Rank: rankKey(0), Hashes: prompt(w)}); err != nil {
			t.Fatal(err)
		}
	}
	w.Run(100 * time.Millisecond)
	if w.Published-before > 200 {
		t.Errorf("a node without peers sent %d bytes", w.Published-before)
	}
	w.start(1)
	for !w.Nodes[1].Ready() {
		w.Run(time.Millisecond)
	}
	if got := w.Nodes[1].Table(m).Len(); got != 100 {
		t.Errorf("ready with %d of 100 requests", got)
	}
}

// TestLongExpiry books a request with an expiry above the greatest age in a message. The request expires at the
// greatest age instead, and another node can decode the request.
func TestLongExpiry(t *testing.T) {
	w := newWorld(*seed, 1, Limits{Expiry: 2 * MaxExpiry})
	w.start(0)
	n, m := w.Nodes[0], testModels[0]
	n.Alone()
	if err := n.Book(w.Now, m, Booking{ID: "a", Rank: rankKey(0)}); err != nil {
		t.Fatal(err)
	}
	w.start(1)
	w.Run(10 * time.Second)
	if got := w.Nodes[1].Table(m).Len(); got != 1 {
		t.Errorf("another node has %d requests, want 1", got)
	}
}

// TestProgressExtendsExpiry reports progress of a request every 10 ms, at alternating nodes, for ten times the expiry.
// The request stays on all nodes, also on a starting node, and nodes exchange few messages. A request without progress
// expires.
func TestProgressExtendsExpiry(t *testing.T) {
	const expiry = 4 * time.Second
	w := newWorld(*seed, 3, Limits{Expiry: expiry})
	w.Run(2 * time.Second)
	m := testModels[0]
	for _, id := range []string{"silent", "stream"} {
		if err := w.Nodes[0].Book(w.Now, m, Booking{ID: id, Rank: rankKey(0), PrefillTokens: 10}); err != nil {
			t.Fatal(err)
		}
	}
	booked := w.Now
	w.Run(100 * time.Millisecond)
	changes := uint64(0)
	for i := range 10 * int(expiry/(10*time.Millisecond)) {
		if i == 700 {
			w.start(2)
		}
		n := w.Nodes[i%2]
		version := n.Table(m).ids["stream"].extended
		report := (*Table).PrefillComplete
		if i%3 == 0 {
			report = (*Table).Progress
		}
		if err := n.Update(w.Now, m, "stream", report); err != nil {
			t.Fatalf("after %v: %v", w.Now-booked, err)
		}
		if n.Table(m).ids["stream"].extended != version {
			changes++
		}
		w.Run(10 * time.Millisecond)
	}
	if changes < 70 || changes > 80 {
		t.Errorf("%d changes in ten times the expiry, want 70 to 80", changes)
	}
	for _, n := range w.Nodes {
		table := n.Table(m)
		if table.Has("silent") || !table.Has("stream") || table.Check() != nil {
			t.Errorf("node %d: silent %v, stream %v, %v", n.Place, table.Has("silent"), table.Has("stream"), table.Check())
		}
		r := table.ids["stream"]
		if r != nil && table.sent(r).Round(100*time.Millisecond) != booked.Round(100*time.Millisecond) {
			t.Errorf("node %d: the request was booked at %v, not %v", n.Place, booked, table.sent(r))
		}
	}
	w.Run(expiry + time.Second)
	for _, n := range w.Nodes {
		if n.Len() != 0 {
			t.Errorf("node %d has %d requests after the expiry", n.Place, n.Len())
		}
	}
}

// TestIdleModelsMakeRoom books in the greatest number of models, and then in the same number of new models.
func TestIdleModelsMakeRoom(t *testing.T) {
	w := newWorld(*seed, 2, Limits{Expiry: 2 * time.Second})
	w.Run(2 * time.Second)
	book := func(name string) error {
		return w.Nodes[0].Book(w.Now, Model{Name: name}, Booking{ID: "r", Rank: rankKey(0)})
	}
	for round := range 3 {
		for i := range 254 {
			if err := book(fmt.Sprint(round, "-", i)); err != nil {
				t.Fatalf("round %d, model %d: %v", round, i, err)
			}
			if i%16 == 0 {
				w.Run(10 * time.Millisecond)
			}
		}
		w.Run(10 * time.Millisecond)
		for _, n := range w.Nodes {
			if n.Len() != 254 {
				t.Errorf("round %d: node %d has %d requests", round, n.Place, n.Len())
			}
		}
		// Two models are always busy, so beats and exchanges continue.
		for end := w.Now + 10*time.Second; w.Now < end; w.Run(time.Second) {
			for _, m := range testModels {
				_ = w.Nodes[1].Book(w.Now, m, Booking{ID: "busy", Rank: rankKey(0)})
			}
		}
		w.Run(3 * time.Second)
	}
	for _, n := range w.Nodes {
		for _, m := range n.Models() {
			if !slices.Contains(testModels, m) {
				t.Errorf("node %d has a table of %v", n.Place, m)
			}
		}
	}
}

// TestNodeReusesID loses the end of a request. The node then books another request with the same id.
func TestNodeReusesID(t *testing.T) {
	for _, order := range [][]uint64{{5, 9}, {9, 5}} {
		table := NewTable(1, Limits{})
		for _, seq := range order {
			table.put(0, &event{left: time.Minute, record: record{key: Key{Owner: 7, Seq: seq}, id: "r",
				rank: rankKey(int(seq))}})
		}
		if r := table.ids["r"]; table.Len() != 1 || r.key.Seq != 9 || table.Counts.Superseded != 1 || len(table.rivals) > 0 {
			t.Errorf("in order %v: %+v of %d", order, r.key, table.Len())
		}
		if err := table.Check(); err != nil {
			t.Error(err)
		}
	}
}

// TestShortestLifeCounts receives a booking with three different remaining times. The shortest time counts.
func TestShortestLifeCounts(t *testing.T) {
	table := NewTable(1, Limits{})
	for _, left := range []time.Duration{20, 10, 30} {
		table.put(0, &event{left: left * time.Second, record: record{key: Key{Owner: 7, Seq: 1}, id: "r",
			rank: rankKey(0)}})
	}
	if table.Tick(9 * time.Second); table.Len() != 1 {
		t.Error("the request expired early")
	}
	if table.Tick(10 * time.Second); table.Len() != 0 {
		t.Error("the request expired late")
	}
}

// TestDifferentLimits sets a lower limit on one node. The booking node checks the local limit against the requests of
// all nodes. All nodes accept the booking, even a starting node and a node with a lower limit. A node above the local
// limit refuses new bookings.
func TestDifferentLimits(t *testing.T) {
	w := quiet(t, 3)
	few, many, m := w.Nodes[0], w.Nodes[1], testModels[0]
	few.model(m).table.limits = Limits{Requests: 2, Blocks: 2 * blocksEach, Prompt: maxPrompt, Expiry: time.Minute}
	book := func(n *simNode, id string) error {
		err := n.Book(w.Now, m, Booking{ID: id, Rank: rankKey(0), Hashes: []events.SeqHash{1, 2, 3}})
		w.Run(10 * time.Millisecond)
		return err
	}
	for i := range 5 {
		if err := book(many, fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := book(few, "a"); !errors.Is(err, ErrFull) {
		t.Errorf("the node with the lower limit returns %v", err)
	}
	if err := few.Update(w.Now, m, "0", (*Table).PrefillComplete); err != nil {
		t.Error(err)
	}
	w.Run(time.Second)
	if err := w.check(0); err != nil {
		t.Error(err)
	}
	w.start(2)
	w.Run(2 * time.Second)
	if n := w.Nodes[2].Table(m).Len(); n != 5 {
		t.Errorf("a starting node has %d requests", n)
	}
	for i := range 4 { // booked on another node
		if err := few.Free(w.Now, m, fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	w.Run(time.Second)
	if err := book(few, "a"); err != nil {
		t.Errorf("below the limit, the node returns %v", err)
	}
	w.Run(time.Second)
	if err := w.check(0); err != nil {
		t.Error(err)
	}
}

// TestBlocksGrowWithRequests derives the default limit of blocks from the limit of requests.
func TestBlocksGrowWithRequests(t *testing.T) {
	for _, c := range []struct{ given, requests, blocks int }{
		{0, 1 << 16, 1 << 24}, {1000, 1000, 256_000}, {1 << 30, 1 << 20, 1 << 28},
	} {
		l := Limits{Requests: c.given}
		if l.setDefaults(); l.Requests != c.requests || l.Blocks != c.blocks {
			t.Errorf("%d requests: %+v", c.given, l)
		}
	}
}
