package scatter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// worker is a rank of the naive cluster, with the blocks of one prompt.
type worker struct {
	name      events.WorkerID
	partition events.Partition
	model     string
	size      uint32
	ahead     uint32
	held      []uint32 // tokens
}

func (w *worker) blocks(tokens []uint32, q *api.Query) (out []uint64) {
	h, err := events.NewLookaheadHasher(w.size, w.ahead, events.Space{LoRA: q.LoRA, Salt: q.CacheSalt})
	if err != nil {
		panic(err)
	}
	for _, l := range h.Hash(nil, tokens) {
		out = append(out, uint64(l))
	}
	return out
}

// depth returns the leading blocks of a query on the worker.
func (w *worker) depth(q *api.Query) (n uint32) {
	asked := []uint64(q.Hashes)
	switch {
	case q.Tokens != nil:
		asked = w.blocks(q.Tokens, q)
	case q.Hashed != nil:
		asked = q.HashedFor(w.ahead)
	}
	held := w.blocks(w.held, &api.Query{})
	for int(n) < min(len(asked), len(held)) && asked[n] == held[n] {
		n++
	}
	return n
}

// node is the naive indexer of some partitions. It checks every worker for every query.
type node struct {
	partitions uint32
	workers    []worker
	serves     func(events.Partition) bool
	seq        func(events.Partition) events.StreamSeq
}

func (n *node) looks(q *api.Query, p events.Partition) bool {
	return len(q.Partitions) == 0 || slices.Contains(q.Partitions, p)
}

func (n *node) Find(ctx context.Context, q *api.Query) (*api.Answer, error) {
	if q.Tokens == nil && q.Hashes == nil && q.Hashed == nil {
		return nil, api.Errorf(api.CodeMalformed, "the query has neither tokens nor hashes")
	}
	for _, m := range q.MinSeq {
		for n.serves(m.Partition) && n.seq(m.Partition) < m.Seq {
			select {
			case <-time.After(ms):
			case <-ctx.Done():
				return nil, api.Errorf(api.CodeBehind, "partition %d is behind", m.Partition)
			}
		}
	}
	a := &api.Answer{Model: q.Model, Complete: true, Workers: []api.Overlap{}, Partitions: []api.PartitionStatus{}}
	for p := range events.Partition(n.partitions) {
		switch {
		case !n.looks(q, p):
		case n.serves(p):
			a.Partitions = append(a.Partitions, api.PartitionStatus{
				Partition: p, Seq: n.seq(p), StaleMS: 4000 * uint64(p%3), ResyncNeeded: p%2 == 1,
			})
		default:
			a.Complete = false
			a.Missing = append(a.Missing, p)
		}
	}
	var sizes []uint32
	for _, w := range n.workers {
		if n.serves(w.partition) && w.model == q.Model && !slices.Contains(sizes, w.size) {
			sizes = append(sizes, w.size)
		}
	}
	verdict := func(c api.Code) (*api.Answer, error) {
		e := api.Errorf(c, "%v", sizes)
		if len(q.Partitions) > 0 {
			e.Missing = a.Missing
		} else if !a.Complete && (len(sizes) == 0 || q.BlockSize != 0) {
			e.Code = api.CodeNotReady
		}
		return nil, e
	}
	switch {
	case len(sizes) == 0:
		return verdict(api.CodeUnknownModel)
	case q.BlockSize == 0 && len(sizes) > 1, q.BlockSize != 0 && !slices.Contains(sizes, q.BlockSize):
		return verdict(api.CodeBlockSizeMismatch)
	}
	a.BlockSize = cmp.Or(q.BlockSize, sizes[0])
	least, some := uint32(1<<31), false
	for _, w := range n.workers {
		if !n.serves(w.partition) || w.model != q.Model || w.size != a.BlockSize {
			continue
		}
		if q.Hashes == nil {
			if least = min(least, w.ahead); q.Hashed != nil && !slices.Contains(a.Lookaheads, w.ahead) {
				a.Lookaheads = append(a.Lookaheads, w.ahead)
			}
		}
		if allowed := len(q.Workers) == 0 || slices.Contains(q.Workers, w.name); allowed {
			some = true
			if n.looks(q, w.partition) {
				a.Workers = append(a.Workers, api.Overlap{Instance: w.name, Device: w.depth(q)})
			}
		}
	}
	slices.Sort(a.Lookaheads)
	switch {
	case q.Tokens != nil:
		a.Blocks = len((&worker{size: a.BlockSize, ahead: least}).blocks(q.Tokens, q))
	case q.Hashed != nil:
		a.Blocks = len(q.HashedFor(least))
	default:
		a.Blocks = len(q.Hashes)
	}
	why := api.ReasonNotCached
	switch {
	case !some:
		why = api.ReasonNotAllowed
	case a.Blocks == 0:
		why = api.ReasonNoBlocks
	}
	a.Finish(q.Idle, why)
	return a, nil
}

