package server

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/index/scatter"
	"github.com/kvatlas/kvatlas/internal/operate/funnel"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// The last part of a node's subjects for forwarded queries.
const (
	opForward  = "forward"  // a query to the finishing node; the reply goes to the client
	opFinished = "finished" // reports from the finishing node to the origin
	opDeliver  = "deliver"  // an answer that the origin delivers, because the finishing node cannot reach the client
	opUnheard  = "unheard"  // reports of the NATS server to the finishing node about answers without a receiver
)

// findOverNATS returns the handler of queries, which answers queries or forwards them to other nodes.
func (v *service) findOverNATS(handler api.Handler) jetstream.Handler {
	s, here := v.s, overNATS(handler, ops.Find)
	return func(ctx context.Context, r jetstream.Request) jetstream.Response {
		contentType, known := api.ContentType(r.ContentType)
		if !known || !r.MayForward() {
			return here(ctx, r)
		}
		begun := time.Now()
		q, err := handler.ReadQuery(contentType, r.Body)
		if err != nil {
			return here(ctx, r) // replies with the error
		}
		limited, done := q.Bounded(ctx)
		defer done()
		q.DeadlineMS = 0 // the context carries the deadline to other nodes
		var f *scatter.Forward
		if s.mayForward(q) {
			f = s.scatter.Forward(limited, contentType, q)
		}
		if f == nil {
			return answerQuery(limited, handler, contentType, q, begun)
		}
		return jetstream.Response{Later: func(answer func(jetstream.Response)) {
			f.Send(r.Reply, func(summary *api.Answer, late time.Duration) {
				if summary != nil {
					s.queries.Observe(ops.Find, ops.OK, time.Since(begun)-late)
					s.account(ctx, q, summary)
					answer(jetstream.Response{Elsewhere: true, Outcome: ops.OK})
					return
				}
				// The finisher does not answer. The query's own deadline does not restart.
				if until, limit := limited.Deadline(); limit {
					again, cancel := context.WithDeadline(ctx, until)
					defer cancel()
					ctx = again
				}
				answer(answerQuery(ctx, handler, contentType, q, begun))
			})
		}}
	}
}

// answerQuery answers a query on this node. begun is the time of its arrival.
func answerQuery(ctx context.Context, handler api.Handler, contentType string, q *api.Query,
	begun time.Time) jetstream.Response {
	reply, failure := handler.AnswerQuery(ctx, contentType, q, begun)
	return natsReply(contentType, reply, failure)
}

// mayForward reports whether another node may finish a query. This node answers queries that need a shared store or
// guesses.
func (s *Server) mayForward(q *api.Query) bool {
	return s.admit() == nil && !s.guesses.Any(q.Model) && (q.L3 == api.L3Off || !s.node.SharesStore(q.Model))
}

// serveForwards serves forwarded queries of other nodes, and reports about this node's forwarded queries.
func (v *service) serveForwards() error {
	s := v.s
	on := map[string]string{}
	for _, op := range []string{opForward, opFinished, opDeliver, opUnheard} {
		subject, err := jetstream.Names(s.Namespace).Node(s.ID, op)
		if err != nil {
			return err
		}
		on[op] = subject
	}
	f := &finisher{server: s, reports: scatter.NewReports(s.report), unheard: unheard{subject: on[opUnheard] + "."}}
	for subject, heard := range map[string]func(jetstream.Request){
		on[opFinished]:       func(r jetstream.Request) { s.scatter.Finished(r.Body) },
		on[opDeliver]:        s.deliver,
		on[opUnheard] + ".*": f.redeliver,
	} {
		stop, err := s.Conn.Subscribe(subject, heard)
		if err != nil {
			return err
		}
		v.stops = append(v.stops, stop)
	}
	cfg := v.config("kvatlas-forwarded", api.FromNodes)
	cfg.Forwarded = true
	cfg.Refuse = func(r jetstream.Request, code int, why string) jetstream.Response {
		return f.decline(r, api.Refusal(code, why))
	}
	cfg.Endpoints = []jetstream.Endpoint{{Name: opForward, Subject: on[opForward],
		Handler: s.tracedNATS(opForward, api.FromNodes, f.finish)}}
	service, err := jetstream.Serve(s.Conn, cfg)
	if err == nil {
		v.own = append(v.own, service)
		v.stops = append(v.stops, f.reports.Flush)
	}
	return err
}

// finisher answers forwarded queries of other nodes.
type finisher struct {
	server  *Server
	reports *scatter.Reports
	unheard unheard
}

// finish sends the answer to the client, and then a report to the origin.
func (f *finisher) finish(ctx context.Context, r jetstream.Request) jetstream.Response {
	begun := time.Now()
	query, err := scatter.ReadForwarded(r.Body)
	if err != nil {
		return jetstream.Response{Elsewhere: true, Outcome: string(api.CodeMalformed)}
	}
	a, body, err := f.answer(ctx, query)
	if err != nil {
		e := api.AsError(err)
		f.server.queries.Observe("own_"+opForward, e.Outcome(), time.Since(begun))
		return f.decline(r, e)
	}
	f.server.queries.Observe("own_"+opForward, ops.OK, time.Since(begun))
	return jetstream.Response{
		ContentType: query.ContentType, Body: body, Outcome: ops.OK,
		Undelivered: f.unheard.keep(query, r.Reply, body),
		Sent: func(err error) {
			if err != nil {
				f.reports.Add(query, nil, api.Errorf(api.CodeUnavailable, "%v", err))
				return
			}
			f.reports.Add(query, summary(a), nil)
		},
	}
}

