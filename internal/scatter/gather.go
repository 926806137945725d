package scatter

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// gathering is something that is asked of one node for each partition.
type gathering interface {
	op() string
	patient() bool // nodes are asked to wait for something
	body(list []events.Partition) ([]byte, error)
	here(ctx context.Context, list []events.Partition) reply // what this node says
	decode(body []byte) reply
	add(taken []events.Partition, r reply)
}

// reply is what a node says, here or there.
type reply struct {
	answer  *api.Answer
	workers *api.WorkerList
	not     []events.Partition // it does not serve these
	verdict *api.Error         // it has looked, and there is no answer
	err     *api.Error         // it has not looked
}

// finding is a query that is being gathered.
type finding struct {
	query *api.Query
	union *Union
	local api.Indexer
}

func (*finding) op() string      { return api.OpFind }
func (f *finding) patient() bool { return len(f.query.MinSeq) > 0 }

// share is the query for some partitions.
func (f *finding) share(list []events.Partition) *api.Query {
	q := *f.query
	q.Partitions, q.MinSeq = list, nil
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

// listing is a list of workers that is being gathered.
type listing struct {
	local api.Indexer
	asked api.WorkersRequest
	list  *api.WorkerList // Next is the first place up to which a node has told all; nil: all have told all
}

func (*listing) op() string    { return api.OpWorkers }
func (*listing) patient() bool { return false }

func (l *listing) body([]events.Partition) ([]byte, error) {
	return api.Marshal(api.MsgPack, &l.asked)
}

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
	for i := range r.workers.Workers {
		if _, mine := slices.BinarySearch(taken, r.workers.Workers[i].Partition); mine {
			l.list.Workers = append(l.list.Workers, r.workers.Workers[i])
		}
	}
	if next := r.workers.Next; next != nil && (l.list.Next == nil || next.Compare(*l.list.Next) < 0) {
		l.list.Next = next
	}
}

// finish makes the list one that lacks nothing up to its end.
func (l *listing) finish(missing []events.Partition) *api.WorkerList {
	if upTo := l.list.Next; upTo != nil {
		l.list.Workers = slices.DeleteFunc(l.list.Workers,
			func(w api.WorkerInfo) bool { return w.Place().Compare(*upTo) > 0 })
	}
	l.list.Cut(l.asked)
	l.list.Complete, l.list.Missing = len(missing) == 0, missing
	return l.list
}

// failure is an error as clients get it; nil for none.
func failure(err error) *api.Error {
	var e *api.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		return e
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return api.Errorf(api.CodeUnavailable, "%v", err)
	}
	return api.Errorf(api.CodeInternal, "%v", err)
}

// flight is a request that waits for its reply.
type flight struct {
	node    string
	ask     int
	sent    time.Duration
	expires time.Duration
	patient bool
	box     *mailbox // nil: nobody waits any more
}

// mailbox is where the replies to one gathering arrive. Scatter.mu guards list.
type mailbox struct {
	list  []mail
	spare []mail // the list before, which is not in use
	bell  chan struct{}
	timer *time.Timer // of whoever waits for it
}

type mail struct {
	ask   int
	body  []byte
	reply *reply // in place of body
	err   *api.Error
}

// What all of a partition's nodes have failed to answer is asked for once more after each of these pauses: nodes lose
// their connections at the same moment when a NATS server ends to which they all were connected, and are back a few
// milliseconds later. That is done only while they fail at once, and while the partition has not been missing for long,
// so that nobody waits where it is of no use.
var pauses = [...]time.Duration{25 * time.Millisecond, 75 * time.Millisecond}

const (
	atOnce  = 150 * time.Millisecond // with the pauses
	notLong = time.Second
)

