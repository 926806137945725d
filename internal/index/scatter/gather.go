package scatter

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// gathering is a request to a node for each partition.
type gathering interface {
	op() string
	patient() bool // nodes wait for an event
	body(list []events.Partition) ([]byte, error)
	here(ctx context.Context, list []events.Partition) reply // this node's reply
	decode(body []byte) reply
	add(taken []events.Partition, r reply)
}

// reply has the result of this node or of another node.
type reply struct {
	answer  *api.Answer
	workers *api.WorkerList
	not     []events.Partition // partitions that the node does not serve
	verdict *api.Error         // a result without an answer
	err     *api.Error         // no result
}

type finding struct {
	query *api.Query
	union *Union
	local Local
}

func (*finding) op() string      { return ops.Find }
func (f *finding) patient() bool { return len(f.query.MinSeq) > 0 }

// share returns the query for some partitions.
func (f *finding) share(list []events.Partition) *api.Query {
	q := *f.query
	q.Partitions, q.MinSeq, q.Room = list, nil, nil // the answer may arrive after the return
	for _, m := range f.query.MinSeq {
		if slices.Contains(list, m.Partition) {
			q.MinSeq = append(q.MinSeq, m)
		}
	}
	return &q
}

func (f *finding) body(list []events.Partition) ([]byte, error) {
	return api.Marshal(api.MsgPack, f.share(list))
}

func (f *finding) here(ctx context.Context, list []events.Partition) reply {
	return found(f.local.Find(ctx, f.share(list)))
}

func (f *finding) decode(body []byte) reply {
	a := &api.Answer{}
	return found(a, api.Unmarshal(api.MsgPack, body, a))
}

func found(a *api.Answer, err error) reply {
	switch e := failure(err); {
	case e == nil:
		return reply{answer: a, not: a.Missing}
	case Verdict(e):
		return reply{verdict: e, not: e.Missing}
	default:
		return reply{err: e}
	}
}

func (f *finding) add(taken []events.Partition, r reply) { f.union.Add(taken, r.answer, r.verdict) }

type listing struct {
	local Local
	asked api.WorkersRequest
	list  *api.WorkerList // Next is the least end of a node's page; nil: all pages are complete
}

func (*listing) op() string    { return ops.Workers }
func (*listing) patient() bool { return false }

func (l *listing) body([]events.Partition) ([]byte, error) { return api.Marshal(api.MsgPack, &l.asked) }

func (*listing) decode(body []byte) reply {
	l := &api.WorkerList{}
	return listed(l, api.Unmarshal(api.MsgPack, body, l))
}

func (l *listing) here(ctx context.Context, _ []events.Partition) reply {
	return listed(l.local.Workers(ctx, l.asked))
}

func listed(l *api.WorkerList, err error) reply {
	if e := failure(err); e != nil {
		return reply{err: e}
	}
	return reply{workers: l, not: l.Missing}
}

func (l *listing) add(taken []events.Partition, r reply) {
	for _, w := range r.workers.Workers {
		if _, mine := slices.BinarySearch(taken, w.Partition); mine {
			w.Pending = max(w.Pending, w.Parked) // a node of v0.4.0 sends the old name alone
			l.list.Workers = append(l.list.Workers, w)
		}
	}
	if next := r.workers.Next; next != nil && (l.list.Next == nil || next.Compare(*l.list.Next) < 0) {
		l.list.Next = next
	}
}

// finish cuts the list at the end of the shortest page.
func (l *listing) finish(missing []events.Partition) *api.WorkerList {
	if upTo := l.list.Next; upTo != nil {
		l.list.Workers = slices.DeleteFunc(l.list.Workers,
			func(w api.WorkerInfo) bool { return w.Place().Compare(*upTo) > 0 })
	}
	l.list.Cut(l.asked)
	l.list.Complete, l.list.Missing = len(missing) == 0, missing
	return l.list
}

