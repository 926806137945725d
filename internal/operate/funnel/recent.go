package funnel

import (
	"cmp"
	"context"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// The stored requests of a model: the newest requests, and a sample of the last hour before them, up to
// api.MaxRecorded. The hashes of their blocks are bounded too.
const (
	maxRecentBlocks = 1 << 15
	newestKept      = 32
	recentFor       = time.Hour
)

// recent contains requests of a model, sorted by time.
type recent struct {
	list   []kept
	blocks int // number of stored block hashes
}

type kept struct {
	api.Recorded
	hashes []events.LocalHash
}

// add stores a request, and removes others to make room.
func (s *recent) add(r api.Recorded, locals []events.LocalHash) {
	k := kept{Recorded: r}
	if len(locals) <= maxRecentBlocks {
		k.hashes = slices.Clone(locals)
	}
	s.list, s.blocks = append(s.list, k), s.blocks+len(k.hashes)
	for r.At.Sub(s.list[0].At) > recentFor {
		s.forget(0)
	}
	for len(s.list) > api.MaxRecorded || s.blocks > maxRecentBlocks {
		s.forget(s.leastMissed())
	}
}

func (s *recent) forget(i int) {
	s.blocks -= len(s.list[i].hashes)
	s.list = slices.Delete(s.list, i, i+1)
}

// leastMissed returns the request to remove: without it, the gap is smallest relative to the age. The newest requests
// are exempt. Every minute of the last ones, and every ten minutes of the hour, keep some requests.
func (s *recent) leastMissed() (at int) {
	now, least := s.list[len(s.list)-1].At, math.Inf(1)
	for i := 1; i < len(s.list)-newestKept; i++ {
		gap := float64(s.list[i+1].At.Sub(s.list[i-1].At)) / float64(max(now.Sub(s.list[i].At), 1))
		if gap < least {
			at, least = i, gap
		}
	}
	return at
}

// keep stores a request. It stores no content of a prompt except hashes and numbers.
func (t *Tracker) keep(r *Request, p *prompt, asked uint64) {
	t.lastID = max(t.lastID+1, r.At.UnixNano())
	out := api.Recorded{ID: recordedID{t.lastID, t.cfg.Node}.String(), At: r.At.UTC(), Node: t.cfg.Node, Model: r.Model,
		BlockSize: r.BlockSize, ISLTokens: asked, Blocks: uint32(len(p.names)), Held: r.Held, Shared: r.Shared,
		Incomplete: r.Incomplete, Restricted: r.Restricted, RequestID: r.ID, Worker: r.Worker, Selected: r.Selected}
	if r.Routed {
		out.Decision = r.outcome()
	}
	of := t.recent[r.Model]
	if of == nil { // the limit of models is reached
		of = &recent{}
		t.recent[r.Model] = of
	}
	of.add(out, p.own)
}

// Recorded returns requests that this node has recorded, with all earlier records. The list is empty for the id of a
// request that is not stored.
func (t *Tracker) Recorded(ctx context.Context, q *api.RecordedRequest) (*api.RecordedList, error) {
	if err := t.Flush(ctx); err != nil {
		return nil, err
	}
	before, err := readRecordedID(cmp.Or(q.Before, q.ID))
	if err != nil {
		return nil, err
	}
	out := &api.RecordedList{Requests: []api.Recorded{}}
	t.mu.Lock()
	defer t.mu.Unlock()
	of := t.recent[q.Model]
	if of == nil {
		return out, nil
	}
	for _, r := range slices.Backward(of.list) {
		id, _ := readRecordedID(r.ID)
		switch {
		case q.ID != "":
			if r.ID == q.ID {
				for _, h := range r.hashes {
					r.Hashes = append(r.Hashes, strconv.FormatUint(uint64(h), 10))
				}
				out.Requests = append(out.Requests, r.Recorded)
			}
		case q.Before != "" && id.compare(before) >= 0:
		case len(out.Requests) == recordedLimit(q):
			out.More = true
		default:
			out.Requests = append(out.Requests, r.Recorded)
		}
	}
	return out, nil
}

// Sample returns the hashes of the newest stored requests, each from the first block on. The caller must not change
// them.
func (t *Tracker) Sample(ctx context.Context, model string) (sample [][]events.LocalHash, err error) {
	if err := t.Flush(ctx); err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if of := t.recent[model]; of != nil {
		for _, r := range of.list[max(len(of.list)-newestKept, 0):] {
			if len(r.hashes) > 0 {
				sample = append(sample, r.hashes)
			}
		}
	}
	return sample, nil
}

// MergeRecorded adds the requests of another node.
func MergeRecorded(all, part *api.RecordedList, q *api.RecordedRequest) {
	all.Requests = append(all.Requests, part.Requests...)
	slices.SortFunc(all.Requests, func(a, b api.Recorded) int {
		x, _ := readRecordedID(a.ID)
		y, _ := readRecordedID(b.ID)
		return y.compare(x)
	})
	all.More = all.More || part.More
	if limit := recordedLimit(q); len(all.Requests) > limit {
		all.Requests, all.More = all.Requests[:limit], true
	}
}

// usualRecorded is the default number of requests in a list.
const usualRecorded = 20

func recordedLimit(q *api.RecordedRequest) int { return int(cmp.Or(q.Limit, usualRecorded)) }

// recordedID is an id: a time in nanoseconds, unique on its node, in base 36, and the node.
type recordedID struct {
	at   int64
	node string
}

func (i recordedID) String() string { return strconv.FormatInt(i.at, 36) + "-" + i.node }

func (i recordedID) compare(j recordedID) int {
	return cmp.Or(cmp.Compare(i.at, j.at), cmp.Compare(i.node, j.node))
}

func readRecordedID(text string) (id recordedID, err error) {
	if text == "" {
		return id, nil
	}
	at, node, _ := strings.Cut(text, "-")
	if id.at, err = strconv.ParseInt(at, 36, 64); err != nil || node == "" {
		return id, api.Errorf(api.CodeMalformed, "%.64q is not the id of a recorded request; use an id from the list", text)
	}
	id.node = node
	return id, nil
}

// RecordedNode returns the node that has recorded the request with an id.
func RecordedNode(id string) (string, error) {
	of, err := readRecordedID(id)
	return of.node, err
}
