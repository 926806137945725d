package scatter

import (
	"context"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// What becomes of a query that was forwarded, for Metrics.Forwarded: the first is an answer, and after the others
// the origin answers itself.
const (
	ForwardAnswered = "answered" // the finisher has answered
	ForwardDeclined = "declined" // the finisher could not give a complete answer, and said so
	ForwardHedged   = "hedged"   // the finisher was slow
	ForwardGivenUp  = "given_up" // nothing was heard of it
	ForwardUnsent   = "unsent"   // it could not be sent
)

// maxForwards bounds the forwards of which nothing was heard yet. Beyond, queries are scattered.
const maxForwards = 4096

// Forward is a query, with this node's share of its answer, that another node is to finish.
type Forward struct {
	s       *Scatter
	ctx     context.Context // for its trace
	id      uint64
	node    string
	body    []byte
	lacking int  // partitions that the finisher is to look at
	others  bool // some of these can be asked of a third node too
	until   time.Duration
	margin  time.Duration

	// The rest is set by Send, and from then on the table's.
	span   tracing.Span
	phase  phase
	sent   time.Duration
	slow   time.Duration // when a hedge is due: a report may be held for a while, and its timer go off late
	giveUp time.Duration
	ended  func(summary *api.Answer, late time.Duration)
}

// phase is how far a forward has come. One of which the finisher has reported is in no table.
type phase uint8

const (
	awaited   phase = iota + 1 // a hedge will be due
	unhedged                   // there is no hedge: the budget denied it, or nobody else could be asked
	overtaken                  // the origin answers itself: a report only tells how long the finisher takes
)

// Forward prepares a query for being forwarded to a node that finishes it: one that has all partitions that this one
// lacks. It returns nil if the query is to be answered here ([Scatter.Find]): no such node is known, this node's share
// is not complete, or the shared store is to be asked. contentType is what the answer is to be in.
func (s *Scatter) Forward(ctx context.Context, contentType string, q *api.Query) *Forward {
	if s.cfg.Forward == nil || q.Explain || q.Diagnostic || q.Raw || q.Text != nil || q.Ranks != nil ||
		q.Endpoints != nil || q.WithEndpoint || q.ByEndpoint || q.Hashed != nil || q.Partitions != nil || len(q.MinSeq) > 0 {
		return nil
	}
	view, now := s.cfg.View(), s.now()
	if view == nil {
		return nil
	}
	wanted, all := s.plan(view, q)
	if all {
		return nil
	}
	left := defaultDeadline
	if deadline, has := ctx.Deadline(); has {
		left = time.Until(deadline)
	}
	if left < 10*reportWithin { // this node might give up before it hears of the answer
		return nil
	}
	var own []events.Partition
	var lacking []Wanted
	for _, w := range wanted {
		switch {
		case s.keeps(w.Serving, w.Fit):
			own = append(own, w.Partition)
		case !view.MayServe(w.Partition, q.Model): // then nobody is known to have the model, and all are asked
			return nil
		default:
			lacking = append(lacking, w)
		}
	}
	f := &Forward{s: s, ctx: ctx, node: s.finisher(view, lacking, now), lacking: len(lacking)}
	if f.node == "" || !s.forwards.room() {
		return nil
	}
	share := *q
	share.L3, share.L3TimeoutMS = api.L3Off, 0
	hashedFor := uint32(0)
	if q.Tokens != nil {
		known := s.recall(readingKey{q.Model, q.BlockSize})
		if hashedFor = known.blockSize; hashedFor == 0 {
			return nil
		}
		begun := time.Now()
		var err error
		if share.Hashed, err = known.hash(q); err != nil {
			return nil
		}
		s.cfg.Metrics.Stage(ctx, StageHash, time.Since(begun))
		share.Tokens, share.LoRA, share.CacheSalt, share.Media = nil, "", "", nil
	}
	mine := &api.Answer{}
	if len(own) > 0 {
		share.Partitions = own
		var err error
		if mine, err = s.cfg.Local.Find(ctx, &share); err != nil || !mine.Complete {
			return nil
		}
	}
	if question := s.askStore(q, max(mine.BlockSize, hashedFor)); question != nil {
		if question.Asked() {
			return nil
		}
		question.Merge(ctx, mine) // says only why nothing is asked
	}
	share.Partitions = list(lacking)
	f.others = slices.ContainsFunc(lacking, func(w Wanted) bool {
		return slices.ContainsFunc(w.Serving, func(node string) bool { return node != f.node && node != s.cfg.Self })
	})
	f.margin = min(left/10, 50*time.Millisecond)
	f.until = now + left - f.margin
	f.id = s.forwards.next()
	var err error
	f.body, err = appendForwarded(&Forwarded{Origin: s.cfg.Self, ID: f.id, ContentType: contentType,
		hashedFor: hashedFor}, &share, mine)
	if err != nil {
		return nil
	}
	return f
}

// finisher chooses who is to finish a query: a fit node of one of the partitions that are lacking, another one each
// time, that is as fit for all others; empty if there is none.
func (s *Scatter) finisher(view View, lacking []Wanted, now time.Duration) string {
	if len(lacking) == 0 {
		return ""
	}
	first := &lacking[s.peers.next()%uint(len(lacking))]
	for _, node := range first.Serving[:min(first.Fit, len(first.Serving))] {
		if view.Finishes(node) && s.peers.finishes(node, now) &&
			!slices.ContainsFunc(lacking, func(w Wanted) bool {
				return !slices.Contains(w.Serving[:min(w.Fit, len(w.Serving))], node)
			}) {
			return node
		}
	}
	return ""
}

// Send sends the query. The finisher sends its answer to the subject reply, where somebody waits for it. ended is
// called once, from another goroutine or from whoever hands over reports: with a summary of the answer that was given,
// and how long ago that was, as the finisher says; or with nil if none was, and this node is to answer. In rare cases
// there are two answers.
func (f *Forward) Send(reply string, ended func(summary *api.Answer, late time.Duration)) {
	s, now := f.s, f.s.now()
	trace := ""
	ctx, span := tracing.Ask(f.ctx, "peer")
	if span.On() {
		span.Set(attribute.String("kvatlas.node", f.node), attribute.String("kvatlas.peer.kind", Forwarding.String()),
			attribute.Int("kvatlas.partitions", f.lacking))
		trace = rpc.Traceparent(ctx)
	}
	f.span, f.ended, f.phase, f.sent = span, ended, awaited, now
	f.slow = now + s.peers.sent(f.node, now, Forwarding) + 2*reportWithin
	f.giveUp = now + min(giveUpAfter, (f.until-now)/2)
	if !f.others {
		f.phase = unhedged
	}
	s.cfg.Metrics.Asked(Forwarding.String())
	s.forwards.add(now, f)
	err := s.cfg.Forward(f.node, max(f.until-f.margin-now, time.Millisecond), trace, reply, f.body)
	f.body = nil // the forward is kept for longer
	if err == nil {
		return
	}
	e := s.replied(rpc.Reply{Err: err}, 0)
	if s.forwards.take(f.id) == nil || f.phase == overtaken { // its time came first
		return
	}
	f.span.Fail(string(e.Code), true)
	s.answerHere(f, ForwardUnsent)
}

// answerHere has this node answer a query that it had forwarded.
func (s *Scatter) answerHere(f *Forward, why string) {
	s.cfg.Metrics.Forwarded(why)
	f.span.End()
	ended := f.ended
	f.ended = nil // it holds the request, and the forward may be kept
	go ended(nil, 0)
}

// Finished takes a finisher's reports ([Reports]), one after the other. What is not whole, or of a version that is not
// known, is as if it was lost.
func (s *Scatter) Finished(reports []byte) {
	for r := (msgp.Reader{Data: reports}); r.Left() > 0; {
		report, ok := readReport(&r)
		if !ok {
			return
		}
		if f := s.forwards.take(report.id); f != nil {
			s.finished(f, &report)
		}
	}
}

func (s *Scatter) finished(f *Forward, r *report) {
	now := s.now()
	took := max(now-f.sent-r.waited, 0)
	s.peers.Answered(f.node, took)
	s.cfg.Metrics.Replied(r.outcome, took)
	if f.phase == overtaken {
		return
	}
	summary := &api.Answer{}
	switch {
	case r.outcome != api.OutcomeOK:
		if !Verdict(&api.Error{Code: api.Code(r.outcome)}) {
			s.peers.Declined(f.node, now)
		}
		f.span.Fail(r.outcome, false)
		s.answerHere(f, ForwardDeclined)
	case api.Unmarshal(api.MsgPack, r.summary, summary) != nil:
		s.answerHere(f, ForwardDeclined) // it is answered twice
	default:
		s.cfg.Metrics.Forwarded(ForwardAnswered)
		f.span.End()
		f.ended(summary, r.waited)
	}
}

// tickForwards has this node answer what was forwarded to nodes that are slow. The timer calls it.
func (s *Scatter) tickForwards() {
	due, denied := s.forwards.tick(s.now(), s.peers)
	if denied > 0 {
		s.cfg.Metrics.HedgesDenied(denied)
	}
	for _, f := range due {
		f.span.Fail("not_awaited", false)
		why := ForwardHedged
		if s.now() >= f.giveUp {
			why = ForwardGivenUp
		}
		s.answerHere(f, why)
	}
}

// forwards are the queries of this node that others are to finish, until they report. Any goroutine may use it. Its
// timer goes off when the first is due, or before: forwards that have been reported meanwhile do not set it back.
type forwards struct {
	mu    sync.Mutex
	last  uint64
	list  map[uint64]*Forward
	timer *time.Timer
	wake  time.Duration // when the timer goes off; 0: it is not set
}

// room reports whether there may be one more.
func (t *forwards) room() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.list) < maxForwards
}