// failure converts an error for clients; nil stays nil.
func failure(err error) *api.Error {
	switch e, is := errors.AsType[*api.Error](err); {
	case err == nil:
		return nil
	case is:
		return e
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return api.Errorf(api.CodeUnavailable, "%v", err)
	}
	return api.Errorf(api.CodeInternal, "%v", err)
}

// replyQueue receives the replies of a gathering, and has the state of its requests.
type replyQueue struct {
	s       *Scatter
	arrived chan struct{} // signal of an element in list
	timer   *time.Timer   // of the waiting goroutine
	sent    []inFlight    // by tag

	mu          sync.Mutex
	list, spare []arrival // spare is unused
}

// inFlight is a request to another node.
type inFlight struct {
	id      uint64 // of the transport
	request int    // of the round
	node    string
	at      time.Duration
	replied bool
	span    tracing.Span
}

// arrival is a reply: to the request with a tag, or, if own is not nil, of this node to a request of the round.
type arrival struct {
	tag   int
	reply rpc.Reply
	at    time.Duration
	own   *reply
}

func (q *replyQueue) Receive(tag int, r rpc.Reply) { q.put(arrival{tag: tag, reply: r, at: q.s.now()}) }

func (q *replyQueue) put(a arrival) {
	q.mu.Lock()
	q.list = append(q.list, a)
	q.mu.Unlock()
	loop.Wake(q.arrived)
}

// next returns and empties the list.
func (q *replyQueue) next() []arrival {
	q.mu.Lock()
	defer q.mu.Unlock()
	list := q.list
	q.list, q.spare = q.spare[:0], list
	return list
}

// reset prepares the queue for another gathering. It drops all bodies.
func (q *replyQueue) reset() {
	clear(q.list[:cap(q.list)])
	clear(q.spare[:cap(q.spare)])
	clear(q.sent[:cap(q.sent)])
	q.list, q.spare, q.sent = q.list[:0], q.spare[:0], q.sent[:0]
	select {
	case <-q.arrived:
	default:
	}
}

// lateReplies receives a node's replies after the end of the gathering, and updates the node's reply times. The tag is
// the time of the request, or the complement for a patient request.
type lateReplies struct {
	s    *Scatter
	node string
}

func (l *lateReplies) Receive(tag int, r rpc.Reply) {
	took := l.s.now() - time.Duration(max(tag, ^tag))
	if r.Err == nil && tag >= 0 {
		l.s.peers.Answered(l.node, took)
	}
	l.s.replied(r, took)
}

// lateFrom returns the receiver of a node's late replies.
func (s *Scatter) lateFrom(node string) *lateReplies {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.late[node]
	if l == nil {
		if len(s.late) >= maxPeers { // names of former nodes
			clear(s.late)
		}
		l = &lateReplies{s, node}
		s.late[node] = l
	}
	return l
}

// replied reports the end of a request to another node, and returns the error in its reply.
func (s *Scatter) replied(r rpc.Reply, took time.Duration) *api.Error {
	e := failure(client.Failure(r))
	outcome := ops.OK
	if e != nil {
		outcome = string(e.Code)
	}
	s.cfg.Metrics.Replied(outcome, took)
	return e
}

// pauses are the pauses before further attempts for partitions on which all nodes failed. After the end of a common
// NATS server, nodes lose their connections at the same moment, and return a few milliseconds later. Further attempts
// are made only after immediate failures, and only for partitions that have not been missing for long.
var pauses = [...]time.Duration{25 * time.Millisecond, 75 * time.Millisecond}

const (
	atOnce  = 150 * time.Millisecond // including the pauses
	notLong = time.Second
)