func (n *node) Workers(_ context.Context, asked api.WorkersRequest) (*api.WorkerList, error) {
	l := &api.WorkerList{Complete: true}
	for p := range events.Partition(n.partitions) {
		if !n.serves(p) {
			l.Complete, l.Missing = false, append(l.Missing, p)
		}
	}
	for _, w := range n.workers {
		l.Workers = append(l.Workers, api.WorkerInfo{Instance: w.name, Partition: w.partition, Model: w.model})
	}
	l.Cut(asked)
	return l, nil
}

// fleet is a cluster in memory. Messages need time, are lost, and find no receiver.
type fleet struct {
	t      *testing.T
	nodes  map[string]*node
	states map[string]string // "", "silent", "dead", "failing"
	until  time.Time         // end of death; zero: never
	replies
	delay    func() time.Duration
	asked    atomic.Int64
	tokens   atomic.Bool // a node received tokens
	serving  [][]string
	fit      []int
	models   func(p events.Partition, model string) bool
	finishes bool
}

func (f *fleet) Serving(p events.Partition) []string            { return f.serving[p] }
func (f *fleet) Fit(p events.Partition) int                     { return f.fit[p] }
func (f *fleet) MayServe(p events.Partition, model string) bool { return f.models(p, model) }
func (f *fleet) Finishes(node string) bool                      { return f.finishes }

// replies delivers replies to their receivers.
type replies struct {
	mu   sync.Mutex
	last uint64
	to   map[uint64]waiting
}

type waiting struct {
	to  rpc.Receiver
	tag int
}

func (r *replies) add(to rpc.Receiver, tag int) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.to == nil {
		r.to = map[uint64]waiting{}
	}
	r.last++
	r.to[r.last] = waiting{to, tag}
	return r.last
}

func (r *replies) Redirect(id uint64, to rpc.Receiver, tag int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, waits := r.to[id]; waits {
		r.to[id] = waiting{to, tag}
	}
}

func (r *replies) give(id uint64, reply rpc.Reply) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.to[id].to.Receive(r.to[id].tag, reply)
	delete(r.to, id)
}

// handle answers a request like a node.
func handle(ctx context.Context, n *node, op string, body []byte) rpc.Reply {
	var answer any
	var err error
	if op == ops.Find {
		q := &api.Query{}
		if err = api.Unmarshal(api.MsgPack, body, q); err == nil {
			answer, err = n.Find(ctx, q)
		}
	} else {
		var asked api.WorkersRequest
		if err = api.Unmarshal(api.MsgPack, body, &asked); err == nil {
			answer, err = n.Workers(ctx, asked)
		}
	}
	if err != nil {
		return rpc.Reply{Err: err}
	}
	out, err := api.Marshal(api.MsgPack, answer)
	return rpc.Reply{Body: out, Err: err}
}

