//go:build judges

package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

const (
	loadModel    = "m"
	loadRouters  = 4
	loadSessions = 50
	loadExpiry   = 30 * time.Second // of bookings

	// A paused process answers a call after the pause.
	overHTTP, overNATS = 20 * time.Second, 3 * time.Second
)

// loadRanks are the ranks for bookings. Only requests of the last rank have a decreasing weight by output. Its load
// depends on the order in which nodes received the changes, so its blocks are only compared between nodes.
var loadRanks = []events.RankKey{{Instance: "w1"}, {Instance: "w1", Rank: 1}, {Instance: "w2"}, {Instance: "decays"}}

// life is a life of a node.
type life struct {
	d     *daemon
	begun int64 // offset of the output
}

// ack is an acknowledgement by an unknown life of the list.
type ack []life

// survives reports whether the process of every life still runs.
func (a ack) survives() bool {
	return !slices.ContainsFunc(a, func(l life) bool { return l.d.begun.Load() != l.begun })
}

// fact is an acknowledged change with the acknowledgements. A node with a request's progress has the booking too.
type fact []ack

func (f fact) survives() bool { return slices.ContainsFunc(f, ack.survives) }

// tracked is the state of a request id. A call without a result may have been executed.
type tracked struct {
	id     string
	at     []events.RankKey // possible ranks of the booking
	tokens uint64           // of prefill
	blocks []string         // of the prompt: equal names are shared blocks

	tried       time.Time // the first booking was sent
	latest      time.Time // the last booking or progress was answered, or may have been carried out until
	booked      fact
	maybeBooked bool
	twice       bool // two nodes have booked the id
	done, freed fact
	maybeDone   bool
	maybeFreed  bool
	outputs     []fact
	maybeOuts   int

	judged bool // whether the request was looked up
	there  bool // and there
}

// deadline returns the earliest expiry on a node, and the latest expiry on all nodes.
func (q *tracked) deadline() (earliest, latest time.Time) {
	return q.tried.Add(loadExpiry), q.latest.Add(loadExpiry)
}

// routers book requests, report their progress and end them, over HTTP and NATS, on any node.
type routers struct {
	w     *clusterWorld
	conns []*jetstream.Conn  // to every NATS server
	nats  []*client.Client   // over conns
	nodes [][]*client.Client // over conns, to a single node

	mu      sync.Mutex
	counts  map[string]int
	serial  int
	clients map[string]*client.Client // by address
	all     map[string]*tracked       // by id

	stop context.CancelFunc
	done sync.WaitGroup
}

func newRouters(w *clusterWorld) *routers {
	r := &routers{w: w, counts: map[string]int{}, clients: map[string]*client.Client{}, all: map[string]*tracked{},
		stop: func() {}}
	for _, addr := range w.addrs {
		conn, err := jetstream.Connect(context.Background(), jetstream.ConnOptions{URLs: []string{"nats://" + addr},
			Wait: true})
		if err != nil {
			w.t.Fatal(err)
		}
		r.conns = append(r.conns, conn)
		r.nats = append(r.nats, harness.Client(w.t, conn, "default", client.Options{}))
		var nodes []*client.Client
		for i := range clusterNodes {
			nodes = append(nodes, harness.NodeClient(w.t, conn, fmt.Sprint("node-", i+1)))
		}
		r.nodes = append(r.nodes, nodes)
	}
	return r
}

func (r *routers) end() {
	r.quiet()
	for _, c := range r.conns {
		c.Close()
	}
}

// start lets routers work until quiet is called.
func (r *routers) start(rng *rand.Rand) {
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	for range loadRouters {
		seed := rng.Uint64()
		r.done.Go(func() { r.route(ctx, rand.New(rand.NewPCG(seed, 5))) })
	}
}

// quiet waits for all replies.
func (r *routers) quiet() {
	r.stop()
	r.done.Wait()
}

// route plays routers in sequence. Every router dies at some time with running requests.
func (r *routers) route(ctx context.Context, rng *rand.Rand) {
	var open []*tracked
	for ctx.Err() == nil {
		n := rng.IntN(100)
		i := 0
		if len(open) > 0 {
			i = rng.IntN(len(open))
		}
		switch {
		case n < 1:
			r.count("routers that died with running requests")
			open = nil
		case n < 4:
			r.rivals(rng)
		case n < 40 || len(open) == 0:
			if q := r.book(rng); q != nil {
				open = append(open, q)
			}
		case n < 50:
			r.prefillComplete(open[i], r.anyone(rng))
		case n < 70:
			r.output(rng, open[i])
		case n < 72: // the request never ends
			open = slices.Delete(open, i, i+1)
		default:
			if r.free(open[i], r.anyone(rng)) {
				open = slices.Delete(open, i, i+1)
			}
		}
		time.Sleep(time.Duration(rng.IntN(40)) * time.Millisecond)
	}
}