// next returns the next number.
func (t *forwards) next() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last++
	return t.last
}

func (t *forwards) add(now time.Duration, f *Forward) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list[f.id] = f
	t.set(now, f.due())
}

// take removes a forward, and returns it if it was there.
func (t *forwards) take(id uint64) *Forward {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.list[id]
	delete(t.list, id)
	return f
}

// due is when something is to be done about a forward.
func (f *Forward) due() time.Duration {
	switch f.phase {
	case awaited:
		return min(f.slow, f.giveUp)
	case unhedged:
		return f.giveUp
	}
	return f.until
}

// set has the timer go off at a time, if it does not before.
func (t *forwards) set(now, at time.Duration) {
	if t.wake == 0 || at < t.wake {
		t.wake = at
		t.timer.Reset(at - now)
	}
}

// tick goes on to now. It returns the forwards that this node is now to answer itself, and how many hedges were due and
// beyond the budget.
func (t *forwards) tick(now time.Duration, peers *Peers) (due []*Forward, denied int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.wake = 0
	next := time.Duration(0)
	for id, f := range t.list {
		switch {
		case f.phase == overtaken:
			if now >= f.until {
				delete(t.list, id)
				continue
			}
		case now >= f.giveUp, f.phase == awaited && now >= f.slow && peers.hedges.Spend():
			peers.Penalise(f.node, now)
			f.phase = overtaken
			due = append(due, f)
		case f.phase == awaited && now >= f.slow:
			f.phase = unhedged
			denied++
		}
		if at := f.due(); next == 0 || at < next {
			next = at
		}
	}
	if next > 0 {
		t.set(now, next)
	}
	return due, denied
}