func (f *fleet) Send(to, op string, patience time.Duration, _ string, body []byte, who rpc.Receiver, tag int) (
	uint64, error) {
	f.asked.Add(1)
	id, n, there, back := f.add(who, tag), f.nodes[to], f.delay(), f.delay()
	go func() {
		switch f.states[to] {
		case "silent":
			return
		case "dead":
			if time.Sleep(there); !f.until.IsZero() && time.Now().After(f.until) {
				break
			}
			f.give(id, rpc.Reply{Err: rpc.ErrNoResponder})
			return
		case "failing":
			time.Sleep(there)
			f.give(id, rpc.Reply{Err: api.Errorf(api.CodeInternal, "disk on fire")})
			return
		}
		time.Sleep(there)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		var q api.Query
		if op == ops.Find {
			if err := api.Unmarshal(api.MsgPack, body, &q); err != nil {
				f.t.Error(err)
			}
			if q.Tokens != nil {
				f.tokens.Store(true)
			}
		}
		reply := handle(ctx, n, op, body)
		if len(reply.Body) > 1<<20-512 {
			f.t.Errorf("a reply to %s has %d bytes", op, len(reply.Body))
		}
		time.Sleep(back)
		f.give(id, reply)
	}()
	return id, nil
}

func partitionOf(w events.WorkerID) (p events.Partition, err error) {
	_, err = fmt.Sscanf(string(w), "p%d", &p)
	return p, err
}

// newFleet makes a random cluster, and the twin with all reachable data of its nodes.
func newFleet(t *testing.T, rng *rand.Rand) (f *fleet, s *Scatter, twin *node, reachable func(events.Partition) bool) {
	partitions := uint32(1 + rng.IntN(12))
	var workers []worker
	for i := range rng.IntN(30) {
		w := worker{partition: events.Partition(rng.Uint32N(partitions)), model: fmt.Sprint("m", rng.IntN(3)), size: 4,
			held: prompt(rng)}
		w.name = events.WorkerID(fmt.Sprintf("p%d-w%d", w.partition, i))
		if w.model == "m1" {
			w.ahead = uint32(rng.IntN(3))
		}
		if w.model == "m2" && rng.IntN(3) == 0 {
			w.size = 8
		}
		workers = append(workers, w)
	}
	f = &fleet{
		t: t, nodes: map[string]*node{}, states: map[string]string{}, serving: make([][]string,
			partitions), fit: make([]int, partitions),
		delay: func() time.Duration { return time.Duration(100+rand.IntN(900)) * time.Microsecond },
	}
	names := []string{"n0", "n1", "n2", "n3", "n4"}[:1+rng.IntN(5)]
	truth := map[string]map[events.Partition]bool{}
	seq := func(p events.Partition) events.StreamSeq { return events.StreamSeq(10 + p) }
	for _, name := range names {
		truth[name] = map[events.Partition]bool{}
		n := &node{partitions: partitions, seq: seq, serves: func(p events.Partition) bool { return truth[name][p] }}
		f.nodes[name] = n
		if name != "n0" && rng.IntN(4) == 0 {
			f.states[name] = []string{"silent", "dead", "failing"}[rng.IntN(3)]
		}
	}
	can := map[events.Partition]bool{}
	knows := map[string]bool{}
	for p := range events.Partition(partitions) {
		for _, at := range rng.Perm(len(names))[:rng.IntN(min(3, len(names))+1)] {
			name := names[at]
			f.serving[p] = append(f.serving[p], name)
			truth[name][p] = rng.IntN(6) > 0 // or the view is wrong
			can[p] = can[p] || truth[name][p] && f.states[name] == ""
		}
		f.fit[p] = rng.IntN(len(f.serving[p]) + 1)
	}
	for _, w := range workers {
		knows[fmt.Sprint(w.partition, w.model)] = true
		for name, n := range f.nodes {
			if truth[name][w.partition] {
				n.workers = append(n.workers, w)
			}
		}
	}
	f.models = func(p events.Partition, model string) bool { return knows[fmt.Sprint(p, model)] }
	reachable = func(p events.Partition) bool { return can[p] }
	twin = &node{partitions: partitions, seq: seq, serves: reachable}
	for _, w := range workers {
		if can[w.partition] {
			twin.workers = append(twin.workers, w)
		}
	}
	s = New(Config{
		Self: "n0", Partitions: partitions, PartitionOf: partitionOf, Local: f.nodes["n0"],
		View: func() View { return f }, Transport: f, Hedges: &rpc.Budget{},
	})
	return f, s, twin, reachable
}

func prompt(rng *rand.Rand) []uint32 {
	tokens := make([]uint32, rng.IntN(60))
	for i := range tokens {
		tokens[i] = rng.Uint32() % 16 / 15
	}
	return tokens
}