// gather has each partition answered by one node, and returns those that none answered in time.
func (s *Scatter) gather(ctx context.Context, wanted []Wanted, g gathering) (missing []events.Partition, err error) {
	begun := s.now()
	for i := 0; ; i++ {
		if missing, err = s.once(ctx, wanted, g); err != nil {
			return nil, err
		}
		if lost := s.lost(wanted, missing); !lost || i == len(pauses) || s.now()-begun > atOnce ||
			!pause(ctx, pauses[i]) {
			break
		}
		view := s.cfg.View()
		wanted = make([]Wanted, len(missing))
		for i, p := range missing {
			wanted[i] = Wanted{Partition: p, Serving: view.Serving(p), Fit: view.Fit(p)}
		}
	}
	if len(missing) > 0 {
		s.cfg.Hooks.Missing(g.op(), len(missing))
	}
	return missing, nil
}

// pause waits; false says that ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// lost notes which of the wanted partitions are missing, and reports whether some are, and none has been for long.
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

// once is gather, with each node asked once at most.
func (s *Scatter) once(ctx context.Context, wanted []Wanted, g gathering) (missing []events.Partition, err error) {
	now := s.now()
	left := s.cfg.Deadline
	if deadline, has := ctx.Deadline(); has {
		left = time.Until(deadline)
	}
	// The answer must travel too, and those of the others must be here before.
	margin := min(left/10, 50*time.Millisecond)
	cancel := func() {}
	if g.patient() { // somebody waits here, and is to be told when nobody waits for him
		ctx, cancel = context.WithCancel(ctx)
	}
	c := &call{
		s: s, ctx: ctx, cancel: cancel, g: g, margin: margin, until: now + left - margin,
		round: NewRound(s.peers, s.cfg.Self, now+left-margin, g.patient()), box: s.boxes.Get().(*mailbox),
	}
	defer c.end()
	c.send(c.round.Begin(now, wanted))
	timer := c.box.timer
	defer timer.Stop()
	for c.fatal == nil && !c.round.Done() {
		timer.Reset(c.round.Next() - s.now())
		select {
		case <-c.box.bell:
			for _, m := range c.mail() {
				c.take(m)
			}
		case <-timer.C:
			c.send(c.round.Tick(s.now()))
		case <-ctx.Done():
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return nil, ctx.Err()
			}
			c.round.Tick(c.until) // this goroutine was held up
		}
	}
	missing = c.round.Missing()
	if n := c.round.Withheld; n > 0 {
		s.cfg.Hooks.Withheld(n)
	}
	switch {
	case c.fatal != nil:
		return nil, c.fatal
	case c.behind != nil && len(missing) > 0:
		return nil, c.behind
	}
	return missing, nil
}

// call is one gathering under way. One goroutine owns it.
type call struct {
	s      *Scatter
	ctx    context.Context
	cancel context.CancelFunc
	g      gathering
	round  *Round
	until  time.Duration
	margin time.Duration
	box    *mailbox
	queue  []Ask
	out    []uint64   // flights
	fatal  *api.Error // nobody could answer
	behind *api.Error // somebody waited in vain
	away   sync.WaitGroup
}

// send sends requests, and those that follow from failing to. What this node is to answer comes last: the others are at
// work meanwhile.
func (c *call) send(asks []Ask) {
	for c.queue = append(c.queue[:0], asks...); len(c.queue) > 0 && c.fatal == nil; {
		i := max(0, slices.IndexFunc(c.queue, func(a Ask) bool { return a.Node != c.s.cfg.Self }))
		a := c.queue[i]
		c.queue = slices.Delete(c.queue, i, i+1)
		switch {
		case a.Node != c.s.cfg.Self:
			if err := c.fly(a); err != nil {
				c.queue = append(c.queue, c.failed(a.ID, err)...)
			}
		case c.g.patient():
			ctx, cancel := context.WithTimeout(c.ctx, c.until-c.margin-c.s.now())
			c.away.Go(func() {
				defer cancel()
				r := c.g.here(ctx, a.Partitions)
				c.s.mu.Lock()
				defer c.s.mu.Unlock()
				c.box.put(mail{ask: a.ID, reply: &r})
			})
		default:
			c.queue = append(c.queue, c.settle(a.ID, c.g.here(c.ctx, a.Partitions))...)
		}
	}
}