// answer returns the answer to a forwarded query with its encoding.
func (f *finisher) answer(ctx context.Context, query *scatter.Forwarded) (*api.Answer, []byte, error) {
	s := f.server
	if err := s.admit(); err != nil {
		return nil, nil, err
	}
	q, a, err := s.scatter.Finish(ctx, query)
	if err != nil {
		return nil, nil, err
	}
	if s.guesses.Any(q.Model) {
		return nil, nil, api.Errorf(api.CodeUnavailable, "there are guesses of %q", q.Model)
	}
	s.registry.MarkAnswer(a)
	traceAnswer(ctx, q, a)
	body, err := api.Marshal(query.ContentType, a)
	return a, body, err
}

// decline reports to the origin that the origin must answer the query.
func (f *finisher) decline(r jetstream.Request, why *api.Error) jetstream.Response {
	if query, err := scatter.ReadForwarded(r.Body); err == nil {
		f.reports.Add(query, nil, why)
	}
	return jetstream.Response{Elsewhere: true, Outcome: why.Outcome()}
}

// report sends the results of forwarded queries to their origin.
func (s *Server) report(origin string, reports []byte) {
	if subject, err := jetstream.Names(s.Namespace).Node(origin, opFinished); err == nil {
		_ = s.Conn.Send(subject, "", reports)
	}
}

// summary reduces an answer to the counted parts: the first worker, and the first worker with the longest prefix.
func summary(a *api.Answer) *api.Answer {
	out := *a
	out.Partitions = nil
	out.L3.Ranges, out.L3.Unknown, out.L3.Broken = nil, nil, nil
	if len(a.Workers) < 2 {
		return &out
	}
	deepest, depth := 0, uint32(0)
	for i := range a.Workers {
		if d := tiers(&a.Workers[i]).Blocks(); d > depth {
			deepest, depth = i, d
		}
	}
	if out.Workers = a.Workers[:1:1]; deepest > 0 {
		out.Workers = append(out.Workers, a.Workers[deepest])
	}
	return &out
}

// tiers returns a rank's blocks of a prompt in the funnel's form.
func tiers(o *api.Overlap) funnel.Tiers {
	return funnel.NewTiers(max(o.Device, o.Guessed), o.Host, o.Disk, o.External)
}

// unheard keeps the last answers to forwarded queries while the NATS server may still report a missing receiver. The
// client's NATS server may have no connection to this node's server. The origin's server has one.
type unheard struct {
	subject string // ends in '.', and is followed by the answer's number

	mu   sync.Mutex
	last uint64
	ring [64]undelivered
}

type undelivered struct {
	number                     uint64
	origin, reply, contentType string
	body                       []byte
}

// maxUnheard is the maximum size of a kept answer.
const maxUnheard = 64 << 10

// keep keeps an answer, unless the answer is large, and returns the subject for the report of a missing receiver.
func (u *unheard) keep(f *scatter.Forwarded, reply string, body []byte) (subject string) {
	if len(body) > maxUnheard {
		return ""
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.last++
	u.ring[u.last%uint64(len(u.ring))] = undelivered{u.last, f.Origin, reply, f.ContentType, body}
	return u.subject + strconv.FormatUint(u.last, 36)
}

// remove removes and returns an answer. kept is false if a later answer has replaced it.
func (u *unheard) remove(subject string) (a undelivered, kept bool) {
	n, err := strconv.ParseUint(strings.TrimPrefix(subject, u.subject), 36, 64)
	if err != nil {
		return a, false
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	at := &u.ring[n%uint64(len(u.ring))]
	if n == 0 || at.number != n {
		return a, false
	}
	a, *at = *at, undelivered{}
	return a, true
}

// redeliver sends an undeliverable answer to the origin, which delivers the answer.
func (f *finisher) redeliver(r jetstream.Request) {
	a, kept := f.unheard.remove(r.Subject)
	if !kept {
		return
	}
	b := msgp.AppendArrayHead(make([]byte, 0, len(a.body)+len(a.reply)+len(a.contentType)+16), 3)
	b = msgp.AppendStr(b, a.reply)
	b = msgp.AppendStr(b, a.contentType)
	b = append(msgp.AppendBinHead(b, len(a.body)), a.body...)
	if subject, err := jetstream.Names(f.server.Namespace).Node(a.origin, opDeliver); err == nil {
		_ = f.server.Conn.Send(subject, "", b) // after a loss, the client retries
	}
}

// deliver sends an answer to a client that the finisher cannot reach.
func (s *Server) deliver(r jetstream.Request) {
	in := msgp.Reader{Data: r.Body}
	n, is := in.Array()
	reply, isReply := in.Str()
	contentType, isType := in.Str()
	body, isBody := in.Bin()
	if !is || n < 3 || !isReply || !isType || !isBody || !jetstream.ReplyAllowed(string(reply)) {
		return
	}
	s.queries.Forwarded("redelivered")
	_ = s.Conn.Send(string(reply), string(contentType), body)
}

// forward sends a query to the finishing node.
func (s *Server) forward(node string, patience time.Duration, trace, reply string, body []byte) error {
	subject, err := jetstream.Names(s.Namespace).Node(node, opForward)
	if err != nil {
		return api.Errorf(api.CodeInternal, "%v", err)
	}
	return s.Conn.Forward(subject, api.MsgPack, patience, trace, reply, body)
}