func query(rng *rand.Rand, partitions uint32) *api.Query {
	q := &api.Query{Model: fmt.Sprint("m", rng.IntN(4)), Idle: rng.IntN(4) == 0}
	if q.Tokens = append(api.Tokens{}, prompt(rng)...); rng.IntN(3) == 0 {
		q.Hashes = append(api.Hashes{}, (&worker{size: 4}).blocks(q.Tokens, &api.Query{})...)
		q.Tokens = nil
	}
	if rng.IntN(3) == 0 {
		q.BlockSize = []uint32{4, 8, 16}[rng.IntN(3)]
	}
	for range rng.IntN(3) * rng.IntN(2) {
		p := rng.Uint32N(partitions)
		q.Workers = append(q.Workers, events.WorkerID(fmt.Sprintf("p%d-w%d", p, rng.IntN(30))))
	}
	if rng.IntN(8) == 0 {
		p := events.Partition(rng.Uint32N(partitions))
		q.MinSeq = []api.PartitionSeq{{Partition: p, Seq: events.StreamSeq(rng.IntN(2)) * events.StreamSeq(11+p)}}
	}
	return q
}

// TestAnswersAreTheTwins sends random queries to random clusters. A complete answer equals the answer of one node with
// all data. An incomplete answer equals it without its missing partitions, which are unreachable and may have workers
// of the model.
func TestAnswersAreTheTwins(t *testing.T) {
	seeds := uint64(500)
	if testing.Short() {
		seeds = 150
	}
	outcomes := map[string]int{}
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 3))
			f, s, twin, can := newFleet(t, rng)
			for i := range 6 {
				q := query(rng, twin.partitions)
				whole := &api.Query{}
				*whole = *q
				if whole.Hashes != nil && len(whole.Hashes) == 0 {
					whole.Hashes, whole.Hashed = nil, []api.Hashed{{}}
				}
				whole.MinSeq = nil
				begun := time.Now()
				ctx, cancel := context.WithTimeout(context.Background(), 4*time.Second)
				got, err := s.Find(ctx, q)
				took := time.Since(begun)
				cancel()
				if took > 4*time.Second {
					t.Fatalf("seed %d: %v", seed, took)
				}
				if len(q.MinSeq) > 0 && q.MinSeq[0].Seq > 0 && can(q.MinSeq[0].Partition) {
					var e *api.Error
					if !errors.As(err, &e) || e.Code != api.CodeBehind && e.Code != api.CodeBlockSizeMismatch {
						t.Fatalf("seed %d, query %d: it waits for %v: %+v, %v", seed, i, q.MinSeq, got, err)
					}
					outcomes["behind"]++
					continue
				}
				var missing []events.Partition
				anybody := false
				for p := range events.Partition(twin.partitions) {
					anybody = anybody || f.models(p, q.Model) ||
						slices.ContainsFunc(q.MinSeq, func(m api.PartitionSeq) bool { return m.Partition == p })
				}
				for p := range events.Partition(twin.partitions) {
					concerned := !anybody || f.models(p, q.Model) ||
						slices.ContainsFunc(q.MinSeq, func(m api.PartitionSeq) bool { return m.Partition == p })
					if concerned && !can(p) {
						missing = append(missing, p)
					}
				}
				all := *twin
				all.serves = func(events.Partition) bool { return true }
				want, wantErr := all.Find(context.Background(), whole)
				// the missing partitions may have the right size
				if code(wantErr) == api.CodeBlockSizeMismatch && q.BlockSize != 0 && len(missing) > 0 {
					wantErr = api.Errorf(api.CodeNotReady, "")
				}
				if code(wantErr) == api.CodeUnknownModel { // then all nodes get requests
					if missing = nil; slices.ContainsFunc(list(full(int(twin.partitions))),
						func(p events.Partition) bool { return !can(p) }) {
						wantErr = api.Errorf(api.CodeNotReady, "")
					}
				}
				if code(err) != code(wantErr) {
					t.Fatalf("seed %d, query %d %+v: %v, the twin's error is %v", seed, i, q, err, wantErr)
				}
				if err != nil {
					var e *api.Error
					if errors.As(err, &e) && e.Code == api.CodeNotReady && (len(e.Missing) == 0 ||
						slices.ContainsFunc(e.Missing, can) ||
						!strings.Contains(e.Message, fmt.Sprintf("no node answers for partitions %v", e.Missing))) {
						t.Fatalf("seed %d, query %d %+v: %+v", seed, i, q, e)
					}
					outcomes[string(code(err))]++
					continue
				}
				want.Partitions, want.Lookaheads = nil, nil
				want.Complete, want.Missing = len(missing) == 0, missing
				named := got.Partitions
				got.Partitions = nil
				if !reflect.DeepEqual(got, want) {
					t.Fatalf("seed %d, query %d %+v:\n got %+v\nwant %+v", seed, i, q, got, want)
				}
				for _, p := range named {
					if p.StaleMS != 4000*uint64(p.Partition%3) || p.ResyncNeeded != (p.Partition%2 == 1) {
						t.Fatalf("seed %d: %+v differs from its node's answer", seed, p)
					}
					if p.Seq != twin.seq(p.Partition) || slices.Contains(missing, p.Partition) {
						t.Fatalf("seed %d: the answer reflects %+v; missing are %v", seed, named, missing)
					}
				}
				outcomes[fmt.Sprint("complete: ", got.Complete)]++
			}
			l, err := s.Workers(context.Background(), api.WorkersRequest{})
			if err != nil {
				t.Fatal(err)
			}
			want, _ := twin.Workers(context.Background(), api.WorkersRequest{})
			if len(l.Workers) != len(want.Workers) || len(want.Workers) > 0 &&
				!reflect.DeepEqual(l.Workers, want.Workers) || !slices.Equal(l.Missing, want.Missing) ||
				l.Complete != want.Complete {
				t.Fatalf("seed %d: workers are %+v, should be %+v", seed, l, want)
			}
			parts := &api.WorkerList{}
			for more := true; more; more = parts.Next != nil {
				part, err := s.Workers(context.Background(), api.WorkersRequest{After: parts.Next,
					Limit: 1 + rng.IntN(4)})
				if err != nil {
					t.Fatal(err)
				}
				parts.Append(part)
			}
			if len(parts.Workers) != len(want.Workers) || len(want.Workers) > 0 &&
				!reflect.DeepEqual(parts.Workers, want.Workers) || !slices.Equal(parts.Missing, want.Missing) {
				t.Fatalf("seed %d: part by part workers are %+v, should be %+v", seed, parts, want)
			}
			if f.tokens.Load() {
				t.Fatal("tokens were sent to another node")
			}
			time.Sleep(10 * time.Second)
			synctest.Wait()
			for id, w := range f.to {
				if _, late := w.to.(*lateReplies); !late {
					t.Fatalf("seed %d: the reply to request %d is still waited for", seed, id)
				}
			}
		})
	}
	t.Log(outcomes)
	for _, o := range []string{"complete: true", "complete: false", "unknown_model", "block_size_mismatch", "not_ready",
		"behind"} {
		if outcomes[o] < int(seeds)/100 {
			t.Errorf("the outcome %q came %d times only", o, outcomes[o])
		}
	}
}