func (r *routers) count(what string) {
	r.mu.Lock()
	r.counts[what]++
	r.mu.Unlock()
}

// way is the way of a call to a node: HTTP to a single node, or NATS to any node.
type way struct {
	to   *client.Client
	node *daemon // nil: any
	life life
}

// anyone returns a way to any node, or nil if the selected node has no port yet.
func (r *routers) anyone(rng *rand.Rand) *way {
	if rng.IntN(3) == 0 {
		return &way{to: r.nats[rng.IntN(len(r.nats))]}
	}
	return r.to(r.w.nodes[rng.IntN(len(r.w.nodes))])
}

// to is the way to a node's present life over HTTP.
func (r *routers) to(d *daemon) *way {
	addr, err := d.served()
	if err != nil {
		return nil
	}
	d.mu.Lock()
	begun := d.addrOf
	d.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.clients[addr]
	if c == nil {
		if c, err = client.HTTP([]string{"http://" + addr}, client.Options{}); err != nil {
			r.w.t.Error(err)
			return nil
		}
		r.clients[addr] = c
	}
	return &way{c, d, life{d, begun}}
}

// lives returns the present lives of all nodes.
func (r *routers) lives() (a ack) {
	for _, d := range r.w.nodes {
		a = append(a, life{d, d.begun.Load()})
	}
	return a
}

// verdict is the result of a call.
type verdict int

const (
	yes verdict = iota + 1
	no
	unknown
)