// fly sends a request to another node.
func (c *call) fly(a Ask) *api.Error {
	s := c.s
	body, err := c.g.body(a.Partitions)
	if err != nil {
		return api.Errorf(api.CodeInternal, "encode the request: %v", err)
	}
	now := s.now()
	s.mu.Lock()
	if len(s.flights) >= s.cfg.MaxFlights {
		for id, f := range s.flights {
			if now > f.expires {
				delete(s.flights, id)
			}
		}
	}
	if len(s.flights) >= s.cfg.MaxFlights {
		s.mu.Unlock()
		return api.Errorf(api.CodeBusy, "%d requests wait for other nodes", s.cfg.MaxFlights)
	}
	s.last++
	id := s.last
	s.flights[id] = flight{node: a.Node, ask: a.ID, sent: now, expires: c.until, patient: c.g.patient(), box: c.box}
	s.mu.Unlock()
	c.out = append(c.out, id)
	s.cfg.Hooks.Asked(a.Kind)
	if err := s.transport.Ask(id, a.Node, c.g.op(), max(c.until-c.margin-now, time.Millisecond), body); err != nil {
		s.mu.Lock()
		delete(s.flights, id)
		s.mu.Unlock()
		e := failure(err)
		s.cfg.Hooks.Replied(string(e.Code), 0)
		return e
	}
	return nil
}

// take is given what comes back, from any goroutine.
func (s *Scatter) take(id uint64, body []byte, err *api.Error) {
	now := s.now()
	s.mu.Lock()
	f, known := s.flights[id]
	delete(s.flights, id)
	if known && f.box != nil {
		f.box.put(mail{ask: f.ask, body: body, err: err})
	}
	s.mu.Unlock()
	if !known {
		return
	}
	outcome := "ok"
	if err != nil {
		outcome = string(err.Code)
	} else if f.box == nil && !f.patient { // nobody waits, but the node lives
		s.peers.Answered(f.node, now-f.sent)
	}
	s.cfg.Hooks.Replied(outcome, now-f.sent)
}

// put is called with Scatter.mu held.
func (b *mailbox) put(m mail) {
	b.list = append(b.list, m)
	select {
	case b.bell <- struct{}{}:
	default:
	}
}

// mail takes what has arrived.
func (c *call) mail() []mail {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	list := c.box.list
	c.box.list, c.box.spare = c.box.spare[:0], list
	return list
}

// take deals with one reply.
func (c *call) take(m mail) {
	if c.fatal != nil {
		return
	}
	r := reply{}
	switch {
	case m.reply != nil:
		r = *m.reply
	case m.err == nil:
		r = c.g.decode(m.body)
	case Verdict(m.err):
		r.verdict, r.not = m.err, m.err.Missing
	default:
		r.err = m.err
	}
	c.send(c.settle(m.ask, r))
}

// settle tells the round of a reply.
func (c *call) settle(id int, r reply) []Ask {
	if r.err != nil {
		return c.failed(id, r.err)
	}
	taken, asks := c.round.Answer(c.s.now(), id, r.not)
	if len(taken) > 0 {
		c.g.add(taken, r)
	}
	return asks
}

// failed tells the round of a failure.
func (c *call) failed(id int, err *api.Error) []Ask {
	switch err.Code {
	case api.CodeTooLarge:
		c.fatal = err
		return nil
	case api.CodeBehind:
		c.behind = err
	}
	return c.round.Fail(c.s.now(), id, err.Code != api.CodeBehind && err.Code != api.CodeBusy)
}

// end lets go of everything. Replies that come later are for the nodes' times alone.
func (c *call) end() {
	c.round.End(c.s.now())
	c.cancel()
	c.away.Wait()
	c.s.mu.Lock()
	for _, id := range c.out {
		if f, waits := c.s.flights[id]; waits {
			f.box = nil
			c.s.flights[id] = f
		}
	}
	clear(c.box.list[:cap(c.box.list)]) // bodies are held by nobody
	clear(c.box.spare[:cap(c.box.spare)])
	c.box.list, c.box.spare = c.box.list[:0], c.box.spare[:0]
	select {
	case <-c.box.bell:
	default:
	}
	c.s.mu.Unlock()
	c.s.boxes.Put(c.box)
}
