package capacity

import (
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/internal/operate/funnel"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Ref is a reference to a sampled block.
type Ref struct {
	Name   funnel.Name
	At     int64  // microseconds since 1970; every request of a log has a time of its own
	Place  uint32 // number of blocks before the block in the prompt
	Rest   uint32 // number of blocks after the block in the prompt
	Before uint32 // with the first Ref of a request: the blocks of the requests without a Ref just before
	Worker uint32 // index of the worker in Samples.Workers plus 1; 0: unknown
}

// blocks returns the blocks of the request.
func (r *Ref) blocks() uint64 { return uint64(r.Place) + uint64(r.Rest) + 1 }

// Samples are the sampled references of a node, for one model.
type Samples struct {
	BlockSize uint32
	Below     funnel.Name // blocks with a smaller name are sampled
	Refs      []Ref       // in order of time; the blocks of a request in order of the prompt
	Workers   []events.WorkerID

	// Skipped counts blocks in another size than BlockSize.
	Skipped uint64
}

const (
	all        = math.MaxUint64 // threshold that samples all blocks
	maxWorkers = 1 << 10        // in a log; the requests of further workers have no worker

	// minUses is the number of references for each different sampled block in a full log that still lowers the threshold.
	// With more references, the requests repeat a few blocks, and a lower threshold would leave too few of them.
	minUses = 16
)

// Log stores the sampled references of one model. Its memory is bounded by the number of references.
type Log struct {
	Samples
	size int    // maximum of Refs
	want uint64 // the number of different blocks that the log should cover

	// Names below taking are stored now. taking exceeds Below after it was raised: the references before raised lack
	// names from Below on.
	taking funnel.Name
	raised int64

	at      int64  // time of the last request
	before  uint32 // blocks of the requests since the last Ref
	workers map[events.WorkerID]uint32
	strays  int // successive requests with another block size
}

// NewLog returns an empty log with room for size references, at least 64.
func NewLog(blockSize uint32, size int) *Log {
	return &Log{Samples: Samples{BlockSize: blockSize, Below: all}, size: max(size, 64), taking: all,
		workers: map[events.WorkerID]uint32{}}
}

// Add adds a request for blocks, in order of the prompt. An empty worker is unknown. Add keeps no reference to names.
func (l *Log) Add(at int64, worker events.WorkerID, names []funnel.Name) {
	l.at = max(at, l.at+1)
	n := l.sampled(names)
	for len(l.Refs)+n > l.size {
		l.makeRoom()
		n = l.sampled(names)
	}
	if n == 0 {
		l.before = plus(l.before, uint64(len(names)))
		return
	}
	if have := len(l.Refs); have+n > cap(l.Refs) {
		l.Refs = append(make([]Ref, 0, min(l.size, 2*have+n)), l.Refs...)
	}
	r := Ref{At: l.at, Before: l.before, Worker: l.worker(worker)}
	for i, name := range names {
		if name < l.taking {
			r.Name, r.Place, r.Rest = name, uint32(i), uint32(len(names)-i-1)
			l.Refs = append(l.Refs, r)
			r.Before = 0
		}
	}
	l.before = 0
}

// sampled returns the number of sampled blocks.
func (l *Log) sampled(names []funnel.Name) (n int) {
	for _, name := range names {
		if name < l.taking {
			n++
		}
	}
	return n
}

// worker returns the index of a worker plus 1, or 0 without a name or if the log has too many workers.
func (l *Log) worker(w events.WorkerID) uint32 {
	if w == "" {
		return 0
	}
	if of, found := l.workers[w]; found {
		return of
	}
	if len(l.Workers) >= maxWorkers {
		return 0
	}
	l.Workers = append(l.Workers, w)
	l.workers[w] = uint32(len(l.Workers))
	return uint32(len(l.Workers))
}

// makeRoom removes the oldest references if the log covers enough blocks, and otherwise those with the largest names.
func (l *Log) makeRoom() {
	if l.raised != 0 && (len(l.Refs) == 0 || l.Refs[0].At >= l.raised) {
		l.Below, l.raised = l.taking, 0
	}
	different, covered := l.covered()
	switch {
	case len(l.Refs) == 0 || covered < l.want && different*minUses >= len(l.Refs):
		l.taking, l.raised = l.Below/8*7, 0
		l.lower()
	case covered > 4*l.want && l.raised == 0 && l.taking < all:
		l.taking, l.raised = funnel.Name(saturated(2*float64(l.taking))), l.at
		l.drop(len(l.Refs) / 2)
	default:
		l.drop(max(1, len(l.Refs)/8))
	}
}

// lower removes the names from taking on.
func (l *Log) lower() {
	before := uint32(0)
	l.Refs, before = thin(l.Refs, l.taking)
	l.Below, l.before = l.taking, plus(before, uint64(l.before))
}

// thin removes the references with names from below on, in place. It returns the blocks of the requests after the last
// request with a reference.
func thin(refs []Ref, below funnel.Name) (kept []Ref, before uint32) {
	kept = refs[:0]
	for from := 0; from < len(refs); {
		first, n := refs[from], len(kept)
		before = plus(before, uint64(first.Before))
		for ; from < len(refs) && refs[from].At == first.At; from++ {
			if refs[from].Name < below {
				kept = append(kept, refs[from])
			}
		}
		if len(kept) == n {
			before = plus(before, first.blocks())
		} else {
			kept[n].Before, before = before, 0
		}
	}
	return kept, before
}

// drop removes the n oldest references and the workers without references.
func (l *Log) drop(n int) {
	l.Refs = l.Refs[:copy(l.Refs, l.Refs[n:])]
	before := l.Workers
	l.Workers = nil
	clear(l.workers)
	for i := range l.Refs {
		if r := &l.Refs[i]; r.Worker != 0 {
			r.Worker = l.worker(before[r.Worker-1])
		}
	}
}

// covered returns the number of different sampled blocks, and estimates the number of different blocks of all requests.
func (l *Log) covered() (sampled int, blocks uint64) {
	seen := make(map[funnel.Name]struct{}, len(l.Refs))
	for i := range l.Refs {
		if l.Refs[i].Name < l.Below {
			seen[l.Refs[i].Name] = struct{}{}
		}
	}
	return len(seen), saturated(float64(len(seen)) / rate(l.Below))
}

// Thinned returns a copy with at most most references.
func (l *Log) Thinned(most int) *Samples {
	c := *l
	c.Refs = slices.Clone(l.Refs)
	c.Workers = slices.Clone(l.Workers)
	for c.taking = l.Below; ; c.taking = c.taking / 8 * 7 {
		if c.lower(); len(c.Refs) <= most {
			return &c.Samples
		}
	}
}

// rate returns the sampling rate of a threshold.
func rate(below funnel.Name) float64 { return float64(below) / all }

func plus(a uint32, b uint64) uint32 { return uint32(min(uint64(a)+b, math.MaxUint32)) }

func saturated(f float64) uint64 {
	if f >= all {
		return all
	}
	return uint64(f)
}