// TestAllGoneForAMoment: if both nodes of a partition fail at the same moment, the request is repeated soon, unless
// that has been useless for a while.
func TestAllGoneForAMoment(t *testing.T) {
	cluster := func(until time.Duration) (*fleet, *Scatter) {
		w := worker{name: "p0-w0", model: "m", size: 4, held: make([]uint32, 8)}
		f := &fleet{
			t: t, nodes: map[string]*node{}, states: map[string]string{"n1": "dead",
				"n2": "dead"}, serving: [][]string{{"n1", "n2"}}, fit: []int{2},
			delay: func() time.Duration { return ms / 2 }, models: func(events.Partition, string) bool { return true },
		}
		if until > 0 {
			f.until = time.Now().Add(until)
		}
		for _, name := range []string{"n0", "n1", "n2"} {
			f.nodes[name] = &node{
				partitions: 1, workers: []worker{w}, serves: func(events.Partition) bool { return name != "n0" },
				seq: func(events.Partition) events.StreamSeq { return 1 },
			}
		}
		s := New(Config{
			Self: "n0", Partitions: 1, PartitionOf: partitionOf, Local: f.nodes["n0"], View: func() View { return f },
			Transport: f, Hedges: &rpc.Budget{},
		})
		return f, s
	}
	for _, c := range []struct {
		until time.Duration // the nodes are missing
		wait  time.Duration // before the second query
		whole [2]bool
		asked [2]int64
		took  [2]time.Duration // at least, and at most 10 ms more
	}{
		{10 * ms, 0, [2]bool{true, true}, [2]int64{3, 1}, [2]time.Duration{25 * ms, 0}},
		{60 * ms, 0, [2]bool{true, true}, [2]int64{5, 1}, [2]time.Duration{100 * ms, 0}},
		{0, 0, [2]bool{}, [2]int64{6, 6}, [2]time.Duration{100 * ms, 100 * ms}},
		{0, 2 * time.Second, [2]bool{}, [2]int64{6, 2}, [2]time.Duration{100 * ms, 0}},
		{2 * time.Second, 3 * time.Second, [2]bool{false, true}, [2]int64{6, 1}, [2]time.Duration{100 * ms, 0}},
	} {
		synctest.Test(t, func(t *testing.T) {
			f, s := cluster(c.until)
			for i := range 2 {
				hashes := f.nodes["n1"].workers[0].blocks(make([]uint32, 8), &api.Query{})
				begun, before := time.Now(), f.asked.Load()
				a, err := s.Find(t.Context(), &api.Query{Model: "m", Hashes: hashes})
				took, asked := time.Since(begun), f.asked.Load()-before
				whole := err == nil && a.Complete
				if whole != c.whole[i] || asked != c.asked[i] || took < c.took[i] || took > c.took[i]+20*ms {
					t.Errorf("gone for %v, query %d: %+v, %v, after %d requests and %v; want whole: %v, %d, %v",
						c.until, i, a, err, asked, took, c.whole[i], c.asked[i], c.took[i])
				}
				time.Sleep(c.wait)
			}
		})
	}
}

