package scatter

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/kvatlas/kvatlas/internal/msgp"
	"github.com/kvatlas/kvatlas/internal/tracing"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// What becomes of a query that was forwarded, as Hooks.Forwarded is told: the first is an answer, and after the others
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
	slow   time.Duration // when a hedge is due
	giveUp time.Duration
	ended  func(*api.Answer)
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
	if s.cfg.Forward == nil || q.Explain || q.Raw || q.Text != nil || q.Ranks != nil || q.Endpoints != nil ||
		q.WithEndpoint || q.ByEndpoint || q.Hashed != nil || q.Partitions != nil || len(q.MinSeq) > 0 {
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
		s.cfg.Hooks.Stage(ctx, StageHash, time.Since(begun))
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
	left := defaultDeadline
	if deadline, has := ctx.Deadline(); has {
		left = time.Until(deadline)
	}
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
// or with nil if none was, and this node is to answer. In rare cases there are two answers.
func (f *Forward) Send(reply string, ended func(summary *api.Answer)) {
	s, now := f.s, f.s.now()
	trace := ""
	ctx, span := tracing.Ask(f.ctx, "peer")
	if span.On() {
		span.Set(attribute.String("kvatlas.node", f.node), attribute.String("kvatlas.peer.kind", Forwarding.String()),
			attribute.Int("kvatlas.partitions", f.lacking))
		trace = rpc.Traceparent(ctx)
	}
	f.span, f.ended, f.phase, f.sent = span, ended, awaited, now
	f.slow = now + s.peers.sent(f.node, now, Forwarding)
	f.giveUp = now + min(giveUpAfter, (f.until-now)/2)
	if !f.others {
		f.phase = unhedged
	}
	s.cfg.Hooks.Asked(Forwarding)
	s.forwards.add(now, f)
	err := s.cfg.Forward(f.node, max(f.until-f.margin-now, time.Millisecond), trace, reply, f.body)
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
	s.cfg.Hooks.Forwarded(why)
	f.span.End()
	go f.ended(nil)
}

// Finished takes a finisher's report ([Forwarded.Report]).
func (s *Scatter) Finished(report []byte) {
	r := msgp.Reader{Data: report}
	n, is := r.Array()
	id, isID := r.Uint(1<<64 - 1)
	outcome, isText := r.Str()
	body, isBody := r.Bin()
	if !is || n < 3 || !isID || !isText || !isBody {
		return // of a version that is not known: it is as if it was lost
	}
	f := s.forwards.take(id)
	if f == nil {
		return
	}
	now := s.now()
	s.peers.Answered(f.node, now-f.sent)
	s.cfg.Hooks.Replied(string(outcome), now-f.sent)
	if f.phase == overtaken {
		return
	}
	summary := &api.Answer{}
	switch {
	case string(outcome) != api.OutcomeOK:
		if !Verdict(&api.Error{Code: api.Code(outcome)}) {
			s.peers.Declined(f.node, now)
		}
		f.span.Fail(string(outcome), false)
		s.answerHere(f, ForwardDeclined)
	case api.Unmarshal(api.MsgPack, body, summary) != nil:
		s.answerHere(f, ForwardDeclined) // it is answered twice
	default:
		s.cfg.Hooks.Forwarded(ForwardAnswered)
		f.span.End()
		f.ended(summary)
	}
}

// tickForwards has this node answer what was forwarded to nodes that are slow. The timer calls it.
func (s *Scatter) tickForwards() {
	due, denied := s.forwards.tick(s.now(), s.peers)
	if denied > 0 {
		s.cfg.Hooks.HedgesDenied(denied)
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

// Forwarded is a query that another node forwards.
type Forwarded struct {
	Origin      string // the node that forwards it
	ID          uint64 // by which the origin knows it
	ContentType string // of the answer

	hashedFor    uint32 // block size for which the tokens were hashed; 0: they were not
	query, share []byte // for the partitions that the origin lacks; the origin's answer for the others
}

// appendForwarded writes what [ReadForwarded] reads: an array, to whose end later versions may add.
func appendForwarded(f *Forwarded, query *api.Query, share *api.Answer) ([]byte, error) {
	q, err := api.Marshal(api.MsgPack, query)
	if err != nil {
		return nil, err
	}
	a, err := api.Marshal(api.MsgPack, share)
	if err != nil {
		return nil, err
	}
	b := make([]byte, 0, len(q)+len(a)+len(f.Origin)+len(f.ContentType)+32)
	b = msgp.AppendArrayHead(b, 6)
	b = msgp.AppendStr(b, f.Origin)
	b = msgp.AppendUint(b, f.ID)
	b = msgp.AppendStr(b, f.ContentType)
	b = msgp.AppendUint(b, uint64(f.hashedFor))
	b = append(msgp.AppendBinHead(b, len(q)), q...)
	return append(msgp.AppendBinHead(b, len(a)), a...), nil
}

// ReadForwarded reads what another node forwards. It keeps the body.
func ReadForwarded(body []byte) (*Forwarded, error) {
	r := msgp.Reader{Data: body}
	n, is := r.Array()
	origin, isOrigin := r.Str()
	id, isID := r.Uint(1<<64 - 1)
	form, isForm := r.Str()
	size, isSize := r.Uint(1<<32 - 1)
	query, isQuery := r.Bin()
	share, isShare := r.Bin()
	if !is || n < 6 || !isOrigin || !isID || !isForm || !isSize || !isQuery || !isShare {
		return nil, errors.New("this is no forwarded query")
	}
	return &Forwarded{Origin: string(origin), ID: id, ContentType: string(form), hashedFor: uint32(size), query: query,
		share: share}, nil
}

// Report is what the origin is to be told of a forwarded query: that it was answered, in summary, or, if there is an
// error, that it was not. The origin hands it to [Scatter.Finished].
func (f *Forwarded) Report(summary *api.Answer, failure *api.Error) []byte {
	var body []byte
	if failure == nil {
		var err error
		if body, err = api.Marshal(api.MsgPack, summary); err != nil {
			failure = api.Errorf(api.CodeInternal, "encode the summary: %v", err)
		}
	}
	b := msgp.AppendArrayHead(make([]byte, 0, len(body)+32), 3)
	b = msgp.AppendUint(b, f.ID)
	b = msgp.AppendStr(b, api.Outcome(failure))
	return append(msgp.AppendBinHead(b, len(body)), body...)
}

// Finish answers a query that another node forwards, from its share of the answer and this node's. The answer is
// complete. After an error the origin is to answer.
func (s *Scatter) Finish(ctx context.Context, f *Forwarded) (*api.Query, *api.Answer, error) {
	q, share := &api.Query{}, &api.Answer{}
	if err := errors.Join(api.Unmarshal(api.MsgPack, f.query, q), api.Unmarshal(api.MsgPack, f.share, share)); err != nil {
		return nil, nil, err
	}
	if err := s.check(q); err != nil {
		return nil, nil, err
	}
	u := NewUnion(q, s.cfg.PartitionOf)
	if len(share.Partitions) > 0 {
		theirs := make([]events.Partition, len(share.Partitions))
		for i := range theirs {
			theirs[i] = share.Partitions[i].Partition
		}
		u.Add(theirs, share, nil)
	}
	switch here := found(s.cfg.Local.Find(ctx, q)); {
	case here.err != nil:
		return nil, nil, here.err
	case len(here.not) > 0:
		return nil, nil, &api.Error{Code: api.CodeNotReady, Missing: here.not, Message: "this node does not serve them"}
	default:
		u.Add(q.Partitions, here.answer, here.verdict)
	}
	a, err := u.Answer(nil)
	if err != nil {
		return nil, nil, err
	}
	if f.hashedFor > 0 && !(reading{f.hashedFor, lookaheads(q)}).holds(reading{a.BlockSize, a.Lookaheads}) {
		return nil, nil, api.Errorf(api.CodeUnavailable, "the workers of %q hash otherwise than the origin did", q.Model)
	}
	a.Lookaheads, a.L3 = nil, share.L3
	a.Finish(q.Idle, a.Reason)
	return q, a, nil
}

// lookaheads are those with which a query was hashed.
func lookaheads(q *api.Query) (list []uint32) {
	for i := range q.Hashed {
		list = append(list, q.Hashed[i].Lookahead)
	}
	return list
}