// gather gets an answer of a node for each partition, and returns the partitions without an answer in time.
func (s *Scatter) gather(ctx context.Context, wanted []Wanted, g gathering) (missing []events.Partition, err error) {
	begun := s.now()
	for i := 0; ; i++ {
		if missing, err = s.once(ctx, wanted, g); err != nil {
			return nil, err
		}
		if lost := s.lost(wanted, missing); !lost || i == len(pauses) || s.now()-begun > atOnce ||
			!loop.Wait(ctx, pauses[i]) {
			break
		}
		view := s.cfg.View()
		wanted = make([]Wanted, len(missing))
		for i, p := range missing {
			wanted[i] = Wanted{Partition: p, Serving: view.Serving(p), Fit: view.Fit(p)}
		}
	}
	if len(missing) > 0 {
		s.cfg.Metrics.Missing(g.op(), len(missing))
	}
	return missing, nil
}

// lost records the missing partitions, and reports whether some are missing, but none for long.
func (s *Scatter) lost(wanted []Wanted, missing []events.Partition) bool {
	now, fresh := int64(s.now())+1, len(missing) > 0
	for i := range wanted {
		since := &s.missing[wanted[i].Partition]
		if _, is := slices.BinarySearch(missing, wanted[i].Partition); !is {
			if since.Load() != 0 {
				since.Store(0)
			}
		} else if !since.CompareAndSwap(0, now) && now-since.Load() > int64(notLong) {
			fresh = false
		}
	}
	return fresh
}

// once is gather with at most one request for each node and partition.
func (s *Scatter) once(ctx context.Context, wanted []Wanted, g gathering) (missing []events.Partition, err error) {
	now := s.now()
	left := ops.Deadline
	if deadline, has := ctx.Deadline(); has {
		left = time.Until(deadline)
	}
	// The answer itself must travel, so the nodes' answers must arrive earlier.
	margin := min(left/10, 50*time.Millisecond)
	cancel := func() {}
	if g.patient() { // a waiting request must end with the caller
		ctx, cancel = context.WithCancel(ctx)
	}
	c := &call{
		s: s, ctx: ctx, cancel: cancel, g: g, margin: margin, until: now + left - margin,
		round: NewRound(s.peers, s.cfg.Self, now+left-margin, g.patient()), queue: s.queues.Get().(*replyQueue),
	}
	defer c.end()
	c.send(c.round.Begin(now, wanted))
	timer := c.queue.timer
	defer timer.Stop()
	for c.fatal == nil && !c.round.Done() {
		timer.Reset(c.round.Next() - s.now())
		select {
		case <-c.queue.arrived:
			for _, a := range c.queue.next() {
				c.receive(a)
			}
		case <-timer.C:
			c.send(c.round.Tick(s.now()))
		case <-ctx.Done():
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return nil, ctx.Err()
			}
			c.round.Tick(c.until) // this goroutine was delayed
		}
	}
	missing = c.round.Missing()
	if n := c.round.HedgesDenied; n > 0 {
		s.cfg.Metrics.HedgesDenied(n)
	}
	switch {
	case c.fatal != nil:
		return nil, c.fatal
	case c.behind != nil && len(missing) > 0:
		return nil, c.behind
	}
	return missing, nil
}

// call is a running gathering, owned by a goroutine.
type call struct {
	s      *Scatter
	ctx    context.Context
	cancel context.CancelFunc
	g      gathering
	round  *Round
	until  time.Duration
	margin time.Duration
	queue  *replyQueue
	toSend []Request
	fatal  *api.Error // no node can answer
	behind *api.Error // a node waited without success
	away   sync.WaitGroup
}

// send sends requests, and the requests after failures. This node's own share comes last, while other nodes work.
func (c *call) send(requests []Request) {
	for c.toSend = append(c.toSend[:0], requests...); len(c.toSend) > 0 && c.fatal == nil; {
		i := max(0, slices.IndexFunc(c.toSend, func(a Request) bool { return a.Node != c.s.cfg.Self }))
		a := c.toSend[i]
		c.toSend = slices.Delete(c.toSend, i, i+1)
		switch {
		case a.Node != c.s.cfg.Self:
			if err := c.request(a); err != nil {
				c.toSend = append(c.toSend, c.failed(a.ID, err)...)
			}
		case c.g.patient():
			ctx, cancel := context.WithTimeout(c.ctx, c.until-c.margin-c.s.now())
			c.away.Go(func() {
				defer cancel()
				r := c.g.here(ctx, a.Partitions)
				c.queue.put(arrival{tag: a.ID, own: &r})
			})
		default:
			c.toSend = append(c.toSend, c.settle(a.ID, c.g.here(c.ctx, a.Partitions))...)
		}
	}
}

