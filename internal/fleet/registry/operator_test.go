package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// hold holds the lease of a record until end.
func (s *site) hold(r Record) (end func()) {
	s.Helper()
	r.Source = "vllm"
	taken := make(chan struct{}, 1)
	l, err := NewLease(s.ns, r, leaseTaken{taken: func() { taken <- struct{}{} }})
	s.must(err)
	running, cancel := context.WithCancel(s.ctx)
	done := make(chan error, 1)
	go func() { done <- l.Keep(running, func() {}) }()
	<-taken
	return func() {
		cancel()
		s.must(<-done)
	}
}

// seen waits until all nodes have a rank in a state, with a word in the reasons.
func (s *site) seen(key events.RankKey, state api.WorkerState, word string) {
	s.Helper()
	for i, node := range s.nodes {
		s.until(fmt.Sprintf("node %d has %s as %s", i, key, state), func() bool {
			rank := node.Pool("m").Rank(key)
			return rank != nil && rank.Record.State == state &&
				strings.Contains(strings.Join(rank.Record.Reasons, "; "), word)
		})
	}
}

func code(err error) api.Code {
	var e *api.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// TestEnded: the end of a registration is recorded for workers with a lease or a declaration, and for no others.
func TestEnded(t *testing.T) {
	s := newSite(t)
	end := s.hold(record("leased", time.Hour))
	_, err := s.nodes[0].Declare(s.ctx, &api.WorkerRegistration{Instance: "declared", Model: "m", BlockSize: 16,
		WorkerSpec: api.WorkerSpec{Events: api.EventsNone}})
	s.must(err)
	for _, name := range []events.WorkerID{"leased", "declared"} {
		s.seen(events.RankKey{Instance: name}, api.WorkerSchedulable, "")
	}
	for _, node := range s.nodes {
		for _, name := range []events.WorkerID{"leased", "declared", "never"} {
			if node.Ended(name) {
				t.Errorf("%s has ended", name)
			}
		}
	}
	end()
	key := must(jetstream.WorkerKey(must(s.ns.PartitionOf("leased")), events.RankKey{Instance: "leased"}))
	must(s.bucket.Delete(s.ctx, key, must(s.bucket.Latest(s.ctx, key)).Revision))
	must(s.nodes[1].Remove(s.ctx, "declared"))
	for i, node := range s.nodes {
		s.until(fmt.Sprintf("node %d has recorded both ends", i), func() bool {
			return node.Ended("leased") && node.Ended("declared") && len(node.Pool("m").Ranks) == 0
		})
		if node.Ended("never") {
			t.Errorf("node %d: never has ended", i)
		}
	}
}

// TestMarkOfAnOperatorsRecordStays: a killed server may find a replaced value again; the mark of deletion above it
// stays.
func TestMarkOfAnOperatorsRecordStays(t *testing.T) {
	s := newSite(t)
	yes, no := true, false
	defer s.hold(record("w", time.Hour))()
	s.seen(events.RankKey{Instance: "w"}, api.WorkerSchedulable, "")
	for _, drain := range []*bool{&yes, &no} {
		_, err := s.nodes[0].Change(s.ctx, &api.WorkerChange{Instance: "w", Drain: drain})
		s.must(err)
	}
	name := must(jetstream.OperatorKey("w"))
	for _, node := range s.nodes {
		node.sweep(s.ctx)
	}
	if e, err := s.bucket.Latest(s.ctx, name); !errors.Is(err, jetstream.ErrNotFound) || e.Revision == 0 {
		t.Errorf("%+v, %v", e, err)
	}
}

// TestOperatorsAndShims: a change by an operator reaches every node, outlives shims, leases and the bucket, and is
// idempotent. Attributes by the shim show if the operator has set none.
func TestOperatorsAndShims(t *testing.T) {
	s := newSite(t)
	yes, no := true, false
	key := events.RankKey{Instance: "w", Rank: 1}
	r := record("w", time.Hour)
	r.Rank, r.Worker = 1, &api.WorkerSpec{Endpoint: "http://w", Role: api.RoleDecode, TotalKVBlocks: 100,
		Taints: []string{"gpu=h100"}}
	end := s.hold(r)
	s.seen(key, api.WorkerSchedulable, "")
	if got := s.nodes[1].Pool("m").Rank(key).Record; got.Endpoint != "http://w" || got.Events != api.EventsShim {
		t.Errorf("registered: %+v", got)
	}
	if _, err := s.nodes[0].Change(s.ctx, &api.WorkerChange{Instance: "nobody"}); code(err) != api.CodeUnknownWorker {
		t.Errorf("an unregistered worker: %v", err)
	}

	drain := &api.WorkerChange{Instance: "w", Drain: &yes, Why: "a fan is loud"}
	w, err := s.nodes[0].Change(s.ctx, drain)
	s.must(err)
	if len(w.Ranks) != 1 || w.Ranks[0].State != api.WorkerDraining {
		t.Errorf("drained: %+v", w)
	}
	s.seen(key, api.WorkerDraining, "a fan is loud")
	name := must(jetstream.OperatorKey("w"))
	revision := must(s.bucket.Latest(s.ctx, name)).Revision
	_, err = s.nodes[1].Change(s.ctx, drain)
	s.must(err)
	if again := must(s.bucket.Latest(s.ctx, name)).Revision; again != revision {
		t.Errorf("drained twice: revision %d became %d", revision, again)
	}

	// Another shim takes over, and the bucket is lost.
	end()
	r.Worker = &api.WorkerSpec{Endpoint: "http://other"}
	end = s.hold(r)
	s.until("the attributes by the new shim are registered", func() bool {
		return s.nodes[0].Pool("m").Rank(key).Record.Endpoint == "http://other"
	})
	s.seen(key, api.WorkerDraining, "a fan is loud")
	s.admin("DELETE")
	<-s.mended
	_, err = s.nodes[1].Change(s.ctx, &api.WorkerChange{Instance: "w", Drain: &yes}) // keeps the reason
	s.must(err)
	s.until("the record is in the new bucket", func() bool {
		_, err := s.bucket.Latest(s.ctx, name)
		return err == nil
	})
	s.seen(key, api.WorkerDraining, "a fan is loud")

	// Changes that override the shim's attributes until a reset.
	for _, c := range []struct {
		change api.WorkerChange
		want   api.WorkerSpec
	}{
		{api.WorkerChange{Drain: &no}, api.WorkerSpec{Endpoint: "http://other", Role: api.RoleAggregated}},
		{api.WorkerChange{WorkerSpec: api.WorkerSpec{Role: api.RolePrefill, Taints: []string{"a"}}},
			api.WorkerSpec{Endpoint: "http://other", Role: api.RolePrefill, Taints: []string{"a"}}},
		{api.WorkerChange{WorkerSpec: api.WorkerSpec{Taints: []string{}, Endpoint: "http://mine"}},
			api.WorkerSpec{Endpoint: "http://mine", Role: api.RolePrefill, Taints: []string{}}},
		{api.WorkerChange{}, api.WorkerSpec{Endpoint: "http://mine", Role: api.RolePrefill, Taints: []string{}}},
		{api.WorkerChange{Reset: true}, api.WorkerSpec{Endpoint: "http://other", Role: api.RoleAggregated}},
	} {
		c.change.Instance, c.want.Events = "w", api.EventsShim
		w, err := s.nodes[0].Change(s.ctx, &c.change)
		s.must(err)
		if got := w.Ranks[0].WorkerSpec; !reflect.DeepEqual(got, c.want) || w.Ranks[0].State != api.WorkerSchedulable {
			t.Errorf("%+v: %+v", c.change, w.Ranks[0])
		}
		s.until("the other node has the same", func() bool {
			return reflect.DeepEqual(s.nodes[1].Pool("m").Rank(key).Record.WorkerSpec, c.want)
		})
	}
	if _, err := s.bucket.Latest(s.ctx, name); !errors.Is(err, jetstream.ErrNotFound) {
		t.Errorf("a record exists after the reset: %v", err)
	}
	declared := &api.WorkerRegistration{Instance: "w", Model: "m", BlockSize: 16}
	if _, err := s.nodes[0].Declare(s.ctx, declared); code(err) != api.CodeRegistered {
		t.Errorf("a worker that has a shim is declared: %v", err)
	}
	if _, err := s.nodes[0].Remove(s.ctx, "w"); code(err) != api.CodeConflict {
		t.Errorf("a worker that has a shim is removed: %v", err)
	}
	end()
}

// TestDeclaredWorkers: workers without shims appear, change and disappear on every node.
func TestDeclaredWorkers(t *testing.T) {
	s := newSite(t)
	yes := true
	declare := func(node int, w *api.WorkerRegistration) (*api.Worker, error) {
		s.must(w.Check())
		return s.nodes[node].Declare(s.ctx, w)
	}
	w, err := declare(0, &api.WorkerRegistration{Instance: "d", Model: "m", BlockSize: 16,
		WorkerSpec: api.WorkerSpec{RankStart: 2, RankSize: 3, Events: api.EventsNone}})
	s.must(err)
	if len(w.Ranks) != 3 || w.Ranks[0].Rank != 2 || w.Ranks[2].State != api.WorkerSchedulable {
		t.Errorf("declared: %+v", w)
	}
	last := events.RankKey{Instance: "d", Rank: 4}
	s.seen(last, api.WorkerSchedulable, "")
	if got := s.nodes[1].Pool("m").Worker("d"); len(got) != 3 || got[0].Record != got[2].Record {
		t.Errorf("its ranks share no record: %+v", got)
	}
	list := &api.WorkerList{Workers: []api.WorkerInfo{{Instance: "a"}, {Instance: "x"}}}
	s.nodes[1].MarkWorkers(list, api.WorkersRequest{Limit: 3, After: &api.RankPlace{Instance: "a"}})
	var places []string
	for _, w := range list.Workers {
		places = append(places, fmt.Sprint(w.Instance, w.Rank))
	}
	if !slices.Equal(places, []string{"d2", "d3", "d4"}) || *list.Next != (api.RankPlace{Instance: "d", Rank: 4}) {
		t.Errorf("a part of the list: %v, next %v", places, list.Next)
	}
	_, err = declare(1, &api.WorkerRegistration{Instance: "e", Model: "m", BlockSize: 32})
	if code(err) != api.CodeBlockSizeMismatch {
		t.Errorf("a second block size: %v", err)
	}
	_, err = s.nodes[1].Change(s.ctx, &api.WorkerChange{Instance: "d", Drain: &yes})
	s.must(err)
	_, err = declare(0, &api.WorkerRegistration{Instance: "d", Model: "m", BlockSize: 16})
	s.must(err)
	first := events.RankKey{Instance: "d"}
	s.seen(first, api.WorkerIncomplete, "events: none")
	s.seen(first, api.WorkerIncomplete, "drained")
	_, err = s.nodes[1].Change(s.ctx, &api.WorkerChange{Instance: "d",
		WorkerSpec: api.WorkerSpec{Events: api.EventsNone}})
	s.must(err)
	s.seen(first, api.WorkerDraining, "drained")
	_, err = s.nodes[1].Remove(s.ctx, "d")
	s.must(err)
	if _, err = s.nodes[0].Remove(s.ctx, "d"); code(err) != api.CodeUnknownWorker {
		t.Errorf("removed twice: %v", err)
	}
	for _, node := range s.nodes {
		s.until("it is gone", func() bool { return len(node.Pool("m").Ranks) == 0 })
	}
	if _, err := s.bucket.Latest(s.ctx, must(jetstream.OperatorKey("d"))); !errors.Is(err, jetstream.ErrNotFound) {
		t.Errorf("the bucket has more than a mark: %v", err)
	}

	_, err = declare(0, &api.WorkerRegistration{Instance: "later", Model: "m", BlockSize: 16})
	s.must(err)
	later := events.RankKey{Instance: "later"}
	s.seen(later, api.WorkerIncomplete, "events: none")
	defer s.hold(record("later", time.Hour))() // the shim arrives
	s.seen(later, api.WorkerSchedulable, "")
}

// TestDeclaredAtAnAddress: a worker without a shim replaces the declared workers for the same model, address and ranks,
// and no others.
func TestDeclaredAtAnAddress(t *testing.T) {
	s := newSite(t)
	declare := func(instance events.WorkerID, model, endpoint string, start, size uint32) {
		w := &api.WorkerRegistration{Instance: instance, Model: model, BlockSize: 16, WorkerSpec: api.WorkerSpec{
			Endpoint: endpoint, RankStart: start, RankSize: size, Events: api.EventsNone}}
		s.must(w.Check())
		_, err := s.nodes[0].Declare(s.ctx, w)
		s.must(err)
	}
	declare("old", "m", "http://h:1", 0, 2)
	declare("other-address", "m", "http://h:2", 0, 2)
	declare("other-model", "n", "http://h:1", 0, 2)
	declare("other-ranks", "m", "http://h:1", 2, 2)
	declare("moved", "m", "http://h:3", 0, 2)
	_, err := s.nodes[0].Change(s.ctx, &api.WorkerChange{Instance: "moved", WorkerSpec: api.WorkerSpec{Endpoint: "h:1"}})
	s.must(err)
	declare("new", "m", "http://h:1/v1", 1, 1)
	declare("new", "m", "http://h:1/v1", 1, 1)
	declare("nowhere", "m", "", 1, 1)
	if got := strings.Join(s.replaced, ", "); got != "moved by new, old by new" {
		t.Errorf("replaced: %s", got)
	}
	for _, node := range s.nodes {
		s.until("the others remain", func() bool {
			var left []events.WorkerID
			for _, rank := range node.All() {
				left = append(left, rank.Instance)
			}
			return fmt.Sprint(slices.Compact(left)) == "[new nowhere other-address other-model other-ranks]"
		})
	}
}

// TestManyChangeAtOnce: concurrent changes of different fields at two nodes are all kept.
func TestManyChangeAtOnce(t *testing.T) {
	s := newSite(t)
	_, err := s.nodes[0].Declare(s.ctx, &api.WorkerRegistration{Instance: "d", Model: "m", BlockSize: 16})
	s.must(err)
	yes := true
	changes := []api.WorkerChange{
		{WorkerSpec: api.WorkerSpec{Endpoint: "e"}}, {WorkerSpec: api.WorkerSpec{Role: api.RoleDecode}},
		{WorkerSpec: api.WorkerSpec{TotalKVBlocks: 7}}, {WorkerSpec: api.WorkerSpec{Taints: []string{"t"}}},
		{WorkerSpec: api.WorkerSpec{Events: api.EventsNone}}, {Drain: &yes},
	}
	done := make(chan error)
	for i, c := range changes {
		c.Instance = "d"
		go func() {
			_, err := s.nodes[i%2].Change(s.ctx, &c)
			done <- err
		}()
	}
	for range changes {
		s.must(<-done)
	}
	want := api.WorkerSpec{Endpoint: "e", Role: api.RoleDecode, TotalKVBlocks: 7, Taints: []string{"t"},
		Events: api.EventsNone}
	s.seen(events.RankKey{Instance: "d"}, api.WorkerDraining, "drained")
	for _, node := range s.nodes {
		s.until("all changes are kept", func() bool {
			return reflect.DeepEqual(node.Pool("m").Ranks[0].Record.WorkerSpec, want)
		})
	}
}

// TestPoolsAtRandom plays random entries of the bucket. After each step, the pools equal the pools of a new registry
// with the current bucket, and earlier pools are unchanged.
func TestPoolsAtRandom(t *testing.T) {
	s := newSite(t)
	models := []string{"m", "n"}
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 15))
		pick := func(words ...string) string { return words[rng.IntN(len(words))] }
		r, now := New(Config{Namespace: s.ns}), map[string][]byte{}
		r.apply(jetstream.Watched{Anew: true, Current: true})
		for step := range uint64(60) {
			instance := events.WorkerID(pick("a", "b", "c"))
			spec := api.WorkerSpec{Role: api.Role(pick("", "decode", "prefill", "odd")), RankStart: rng.Uint32N(2),
				RankSize: rng.Uint32N(3), Events: pick("", api.EventsNone), Endpoint: pick("", "http://a", "http://b")}
			key, value := must(jetstream.OperatorKey(instance)), any(nil)
			if rng.IntN(3) > 0 {
				rec := record(string(instance), DefaultLease)
				rec.Rank, rec.Model, rec.Worker = events.Rank(rng.Uint32N(3)), pick(models...), &spec
				rec.State = State(pick("held", "held", "expired"))
				rec.Shim = &ShimState{Engine: api.EngineState(pick("connected", "gone", "silent")),
					Unusable: pick("", "", "blocks of another size")}
				key, value = must(jetstream.WorkerKey(must(s.ns.PartitionOf(instance)), rec.Key())), rec
			} else {
				o := Operator{Version: operatorVersion, Instance: instance, Change: spec}
				if rng.IntN(2) == 0 {
					o.Declared = &Declared{Model: pick(models...), BlockSize: 16, Worker: spec}
				}
				if rng.IntN(2) == 0 {
					o.Drain = &Drain{}
				}
				value = o
			}
			before := r.Pool("m")
			shown := fmt.Sprintf("%+v", *before)
			e := jetstream.Entry{Key: key, Revision: step + 1, Value: must(json.Marshal(value))}
			if e.Deleted = rng.IntN(4) == 0; e.Deleted {
				delete(now, key)
			} else {
				now[key] = e.Value
			}
			r.apply(jetstream.Watched{Entries: []jetstream.Entry{e}})
			twin := New(Config{Namespace: s.ns})
			for name, text := range now {
				twin.apply(jetstream.Watched{Entries: []jetstream.Entry{{Key: name, Value: text}}})
			}
			for _, model := range models {
				got, want := r.Pool(model), twin.Pool(model)
				if !reflect.DeepEqual(got.Ranks, want.Ranks) {
					t.Fatalf("seed %d, step %d, %s\n got %s\nwant %s", seed, step, e.Value, must(json.Marshal(got)),
						must(json.Marshal(want)))
				}
				checkAt(t, got)
				for _, rank := range got.Ranks {
					if rank.Record.State == api.WorkerSchedulable != (len(rank.Record.Reasons) == 0) {
						t.Fatalf("seed %d, step %d: %+v", seed, step, rank.Record)
					}
				}
			}
			pools := []*Pool{}
			for _, model := range models {
				if p := r.Pool(model); len(p.Ranks) > 0 {
					pools = append(pools, p)
				}
			}
			if got := r.Pools(); !slices.EqualFunc(got, pools, func(a, b *Pool) bool {
				return a.Model == b.Model && reflect.DeepEqual(a.Ranks, b.Ranks)
			}) {
				t.Fatalf("seed %d, step %d: all pools are %s, want %s", seed, step, must(json.Marshal(got)),
					must(json.Marshal(pools)))
			}
			if after := fmt.Sprintf("%+v", *before); after != shown {
				t.Fatalf("seed %d, step %d: a pool was\n%s\nand became\n%s", seed, step, shown, after)
			}
		}
	}
}

