package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/natsserver"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

const patience = 4 * time.Minute

// shelf is a keeper that is ready at once.
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

// place is a server of the test's own, with a namespace of eight partitions and its bucket of nodes.
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
	server, err := natsserver.Start(ctx, natsserver.Options{Dir: t.TempDir(), SyncInterval: time.Minute})
	must(err)
	t.Cleanup(server.Stop)
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{Server: server, Wait: true})
	must(err)
	t.Cleanup(conn.Close)
	ns, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "n", Partitions: 8})
	must(err)
	bucket, err := ns.EnsureNodes(ctx, time.Hour)
	must(err)
	return server, conn, ns, bucket
}

// TestJoinsBeforeOthersCanBeRead joins while nobody serves reads of all records at once, as when the servers of a NATS
// cluster have just found each other.
func TestJoinsBeforeOthersCanBeRead(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
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
	cfg.AllowDirect = false // then nobody responds to who reads all records at once
	if _, err := js.UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	if _, err := bucket.All(ctx); err == nil {
		t.Fatal("all records are read, which this test is to prevent")
	}
	_, err = Join(ctx, MemberConfig{Namespace: ns, Bucket: bucket, Keeper: &shelf{},
		Dead: func(string) bool { return false },
		Config: Config{Node: "a", Session: "1", Partitions: 8, Replication: 1, Heartbeat: 50 * time.Millisecond,
			DeadAfter: time.Second}})
	if err != nil {
		t.Error(err)
	}
}

// TestMembers joins, drains and kills members on a real server, and starts a second one under a name that lives.
func TestMembers(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
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
	// patient has a member wait for NATS and for others longer than for a sign of life.
	patient := func(m *Member) *Member {
		m.cfg.DeadAfter, m.cfg.Drain = patience, patience
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
		for deadline := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("it does not come about that %s", what)
			}
		}
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
		t.Errorf("b has gone before a had all: %d", a.Ready().Len())
	}
	if _, err := bucket.Latest(ctx, b.key); !errors.Is(err, jetstream.ErrNotFound) {
		t.Errorf("the record of who left: %v", err)
	}
	// A process that is held, and whose name another takes meanwhile, ends when it goes on.
	c := patient(must1(Join(ctx, config("c", &shelf{}))))
	c2 := start("c")
	if err := c.Run(ctx); !errors.Is(err, ErrNameInUse) {
		t.Errorf("the first c: %v", err)
	}
	c2.end()
	must(<-c2.done)
	// A server that comes back with files of an earlier time has the record of a former life. Who lives keeps the name.
	earlier, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "earlier", Partitions: 8})
	must(err)
	former := config("d", &shelf{})
	former.Bucket, err = earlier.EnsureNodes(ctx, time.Hour)
	must(err)
	old := patient(must1(Join(ctx, former)))
	d := patient(must1(Join(ctx, config("d", &shelf{}))))
	d.cfg.Bucket = former.Bucket
	if err := d.write(ctx, Advertisement{}, false); err == nil || errors.Is(err, ErrNameInUse) {
		t.Errorf("over the record of a former life: %v", err)
	}
	must(d.write(ctx, Advertisement{}, false))
	if err := old.write(ctx, Advertisement{}, false); err == nil || errors.Is(err, ErrNameInUse) {
		t.Errorf("the former life, before the record changes: %v", err)
	}
	must(d.write(ctx, Advertisement{}, false))
	if err := old.write(ctx, Advertisement{}, false); !errors.Is(err, ErrNameInUse) {
		t.Errorf("the former life: %v", err)
	}
	a.end()
	must(<-a.done)
}

// TestSilence: nobody is taken for gone by one who stood still himself.
func TestSilence(t *testing.T) {
	begun := time.Unix(1000, 0)
	s := silence{at: begun}
	for _, look := range []struct{ at, want time.Duration }{
		{time.Second, time.Second},
		{2500 * time.Millisecond, 2500 * time.Millisecond},
		{time.Hour, 4500 * time.Millisecond},
		{time.Hour + time.Second, 5500 * time.Millisecond},
	} {
		if got := s.heard(begun.Add(look.at), time.Second); got != look.want {
			t.Errorf("after %v: %v of silence, want %v", look.at, got, look.want)
		}
	}
}

