package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// shelf is a keeper with immediate readiness.
type shelf struct {
	mu           sync.Mutex
	set          Set
	models       map[string]Set
	lastStarting chan struct{}
}

func (s *shelf) Keep(set Set) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set = set
}

func (s *shelf) Advertisement() Advertisement {
	st := Advertisement{Ready: s.Ready()}
	s.mu.Lock()
	defer s.mu.Unlock()
	st.SetModels(s.models)
	return st
}

func (s *shelf) ModelsChanged() <-chan struct{} { return s.lastStarting }

func (s *shelf) Ready() Set {
	s.mu.Lock()
	defer s.mu.Unlock()
	return SetOf(s.set.List()...)
}

// place starts a server for the test, with a namespace of eight partitions, and the bucket of nodes.
func place(
	t *testing.T, ctx context.Context,
) (*natsserver.Server, *jetstream.Conn, *jetstream.Namespace, *jetstream.Bucket) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	server := natskit.Start(t, natsserver.Options{})
	conn := natskit.Connect(t, server)
	ns, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "n", Partitions: 8})
	must(err)
	bucket, err := ns.EnsureNodes(ctx, time.Hour)
	must(err)
	return server, conn, ns, bucket
}

// TestJoinsBeforeOthersCanBeRead joins while reads of all records fail, as in a new NATS cluster.
func TestJoinsBeforeOthersCanBeRead(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	server, _, ns, bucket := place(t, ctx)
	nc, err := nats.Connect("", nats.InProcessServer(server))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	nodes, err := js.Stream(ctx, "KV_"+bucket.Name())
	if err != nil {
		t.Fatal(err)
	}
	cfg := nodes.CachedInfo().Config
	cfg.AllowDirect = false // no server responds to a read of all records
	if _, err := js.UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	if _, err := bucket.All(ctx); err == nil {
		t.Fatal("reads of all records must fail in this test")
	}
	_, err = Join(ctx, MemberConfig{Namespace: ns, Bucket: bucket, Keeper: &shelf{},
		Dead: func(string) bool { return false },
		Config: Config{Node: "a", Session: "1", Partitions: 8, Replication: 1, Heartbeat: 50 * time.Millisecond,
			DeadAfter: time.Second}})
	if err != nil {
		t.Error(err)
	}
}

// TestMembers joins, drains and kills members on a real server, and starts a second member with a live name.
func TestMembers(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 3*testkit.Patience)
	defer cancel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, conn, ns, bucket := place(t, ctx)
	must1 := func(m *Member, err error) *Member {
		t.Helper()
		must(err)
		return m
	}
	// patient returns a member with long time limits for NATS and for other members.
	patient := func(m *Member) *Member {
		m.cfg.DeadAfter, m.cfg.Drain = testkit.Patience, testkit.Patience
		return m
	}
	lives := 0
	config := func(name string, s *shelf) MemberConfig {
		lives++
		return MemberConfig{Namespace: ns, Bucket: bucket, Keeper: s, Config: Config{
			Node: name, Session: fmt.Sprint(lives), Partitions: 8, Replication: 1, Heartbeat: 50 * time.Millisecond,
			DeadAfter: time.Second,
		}}
	}
	type running struct {
		*shelf
		*Member
		end  context.CancelFunc
		done chan error
	}
	start := func(name string) running {
		t.Helper()
		s := &shelf{}
		m := patient(must1(Join(ctx, config(name, s))))
		live, end := context.WithCancel(ctx)
		r := running{s, m, end, make(chan error, 1)}
		go func() { r.done <- m.Run(live) }()
		return r
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		testkit.Eventually(t, what, ok)
	}
	a := start("a")
	until("a has all", func() bool { return a.Ready().Len() == 8 })
	b := start("b.with odd name")
	until("they share", func() bool {
		return a.Ready().Len()+b.Ready().Len() == 8 && b.Ready().Len() > 0 && len(b.View().Peers) == 1
	})
	if _, err := Join(ctx, config("a", &shelf{})); !errors.Is(err, ErrNameInUse) {
		t.Fatalf("a second a: %v", err)
	}
	b.end()
	must(<-b.done)
	if a.Ready().Len() != 8 {
		t.Errorf("b has left before a had all partitions: %d", a.Ready().Len())
	}
	if _, err := bucket.Latest(ctx, b.key); !errors.Is(err, jetstream.ErrNotFound) {
		t.Errorf("the record of the node that left: %v", err)
	}
	// A paused process ends after it resumes, if another process has claimed its name meanwhile.
	c := patient(must1(Join(ctx, config("c", &shelf{}))))
	c2 := start("c")
	if err := c.Run(ctx); !errors.Is(err, ErrNameInUse) {
		t.Errorf("the first c: %v", err)
	}
	c2.end()
	must(<-c2.done)
	// A server with restored files has the record of an earlier session. The live process keeps the name.
	earlier, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "earlier", Partitions: 8})
	must(err)
	former := config("d", &shelf{})
	former.Bucket, err = earlier.EnsureNodes(ctx, time.Hour)
	must(err)
	old := patient(must1(Join(ctx, former)))
	d := patient(must1(Join(ctx, config("d", &shelf{}))))
	d.cfg.Bucket = former.Bucket
	if err := d.write(ctx, Advertisement{}, false); err == nil || errors.Is(err, ErrNameInUse) {
		t.Errorf("write over the record of an earlier session: %v", err)
	}
	must(d.write(ctx, Advertisement{}, false))
	if err := old.write(ctx, Advertisement{}, false); err == nil || errors.Is(err, ErrNameInUse) {
		t.Errorf("the earlier session, before the record changes: %v", err)
	}
	must(d.write(ctx, Advertisement{}, false))
	if err := old.write(ctx, Advertisement{}, false); !errors.Is(err, ErrNameInUse) {
		t.Errorf("the earlier session: %v", err)
	}
	a.end()
	must(<-a.done)
}