// TestStatesOfRanks checks the state of ranks, with the reasons.
func TestStatesOfRanks(t *testing.T) {
	s := newSite(t)
	for _, c := range []struct {
		what     string
		records  []Record
		operator *Operator
		states   []api.WorkerState
		reason   string
	}{
		{"registered by an earlier version", []Record{{}}, nil, []api.WorkerState{api.WorkerSchedulable}, ""},
		{"two roles", []Record{{Worker: &api.WorkerSpec{Role: api.RoleDecode}}, {Worker: &api.WorkerSpec{
			Role: api.RolePrefill}}}, nil, []api.WorkerState{api.WorkerIncomplete, api.WorkerIncomplete},
			"several roles: decode, prefill"},
		{"two roles, and an operator who decides", []Record{{Worker: &api.WorkerSpec{Role: api.RoleDecode}},
			{Worker: &api.WorkerSpec{Role: api.RolePrefill}}}, &Operator{Change: api.WorkerSpec{Role: "decode"}},
			[]api.WorkerState{api.WorkerSchedulable, api.WorkerSchedulable}, ""},
		{"an engine that has ended", []Record{{Shim: &ShimState{Engine: api.EngineGone, Why: "its ports refuse"}}},
			&Operator{Drain: &Drain{}}, []api.WorkerState{api.WorkerUnschedulable}, "its ports refuse"},
		{"an engine that is silent proves nothing", []Record{{Shim: &ShimState{Engine: api.EngineSilent}}}, nil,
			[]api.WorkerState{api.WorkerSchedulable}, ""},
		{"blocks of another size", []Record{{Shim: &ShimState{Unusable: "blocks of 32 tokens"}}}, nil,
			[]api.WorkerState{api.WorkerIncomplete}, "blocks of 32 tokens"},
		{"a lease that has expired", []Record{{State: Expired}}, nil, []api.WorkerState{api.WorkerUnschedulable},
			"expired"},
		{"a rank out of the range", []Record{{}, {}}, &Operator{Change: api.WorkerSpec{RankStart: 1, RankSize: 1}},
			[]api.WorkerState{api.WorkerUnschedulable, api.WorkerSchedulable}, ""},
		{"a role of a later version", []Record{{Worker: &api.WorkerSpec{Role: "draft"}}}, nil,
			[]api.WorkerState{api.WorkerIncomplete}, "draft"},
	} {
		r := New(Config{Namespace: s.ns})
		for i, rec := range c.records {
			full := record("w", DefaultLease)
			full.Rank, full.Worker, full.Shim = events.Rank(i), rec.Worker, rec.Shim
			if rec.State != "" {
				full.State = rec.State
			}
			name := must(jetstream.WorkerKey(must(s.ns.PartitionOf("w")), full.Key()))
			r.apply(jetstream.Watched{Entries: []jetstream.Entry{{Key: name, Value: must(full.encode())}}})
		}
		if o := c.operator; o != nil {
			o.Version, o.Instance = operatorVersion, "w"
			r.apply(jetstream.Watched{Entries: []jetstream.Entry{{Key: must(jetstream.OperatorKey("w")),
				Value: must(json.Marshal(o))}}})
		}
		pool := r.Pool("m")
		for i, want := range c.states {
			if got := pool.Ranks[i].Record; got.State != want ||
				!strings.Contains(strings.Join(got.Reasons, "; "), c.reason) {
				t.Errorf("%s: rank %d is %+v", c.what, i, got)
			}
		}
	}
}