// TestNewsDoNotWait gives two members a beat of a day. Each finds the other when it starts. A member still receives
// news of the other's workers at once, and receives none after the other has left the name.
func TestNewsDoNotWait(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, _, ns, bucket := place(t, ctx)
	views := map[string]chan *View{}
	shelves := map[string]*shelf{}
	members := map[string]*Member{}
	for _, name := range []string{"a", "b"} {
		s, viewed := &shelf{set: SetOf(1, 2, 3), lastStarting: make(chan struct{}, 1)}, make(chan *View, 100)
		m, err := Join(ctx, MemberConfig{
			Namespace: ns, Bucket: bucket, Keeper: s, Viewed: func(v *View) { viewed <- v },
			Config: Config{Node: name, Session: name, Partitions: 8, Replication: 1, Heartbeat: 24 * time.Hour,
				DeadAfter: 240 * time.Hour},
		})
		if err != nil {
			t.Fatal(err)
		}
		views[name], shelves[name], members[name] = viewed, s, m
	}
	live, end := context.WithCancel(ctx)
	ended := make(chan error, 2)
	until := func(name, what string, ok func(*View) bool) {
		t.Helper()
		for {
			select {
			case v := <-views[name]:
				if ok(v) {
					return
				}
			case <-ctx.Done():
				t.Fatalf("%s does not hear that %s", name, what)
			}
		}
	}
	go func() { ended <- members["a"].Run(live) }() // says what it serves, so that workers of a model are news
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
		t.Errorf("what b heard is not in the bucket: %s, %v", entry.Value, err)
	}
	end()
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// TestTheBucketOfNodesIsLost deletes the bucket, empties it, and deletes one record of it, while members live: they are
// there again, know each other, and nothing has moved.
func TestTheBucketOfNodesIsLost(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	defer cancel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, conn, ns, bucket := place(t, ctx)
	names := []string{"a", "b", "c"}
	members, mended := map[string]*Member{}, make(chan error, 100)
	var mu sync.Mutex
	kept := map[string]int{} // how often somebody was told to keep something else, once all have settled
	for i, name := range names {
		s := &shelf{}
		m, err := Join(ctx, MemberConfig{
			Namespace: ns, Bucket: bucket, Keeper: s,
			Config: Config{Node: name, Session: fmt.Sprint(i), Partitions: 8, Replication: 1,
				Heartbeat: 50 * time.Millisecond,
				DeadAfter: patience},
			Recreate: func(ctx context.Context) error {
				_, err := ns.EnsureNodes(ctx, time.Hour)
				return err
			},
			Recreated: func(err error) { mended <- err },
			Viewed: func(v *View) {
				mu.Lock()
				defer mu.Unlock()
				kept[name+" "+v.Owned.String()]++
			},
		})
		must(err)
		m.cfg.DeadAfter = 2 * time.Second // for what it asks of NATS: the machine believes nobody dead for longer
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
		for deadline := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("it does not come about that %s", what)
			}
		}
	}
	beats := func(name string) uint64 { // that each of the others has seen of a node, the least
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
	clear(kept)
	mu.Unlock()
	admin := func(verb string) {
		t.Helper()
		_, err := conn.Request(ctx, "$JS.API.STREAM."+verb+".KV_"+bucket.Name(), "", nil)
		must(err)
	}
	for what, lose := range map[string]func(){
		"deleted": func() {
			admin("DELETE")
			for err := <-mended; err != nil; err = <-mended { // it is tried again
				t.Log(err)
			}
		},
		"emptied": func() { admin("PURGE") },
		"without one record": func() {
			for {
				entry, err := bucket.Latest(ctx, "a")
				must(err)
				if _, err := bucket.Delete(ctx, "a", entry.Revision); err == nil { // else a beat came between
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
	if len(kept) != len(names) {
		t.Errorf("partitions moved: %v", kept)
	}
}