func (c *call) request(r Request) *api.Error {
	body, err := c.g.body(r.Partitions)
	if err != nil {
		return api.Errorf(api.CodeInternal, "encode the request: %v", err)
	}
	now, tag, trace := c.s.now(), len(c.queue.sent), ""
	ctx, span := tracing.Ask(c.ctx, "peer")
	if span.On() {
		span.Set(attribute.String("kvatlas.node", r.Node), attribute.String("kvatlas.peer.kind", r.Kind.String()),
			attribute.Int("kvatlas.partitions", len(r.Partitions)))
		trace = rpc.Traceparent(ctx)
	}
	c.queue.sent = append(c.queue.sent, inFlight{request: r.ID, node: r.Node, at: now, span: span})
	c.s.cfg.Metrics.Asked(r.Kind.String())
	id, err := c.s.cfg.Transport.Send(r.Node, c.g.op(), max(c.until-c.margin-now, time.Millisecond), trace, body,
		c.queue, tag)
	if err != nil {
		e := c.s.replied(rpc.Reply{Err: err}, 0)
		span.Fail(string(e.Code), true)
		span.End()
		return e
	}
	c.queue.sent[tag].id = id
	return nil
}

func (c *call) receive(a arrival) {
	if a.own != nil {
		if c.fatal == nil {
			c.send(c.settle(a.tag, *a.own))
		}
		return
	}
	f := &c.queue.sent[a.tag]
	f.replied = true
	e := c.s.replied(a.reply, a.at-f.at)
	if e != nil {
		f.span.Fail(string(e.Code), false)
	}
	f.span.End()
	r := reply{}
	switch {
	case c.fatal != nil:
		return
	case e == nil:
		r = c.g.decode(a.reply.Body)
	case Verdict(e) && c.g.op() == ops.Find:
		r.verdict, r.not = e, e.Missing
	default:
		r.err = e
	}
	c.send(c.settle(f.request, r))
}

func (c *call) settle(id int, r reply) []Request {
	if r.err != nil {
		return c.failed(id, r.err)
	}
	taken, asks := c.round.Answer(c.s.now(), id, r.not)
	if len(taken) > 0 {
		c.g.add(taken, r)
	}
	return asks
}

func (c *call) failed(id int, err *api.Error) []Request {
	switch err.Code {
	case api.CodeTooLarge:
		c.fatal = api.Errorf(api.CodeTooLarge, "the query needs other nodes, and a message between nodes has room for "+
			"some 112,000 blocks; give engines larger blocks, or have each node keep all partitions (--partition-replicas)")
		return nil
	case api.CodeBehind:
		c.behind = err
	}
	return c.round.Fail(c.s.now(), id, err.Code != api.CodeBehind && err.Code != api.CodeBusy)
}

// end releases all resources. Later replies only update reply times.
func (c *call) end() {
	c.round.End(c.s.now())
	c.cancel()
	c.away.Wait()
	for _, f := range c.queue.sent {
		if f.id == 0 || f.replied {
			continue
		}
		f.span.Fail("not_awaited", false)
		f.span.End()
		tag := int(f.at)
		if c.g.patient() {
			tag = ^tag
		}
		c.s.cfg.Transport.Redirect(f.id, c.s.lateFrom(f.node), tag)
	}
	for _, a := range c.queue.next() { // arrived after the last look
		if a.own == nil {
			c.s.replied(a.reply, a.at-c.queue.sent[a.tag].at)
		}
	}
	c.queue.reset()
	c.s.queues.Put(c.queue)
}
