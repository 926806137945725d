package recording

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Source has the stored batches. [jetstream.Recording] implements it.
type Source interface {
	Info(ctx context.Context) (jetstream.RecordingInfo, error)
	Next(ctx context.Context, from events.StreamSeq) (jetstream.RecordedBatch, error)
}

// Filter selects requests. The zero value selects all.
type Filter struct {
	Since, Until time.Time // of arrival, Until excluded; zero: no bound
	Model        string    // empty: all models
}

func (f *Filter) selects(r *Request) bool {
	return (f.Since.IsZero() || r.Time >= f.Since.UnixMilli()) && (f.Until.IsZero() || r.Time < f.Until.UnixMilli()) &&
		(f.Model == "" || r.Model == f.Model)
}

// Joined is a request with its end, its report and its answer. Their fields are valid with the flags Ended, Reported
// and Answered.
type Joined struct {
	Request
	End
	Report
	Answer Answer
	Node   string
	Flags
}

// Summary counts the read records.
type Summary struct {
	Batches, Requests, Ends, Reports, Answers uint64
	Dropped                                   uint64 // records that the nodes had to drop
	Unreadable                                uint64 // batches that are damaged or of a later build
	Why                                       error  // of the first unreadable batch
}

const (
	// late is the longest time from a request's arrival to its end or its report in the stream. Later records are not
	// joined.
	late = 30 * time.Minute

	// skew is the longest time by which the clock of a node may be ahead of the stream's.
	skew = time.Minute
)

// Read calls visit with the selected requests in order of arrival, each joined with its end, report and answer. It
// reads the batches up to the present end of the stream, and keeps the requests of [late] in memory. Unreadable batches
// are counted and skipped. An error of visit ends the reading.
func Read(ctx context.Context, from Source, f Filter, visit func(*Joined) error) (s Summary, err error) {
	info, err := from.Info(ctx)
	if err != nil {
		return s, err
	}
	seq := info.First
	if !f.Since.IsZero() {
		if seq, err = firstSince(ctx, from, info, f.Since.Add(-skew)); err != nil {
			return s, err
		}
	}
	flushed := time.Time{}
	j := joiner{links: map[Name]*Joined{}, filter: f, summary: &s}
	for seq <= info.Last {
		b, err := from.Next(ctx, seq)
		if errors.Is(err, jetstream.ErrNotFound) {
			break // trimmed meanwhile
		}
		if err != nil {
			return s, err
		}
		if seq = b.Seq + 1; b.Seq > info.Last || !f.Until.IsZero() && b.Time.After(f.Until.Add(late+skew)) {
			break
		}
		s.Batches++
		j.node = b.Node
		dropped, err := Decode(b.Data, j.add)
		if s.Dropped += dropped; err != nil {
			if s.Unreadable++; s.Why == nil {
				s.Why = fmt.Errorf("batch %d of node %q: %w", b.Seq, b.Node, err)
			}
		}
		if b.Time.Sub(flushed) < late/4 { // each flush sorts
			continue
		}
		flushed = b.Time
		if err := j.flush(b.Time.Add(-late).UnixMilli(), visit); err != nil {
			return s, err
		}
	}
	return s, j.flush(1<<62, visit)
}

// firstSince returns the sequence of the first batch that was stored at or after a time, by binary search.
func firstSince(
	ctx context.Context, from Source, info jetstream.RecordingInfo, at time.Time,
) (events.StreamSeq, error) {
	lo, hi := info.First, info.Last+1
	for lo < hi {
		mid := lo + (hi-lo)/2
		b, err := from.Next(ctx, mid)
		switch {
		case errors.Is(err, jetstream.ErrNotFound):
			hi = mid
		case err != nil:
			return 0, err
		case b.Time.Before(at):
			lo = max(mid, b.Seq) + 1
		default:
			hi = mid
		}
	}
	return lo, nil
}

// joiner joins the records of requests.
type joiner struct {
	filter  Filter
	summary *Summary
	node    string
	list    []*Joined // that wait for their ends
	links   map[Name]*Joined
	sorted  bool
}

func (j *joiner) add(r Record) error {
	switch {
	case r.Request != nil:
		j.summary.Requests++
		if !j.filter.selects(r.Request) {
			break
		}
		q := &Joined{Request: *r.Request, Node: j.node, Flags: r.Request.Flags &^ (Ended | Reported | Answered)}
		j.list, j.sorted = append(j.list, q), false
		if q.Request.Link != 0 {
			j.links[q.Request.Link] = q
		}
	case r.End != nil:
		j.summary.Ends++
		if q := j.links[r.End.Link]; q != nil && q.Flags&Ended == 0 {
			q.End, q.Flags = *r.End, q.Flags|Ended
		}
	case r.Report != nil:
		j.summary.Reports++
		if q := j.links[r.Report.Link]; q != nil {
			q.Report, q.Flags = *r.Report, q.Flags|Reported
		}
	case r.Answer != nil:
		j.summary.Answers++
		if q := j.links[r.Answer.Link]; q != nil {
			q.Answer, q.Flags = *r.Answer, q.Flags|Answered
		}
	}
	return nil
}

// flush passes on the requests before a time, in order of arrival.
func (j *joiner) flush(before int64, visit func(*Joined) error) error {
	if !j.sorted {
		slices.SortStableFunc(j.list, func(a, b *Joined) int { return int(a.Request.Time - b.Request.Time) })
		j.sorted = true
	}
	n := 0
	for ; n < len(j.list) && j.list[n].Request.Time < before; n++ {
		q := j.list[n]
		if j.links[q.Request.Link] == q {
			delete(j.links, q.Request.Link)
		}
		if err := visit(q); err != nil {
			return err
		}
	}
	clear(j.list[:n])
	j.list = j.list[n:]
	return nil
}
