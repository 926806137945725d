package scatter

import (
	"context"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Results of a forwarded query, for Metrics.Forwarded. After all results but the first, the origin answers itself.
const (
	ForwardAnswered = "answered" // the finisher has answered
	ForwardDeclined = "declined" // the finisher reported an incomplete answer
	ForwardHedged   = "hedged"   // the finisher was slow
	ForwardGivenUp  = "given_up" // no report arrived
	ForwardUnsent   = "unsent"   // the send failed
)

// maxForwards bounds the forwards without a report. Further queries are scattered.
const maxForwards = 4096

// Forward is a query with this node's share of the answer, to be finished by another node.
type Forward struct {
	s       *Scatter
	ctx     context.Context // for its trace
	id      uint64
	node    string
	body    []byte
	lacking int  // number of the finisher's partitions
	others  bool // a third node serves some of these too
	until   time.Duration
	margin  time.Duration

	// Send sets the remaining fields, which the table then owns.
	span   tracing.Span
	phase  phase
	sent   time.Duration
	slow   time.Duration // time of the hedge, later than usual: a report may wait, and its timer may be late
	giveUp time.Duration
	ended  func(summary *api.Answer, late time.Duration)
}

// phase is the phase of a forward in the table. A report removes the forward.
type phase uint8

const (
	awaited   phase = iota + 1 // a hedge will be due
	unhedged                   // no hedge: denied by the budget, or no other node
	overtaken                  // the origin answers; a report only updates the finisher's reply time
)

// forwardable reports whether a query has only fields that a finisher can serve.
func forwardable(q *api.Query) bool {
	return !q.Explain && !q.Diagnostic && !q.Regions && !q.WithEngineHashes && !q.Raw && q.Text == nil && q.Ranks == nil &&
		q.Endpoints == nil && !q.WithEndpoint && !q.ByEndpoint && q.Hashed == nil && q.Partitions == nil &&
		len(q.MinSeq) == 0
}

// Forward prepares a query for a node with all partitions that this node lacks. The result is nil if the query must be
// answered here ([Scatter.Find]): no suitable node is known, this node's share is incomplete, or the shared store must
// be queried. contentType is the content type of the answer.
func (s *Scatter) Forward(ctx context.Context, contentType string, q *api.Query) *Forward {
	if s.cfg.Forward == nil || !forwardable(q) {
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
	left := ops.Deadline
	if deadline, has := ctx.Deadline(); has {
		left = time.Until(deadline)
	}
	if left < 10*reportWithin { // this node might give up before the report arrives
		return nil
	}
	own, lacking, ok := s.divide(view, wanted, q.Model)
	if !ok {
		return nil
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
		question.Merge(ctx, mine) // adds only the reason for no question
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

// divide returns the partitions that this node has, and the partitions that it lacks. It returns false if no node may
// serve a partition: the model may be unknown here, and all nodes are needed.
func (s *Scatter) divide(view View, wanted []Wanted, model string) (own []events.Partition, lacking []Wanted, ok bool) {
	for _, w := range wanted {
		switch {
		case s.keeps(w.Serving, w.Fit):
			own = append(own, w.Partition)
		case !view.MayServe(w.Partition, model):
			return nil, nil, false
		default:
			lacking = append(lacking, w)
		}
	}
	return own, lacking, true
}

// finisher returns a finisher: a fit node of one of the missing partitions, in turn, that is fit for all missing
// partitions; empty if there is none.
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

// Send sends the query. The finisher sends the answer to the subject reply. ended is called once, from another
// goroutine or from the caller of Finished: with a summary of the answer and its age by the finisher's report, or with
// nil if this node must answer. In rare cases there are two answers.
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
	f.body = nil // the forward may stay in the table
	if err == nil {
		return
	}
	e := s.replied(rpc.Reply{Err: err}, 0)
	if s.forwards.remove(f.id) == nil || f.phase == overtaken { // its time came first
		return
	}
	f.span.Fail(string(e.Code), true)
	s.answerHere(f, ForwardUnsent)
}

// answerHere makes this node answer a forwarded query.
func (s *Scatter) answerHere(f *Forward, why string) {
	s.cfg.Metrics.Forwarded(why)
	f.span.End()
	ended := f.ended
	f.ended = nil // it refers to the request, and the forward may stay
	go ended(nil, 0)
}

// Finished applies a finisher's reports ([Reports]). Incomplete reports and unknown versions count as lost.
func (s *Scatter) Finished(reports []byte) {
	for r := (msgp.Reader{Data: reports}); r.Left() > 0; {
		report, ok := readReport(&r)
		if !ok {
			return
		}
		if f := s.forwards.remove(report.id); f != nil {
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
	case r.outcome != ops.OK:
		if !Verdict(&api.Error{Code: api.Code(r.outcome)}) {
			s.peers.Declined(f.node, now)
		}
		f.span.Fail(r.outcome, false)
		s.answerHere(f, ForwardDeclined)
	case api.Unmarshal(api.MsgPack, r.summary, summary) != nil:
		s.answerHere(f, ForwardDeclined) // the client gets two answers
	default:
		s.cfg.Metrics.Forwarded(ForwardAnswered)
		f.span.End()
		f.ended(summary, r.waited)
	}
}

// tickForwards makes this node answer queries with slow finishers. The timer calls it.
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

// forwards has the forwarded queries of this node until their reports, and is safe for concurrent use. The timer fires
// when the first query is due, or earlier: reports do not delay the timer.
type forwards struct {
	mu    sync.Mutex
	last  uint64
	list  map[uint64]*Forward
	timer *time.Timer
	wake  time.Duration // time of the timer; 0: not set
}

// room reports whether there is room for a further forward.
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

// remove removes and returns a forward; nil if missing.
func (t *forwards) remove(id uint64) *Forward {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.list[id]
	delete(t.list, id)
	return f
}

// due returns the time of the next action on a forward.
func (f *Forward) due() time.Duration {
	switch f.phase {
	case awaited:
		return min(f.slow, f.giveUp)
	case unhedged:
		return f.giveUp
	}
	return f.until
}

// set moves the timer to an earlier time.
func (t *forwards) set(now, at time.Duration) {
	if t.wake == 0 || at < t.wake {
		t.wake = at
		t.timer.Reset(at - now)
	}
}

// tick advances the time, and returns the forwards that this node must answer, and the number of hedges beyond the
// budget.
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