// TestSilence: a paused process detects no false silence.
func TestSilence(t *testing.T) {
	begun := time.Unix(1000, 0)
	s := silence{at: begun}
	for _, look := range []struct{ at, want time.Duration }{
		{time.Second, time.Second},
		{2500 * time.Millisecond, 2500 * time.Millisecond},
		{time.Hour, 4500 * time.Millisecond},
		{time.Hour + time.Second, 5500 * time.Millisecond},
	} {
		if got := s.extend(begun.Add(look.at), time.Second); got != look.want {
			t.Errorf("after %v: %v of silence, want %v", look.at, got, look.want)
		}
	}
}

// TestUrgentAnnouncements gives two members a heartbeat interval of a day. The members find each other at the start. A
// member still receives the announcements of the other's workers at once, and none after the other has lost the name.
func TestUrgentAnnouncements(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	_, _, ns, bucket := place(t, ctx)
	shelves := map[string]*shelf{}
	members := map[string]*Member{}
	for _, name := range []string{"a", "b"} {
		s := &shelf{set: SetOf(1, 2, 3), lastStarting: make(chan struct{}, 1)}
		m, err := Join(ctx, MemberConfig{
			Namespace: ns, Bucket: bucket, Keeper: s,
			Config: Config{Node: name, Session: name, Partitions: 8, Replication: 1, Heartbeat: 24 * time.Hour,
				DeadAfter: 240 * time.Hour},
		})
		if err != nil {
			t.Fatal(err)
		}
		shelves[name], members[name] = s, m
	}
	live, end := context.WithCancel(ctx)
	ended := make(chan error, 2)
	until := func(name, what string, ok func(*View) bool) {
		t.Helper()
		testkit.Eventually(t, fmt.Sprintf("%s: %s", name, what), func() bool { return ok(members[name].View()) })
	}
	go func() { ended <- members["a"].Run(live) }() // the announced service makes new models urgent
	until("a", "b is there", func(v *View) bool { return len(v.Peers) == 1 && v.Self.Ready.Has(1) })
	go func() { ended <- members["b"].Run(live) }()
	until("b", "a serves", func(v *View) bool {
		return len(v.Peers) == 1 && v.Peers[0].Ready.Has(2) &&
			!v.MayServe(2, "m")
	})
	come := func(models map[string]Set) {
		s := shelves["a"]
		s.mu.Lock()
		s.models = models
		s.mu.Unlock()
		s.lastStarting <- struct{}{}
	}
	come(map[string]Set{"m": SetOf(1)})
	until("b", "m is at 1", func(v *View) bool { return v.MayServe(1, "m") && !v.MayServe(2, "m") })
	come(map[string]Set{"m": SetOf(1, 2), "n": SetOf(3)})
	until("b", "m is at 2 and n at 3", func(v *View) bool { return v.MayServe(2, "m") && v.MayServe(3, "n") })
	entry, err := bucket.Latest(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	var written Record
	if err := json.Unmarshal(entry.Value, &written); err != nil || !written.Models["n"].Has(3) {
		t.Errorf("the copy for b is not in the bucket: %s, %v", entry.Value, err)
	}
	end()
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// TestLeavesWithoutNATS ends a member without a NATS server: the member leaves its record, with a warning.
func TestLeavesWithoutNATS(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	server, _, ns, bucket := place(t, ctx)
	warned := make(chan struct{}, 1)
	m, err := Join(ctx, MemberConfig{Namespace: ns, Bucket: bucket, Keeper: &shelf{},
		Config: Config{Node: "a", Session: "1", Partitions: 8, Replication: 1, Heartbeat: 10 * time.Millisecond,
			DeadAfter: testkit.Patience},
		Log: logtest.New(func(l logtest.Line) {
			if strings.HasPrefix(l.Text, "this node's record is not removed") {
				warned <- struct{}{}
			}
		}),
	})
	if err != nil {
		t.Fatal(err)
	}
	m.cfg.DeadAfter, m.cfg.Drain = 50*time.Millisecond, 50*time.Millisecond
	server.Stop()
	live, end := context.WithCancel(ctx)
	end()
	if err := m.Run(live); err != nil {
		t.Error(err)
	}
	if len(warned) == 0 {
		t.Error("no warning")
	}
}

// TestLostBucketOfNodes deletes the bucket, empties it, and deletes a record, while members live. The records return,
// the members see each other, and no partition moves.
func TestLostBucketOfNodes(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 3*testkit.Patience)
	defer cancel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, conn, ns, bucket := place(t, ctx)
	names := []string{"a", "b", "c"}
	members, mended := map[string]*Member{}, make(chan struct{}, 100)
	var mu sync.Mutex
	var moves []string // of partitions, after all have settled
	for i, name := range names {
		s := &shelf{}
		m, err := Join(ctx, MemberConfig{
			Namespace: ns, Bucket: bucket, Keeper: s,
			Config: Config{Node: name, Session: fmt.Sprint(i), Partitions: 8, Replication: 1,
				Heartbeat: 50 * time.Millisecond,
				DeadAfter: testkit.Patience},
			Recreate: func(ctx context.Context) error {
				_, err := ns.EnsureNodes(ctx, time.Hour)
				return err
			},
			Log: logtest.New(func(l logtest.Line) {
				switch l.Text {
				case "the bucket of nodes was gone; it is recreated":
					mended <- struct{}{}
				case "this node keeps other partitions":
					mu.Lock()
					defer mu.Unlock()
					moves = append(moves, fmt.Sprint(name, l.Attrs))
				}
			}),
		})
		must(err)
		m.cfg.DeadAfter = 2 * time.Second // for requests to NATS: the machine declares no node dead for longer
		members[name] = m
		live, end := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- m.Run(live) }()
		defer func() {
			end()
			must(<-done)
		}()
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		testkit.Eventually(t, what, ok)
	}
	beats := func(name string) uint64 { // the lowest heartbeat of a node in the views of the others
		least := ^uint64(0)
		for _, other := range names {
			for _, p := range members[other].View().Peers {
				if p.Node == name {
					least = min(least, p.Heartbeat)
				}
			}
		}
		return least
	}
	together := func() bool {
		for _, name := range names {
			v := members[name].View()
			if len(v.Peers) != 2 {
				return false
			}
			for p := range events.Partition(8) {
				if want := Order(names, nil, p)[:1]; len(v.Serving(p)) != 1 || v.Serving(p)[0] != want[0] {
					return false
				}
			}
		}
		return true
	}
	until("they share", together)
	mu.Lock()
	moves = nil
	mu.Unlock()
	admin := func(verb string) {
		t.Helper()
		r, err := conn.Request(ctx, "$JS.API.STREAM."+verb+".KV_"+bucket.Name(), "", nil)
		must(err)
		if !strings.Contains(string(r.Body), `"success":true`) {
			t.Fatalf("%s: %s", verb, r.Body)
		}
	}
	for what, lose := range map[string]func(){
		"deleted": func() {
			admin("DELETE")
			<-mended
		},
		"emptied": func() { admin("PURGE") },
		"without one record": func() {
			for {
				entry, err := bucket.Latest(ctx, "a")
				must(err)
				if _, err := bucket.Delete(ctx, "a", entry.Revision); err == nil { // otherwise a heartbeat came between
					return
				}
			}
		},
	} {
		lose()
		for _, name := range names {
			at := members[name].View().Self.Heartbeat
			until("all hear "+name+" again, whose bucket is "+what,
				func() bool { b := beats(name); return b != ^uint64(0) && b > at && together() })
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if len(moves) > 0 {
		t.Errorf("partitions moved: %q", moves)
	}
}
