package scatter

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Forwarded is a query that another node has forwarded.
type Forwarded struct {
	Origin      string // the forwarding node
	ID          uint64 // the origin's number of the query
	ContentType string // of the answer

	hashedFor    uint32 // block size of the tokens' hashes; 0: the query has no tokens
	query, share []byte // for the partitions that the origin lacks; the origin's answer for the rest
}

// appendForwarded encodes the input of [ReadForwarded]: an array, to which later versions may append.
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

// ReadForwarded decodes a forwarded query. It keeps the body.
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
		return nil, errors.New("the message is no forwarded query")
	}
	return &Forwarded{Origin: string(origin), ID: id, ContentType: string(form), hashedFor: uint32(size), query: query,
		share: share}, nil
}

// Finish answers a forwarded query from the origin's share of the answer and this node's. The answer is complete. After
// an error, the origin must answer.
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
		return nil, nil, api.Errorf(api.CodeUnavailable, "the workers of %q hash differently than the origin", q.Model)
	}
	a.Lookaheads, a.L3 = nil, share.L3
	dropMemory(a)
	a.Finish(q.Idle, a.Reason)
	return q, a, nil
}

// lookaheads returns the lookaheads of a query's hashes.
func lookaheads(q *api.Query) (list []uint32) {
	for i := range q.Hashed {
		list = append(list, q.Hashed[i].Lookahead)
	}
	return list
}

const (
	reportWithin = 5 * time.Millisecond // longest wait of a report for further ones
	maxReports   = 64                   // waiting reports of an origin
)

// Reports sends origins the results of forwarded queries. A client has the answer by then, so reports to an origin
// within five milliseconds are one message. Reports is safe for concurrent use.
type Reports struct {
	send func(origin string, reports []byte)

	mu     sync.Mutex
	queued map[string][]queued // by origin
}

// queued is a waiting report, with its begin.
type queued struct {
	report
	since time.Time
}

// report is the result of a forwarded query.
type report struct {
	id      uint64
	outcome string        // "ok", or an error's code: then the origin must answer
	summary []byte        // of the answer
	waited  time.Duration // for further reports
}

// NewReports returns Reports that sends reports to their origins. The origins pass reports to [Scatter.Finished]. After
// the loss of a report, the origin answers too.
func NewReports(send func(origin string, reports []byte)) *Reports {
	return &Reports{send: send, queued: map[string][]queued{}}
}

// Add reports an answer by its summary, or a failure. Failures are sent at once.
func (r *Reports) Add(f *Forwarded, summary *api.Answer, failure *api.Error) {
	var body []byte
	if failure == nil {
		var err error
		if body, err = api.Marshal(api.MsgPack, summary); err != nil {
			failure = api.Errorf(api.CodeInternal, "encode the summary: %v", err)
		}
	}
	r.mu.Lock()
	list := append(r.queued[f.Origin], queued{report{id: f.ID, outcome: failure.Outcome(), summary: body}, time.Now()})
	r.queued[f.Origin] = list
	r.mu.Unlock()
	if failure != nil || len(list) >= maxReports {
		r.flush(f.Origin)
	} else if len(list) == 1 {
		time.AfterFunc(reportWithin, func() { r.flush(f.Origin) })
	}
}

// Flush sends all waiting reports.
func (r *Reports) Flush() {
	r.mu.Lock()
	origins := slices.Collect(maps.Keys(r.queued))
	r.mu.Unlock()
	for _, origin := range origins {
		r.flush(origin)
	}
}

func (r *Reports) flush(origin string) {
	r.mu.Lock()
	list := r.queued[origin]
	delete(r.queued, origin)
	r.mu.Unlock()
	if len(list) == 0 {
		return
	}
	var b []byte
	for i := range list {
		w := &list[i]
		w.waited = time.Since(w.since)
		b = appendReport(b, &w.report)
	}
	r.send(origin, b)
}

// appendReport encodes the input of readReport: an array, to which later versions may append.
func appendReport(b []byte, r *report) []byte {
	b = msgp.AppendArrayHead(b, 4)
	b = msgp.AppendUint(b, r.id)
	b = msgp.AppendStr(b, r.outcome)
	b = append(msgp.AppendBinHead(b, len(r.summary)), r.summary...)
	return msgp.AppendUint(b, uint64(r.waited/time.Microsecond))
}

// readReport decodes a report and keeps its bytes.
func readReport(in *msgp.Reader) (r report, ok bool) {
	n, is := in.Array()
	id, isID := in.Uint(1<<64 - 1)
	outcome, isText := in.Str()
	summary, isBin := in.Bin()
	waited, isTime := in.Uint(1<<32 - 1)
	if !is || n < 4 || !isID || !isText || !isBin || !isTime || !in.SkipN(n-4) {
		return report{}, false
	}
	return report{id, string(outcome), summary, time.Duration(waited) * time.Microsecond}, true
}