// call makes a call, and returns the lives that may have acknowledged it.
func (r *routers) call(by *way, do func(context.Context, *client.Client) error) (verdict, ack, error) {
	patience := overNATS
	if by.node != nil {
		patience = overHTTP
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	who := ack{by.life}
	if by.node == nil {
		who = r.lives()
	}
	err := do(ctx, by.to)
	if by.node == nil {
		for _, l := range r.lives() {
			if !slices.Contains(who, l) {
				who = append(who, l) // a life that began during the call
			}
		}
	}
	switch code := client.CodeOf(err); {
	case err == nil:
		return yes, who, nil
	case code == api.CodeConflict, code == api.CodeUnknownRequest, code == api.CodeUnknownModel,
		code == api.CodeUnknownWorker, code == api.CodeNoWorkers, code == api.CodeNotReady, code == api.CodeBusy:
		r.count("refused: " + string(code))
		return no, who, err
	case code == api.CodeMalformed, code == api.CodeInternal:
		r.w.t.Errorf("a call was refused: %v", err)
	}
	r.count("calls without an answer")
	return unknown, who, err
}

// track registers a request before the booking.
func (r *routers) track(rng *rand.Rand, at ...events.RankKey) (*tracked, api.Prompt) {
	r.mu.Lock()
	r.serial++
	q := &tracked{id: fmt.Sprint("r", r.serial), at: at, tried: time.Now()}
	r.all[q.id] = q
	r.mu.Unlock()
	group := uint64(rng.IntN(4))
	p := api.Prompt{Model: loadModel, Hashes: api.Hashes{}}
	for i := range 1 + rng.IntN(20) {
		p.Hashes = append(p.Hashes, group<<32|uint64(i+1))
		q.blocks = append(q.blocks, fmt.Sprint(group, "/", i))
	}
	for i := range rng.IntN(8) {
		p.Hashes = append(p.Hashes, rng.Uint64())
		q.blocks = append(q.blocks, fmt.Sprint(q.id, "/", i))
	}
	p.ISLTokens = uint64(len(p.Hashes))*harness.BlockSize + uint64(rng.IntN(harness.BlockSize))
	return q, p
}

// book books a new request, at a rank or at a node's choice. It returns nil after a refusal.
func (r *routers) book(rng *rand.Rand) *tracked {
	by := r.anyone(rng)
	if by == nil {
		return nil
	}
	chosen := rng.IntN(3) == 0
	var at []events.RankKey
	if chosen {
		at = loadRanks
	} else {
		at = []events.RankKey{loadRanks[rng.IntN(len(loadRanks))]}
	}
	q, prompt := r.track(rng, at...)
	session := ""
	if rng.IntN(2) == 0 {
		session = fmt.Sprint("s", rng.IntN(loadSessions))
	}
	var selected *api.Selection
	v, who, err := r.call(by, func(ctx context.Context, c *client.Client) (err error) {
		if !chosen {
			_, err = c.Book(ctx, &api.BookRequest{Prompt: prompt, RequestID: q.id, Worker: at[0].Instance, Rank: at[0].Rank,
				EffectivePrefillTokens: prompt.ISLTokens, SessionID: session})
			return err
		}
		// The policy dynamo books the whole prompt, because no rank holds a part.
		selected, err = c.Select(ctx, &api.SelectRequest{Query: api.Query{Model: loadModel, Hashes: prompt.Hashes},
			ISLTokens: prompt.ISLTokens, RequestID: q.id, Book: true, SessionID: session, Policy: routing.DynamoPolicy})
		return err
	})
	if client.CodeOf(err) == api.CodeConflict {
		r.w.t.Errorf("the id %s is new, and refused: %v", q.id, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	q.tokens, q.latest = prompt.ISLTokens, time.Now()
	switch v {
	case no:
		delete(r.all, q.id)
		return nil
	case yes:
		r.counts["bookings"]++
		q.booked = fact{who}
	case unknown:
		q.maybeBooked = true
	}
	if selected != nil {
		q.at = []events.RankKey{{Instance: selected.Worker, Rank: selected.Rank}}
	}
	return q
}

// rivals books an id at two nodes at the same time. No router frees the request.
func (r *routers) rivals(rng *rand.Rand) {
	nodes := rng.Perm(len(r.w.nodes))[:2]
	ways := [2]*way{r.to(r.w.nodes[nodes[0]]), r.to(r.w.nodes[nodes[1]])}
	if ways[0] == nil || ways[1] == nil {
		return
	}
	q, prompt := r.track(rng, loadRanks[0], loadRanks[2])
	var verdicts [2]verdict
	var acks [2]ack
	var both sync.WaitGroup
	for i, by := range ways {
		both.Go(func() {
			verdicts[i], acks[i], _ = r.call(by, func(ctx context.Context, c *client.Client) error {
				_, err := c.Book(ctx, &api.BookRequest{Prompt: prompt, RequestID: q.id, Worker: q.at[i].Instance,
					EffectivePrefillTokens: prompt.ISLTokens})
				return err
			})
		})
	}
	both.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	q.tokens, q.latest = prompt.ISLTokens, time.Now()
	r.counts["ids sent to two nodes"]++
	for i, v := range verdicts {
		switch v {
		case yes:
			q.booked = append(q.booked, acks[i])
		case unknown:
			q.maybeBooked = true
		}
	}
	if q.twice = verdicts == [2]verdict{yes, yes}; q.twice {
		r.counts["ids booked by two nodes"]++
	}
	if q.booked == nil && !q.maybeBooked {
		delete(r.all, q.id)
	}
}

func (r *routers) prefillComplete(q *tracked, by *way) verdict {
	if by == nil {
		return unknown
	}
	v, who, _ := r.call(by, func(ctx context.Context, c *client.Client) error {
		return c.PrefillComplete(ctx, loadModel, q.id)
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	q.latest = time.Now()
	switch v {
	case yes:
		q.done, q.booked = append(q.done, who), append(q.booked, who)
	default: // a late call is retried: a refusal may answer the second call of an executed change
		q.maybeDone = true
	}
	return v
}

func (r *routers) output(rng *rand.Rand, q *tracked) {
	by := r.anyone(rng)
	if by == nil {
		return
	}
	ref := &api.RequestRef{Model: loadModel, RequestID: q.id}
	if len(q.at) == 1 && q.at[0] == loadRanks[3] {
		f := rng.Float64()
		ref.DecayFraction = &f
	}
	v, who, _ := r.call(by, func(ctx context.Context, c *client.Client) error { return c.OutputBlock(ctx, ref) })
	r.mu.Lock()
	defer r.mu.Unlock()
	q.latest = time.Now()
	switch v {
	case yes:
		q.outputs, q.booked = append(q.outputs, fact{who}), append(q.booked, who)
	case unknown:
		q.maybeOuts++
	}
}

// free ends a request, and reports whether no retry is necessary.
func (r *routers) free(q *tracked, by *way) bool {
	if by == nil {
		return false
	}
	v, who, _ := r.call(by, func(ctx context.Context, c *client.Client) error { return c.Free(ctx, loadModel, q.id) })
	r.mu.Lock()
	defer r.mu.Unlock()
	switch v {
	case yes:
		r.counts["ends"]++
		q.freed = append(q.freed, who)
	case unknown:
		q.maybeFreed = true
	}
	return v == yes
}