// checkAt compares the lookup of addresses in a pool with a search of all ranks.
func checkAt(t *testing.T, p *Pool) {
	t.Helper()
	for _, asked := range [][]string{{"http://a"}, {"http://b", "http://c", "http://b"}, {"", "http://a"}, {}} {
		places, unknown := []api.RankPlace{}, []string{}
		for _, e := range asked {
			n := len(places)
			for _, r := range p.Ranks {
				if e != "" && r.Record.Endpoint == e {
					places = append(places, api.RankPlace{Instance: r.Instance, Rank: r.Rank})
				}
			}
			if len(places) == n && !slices.Contains(unknown, e) {
				unknown = append(unknown, e)
			}
		}
		if got, not := p.At(asked); !reflect.DeepEqual(got, places) || !reflect.DeepEqual(not, unknown) {
			t.Fatalf("at %q: %v, %q, want %v, %q", asked, got, not, places, unknown)
		}
	}
}

// TestPoolAllocatesNothing: a repeated query for a pool allocates no memory.
func TestPoolAllocatesNothing(t *testing.T) {
	r := New(Config{})
	rec := record("w", DefaultLease)
	r.apply(jetstream.Watched{Entries: []jetstream.Entry{{Key: "0.w.0", Value: must(rec.encode())}}})
	if n := testing.AllocsPerRun(100, func() {
		if r.Pool("m").Rank(events.RankKey{Instance: "w"}) == nil {
			t.Error("the rank is missing")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkPool builds the pool of a model with 10,000 workers, like the first query after a change.
func BenchmarkPool(b *testing.B) {
	r, _ := large(b, 10_000)
	b.ReportAllocs()
	for b.Loop() {
		r.pools.Store(nil)
		if len(r.Pool("m").Ranks) != 10_000 {
			b.Fatal("some are missing")
		}
	}
}

// FuzzOperator decodes any value of an operator's key: an error, or a value that survives a round trip.
func FuzzOperator(f *testing.F) {
	f.Add([]byte(`{"version":1,"instance":"w","drain":{"since":"2026-01-02T03:04:05Z"}}`))
	f.Add([]byte(`{"version":1,"instance":"w","declared":{"model":"m","block_size":16,"worker":{"taints":[]}}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		o, err := decodeOperator("w", data)
		if err != nil {
			return
		}
		text, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		again, err := decodeOperator("w", text)
		if err != nil || !reflect.DeepEqual(o, again) {
			t.Fatalf("%+v became %+v, %v", o, again, err)
		}
	})
}

// TestAwaitANewBucket: a write into a new bucket is shown by the watch of the new bucket, although the old bucket had
// later revisions.
func TestAwaitANewBucket(t *testing.T) {
	r := New(Config{})
	see := func(epoch int64, revision uint64) {
		r.apply(jetstream.Watched{Anew: true, Epoch: time.Unix(epoch, 0), Current: true, Entries: []jetstream.Entry{
			{Key: jetstream.ProbeKey, Revision: revision}}})
	}
	see(1, 20)
	before := r.shown()
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.await(done, 3, before); code(err) != api.CodeUnavailable {
		t.Errorf("a write into a new bucket is shown by the watch of the old bucket: %v", err)
	}
	if err := r.await(t.Context(), 20, shown{}); err != nil {
		t.Error(err)
	}
	see(2, 3)
	if err := r.await(t.Context(), 3, before); err != nil {
		t.Error(err)
	}
}