func code(err error) api.Code {
	var e *api.Error
	if errors.As(err, &e) {
		return e.Code
	}
	if err != nil {
		return "no api.Error"
	}
	return ""
}

// refusing is a transport to peers with a constant error.
type refusing struct {
	fleet
	with *api.Error
}

func (r *refusing) Send(_, _ string, _ time.Duration, _ string, _ []byte, who rpc.Receiver, tag int) (uint64, error) {
	id := r.add(who, tag)
	go r.give(id, rpc.Reply{Err: r.with})
	return id, nil
}

// TestVerdictsAreOfQueries: a verdict of a query is no answer to another request.
func TestVerdictsAreOfQueries(t *testing.T) {
	g := three(t, func() string { return "" })
	s := New(Config{Self: "n0", Partitions: 3, PartitionOf: partitionOf, Local: g.nodes["n0"],
		View: func() View { return g.fleet }, Hedges: &rpc.Budget{},
		Transport: &refusing{with: api.Errorf(api.CodeUnknownModel, "no such model")}})
	if list, err := s.Workers(t.Context(), api.WorkersRequest{}); err == nil && len(list.Missing) == 0 {
		t.Errorf("%+v: nothing is missing", list)
	}
}

// TestTooLargeBetweenNodes: the error of a prompt that does not fit into a message between nodes has the remedy there,
// not the remedy for clients over NATS.
func TestTooLargeBetweenNodes(t *testing.T) {
	g := three(t, func() string { return "" })
	s := New(Config{Self: "n0", Partitions: 3, PartitionOf: partitionOf, Local: g.nodes["n0"],
		View: func() View { return g.fleet }, Hedges: &rpc.Budget{},
		Transport: &refusing{with: api.Errorf(api.CodeTooLarge, "ask over HTTP, or send hashes")}})
	_, err := s.Find(t.Context(), &api.Query{Model: "m", Hashes: api.Hashes{1}})
	if code(err) != api.CodeTooLarge || !strings.Contains(err.Error(), "--partition-replicas") ||
		strings.Contains(err.Error(), "HTTP") {
		t.Errorf("%v", err)
	}
}
