package recording

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

const (
	batchBytes = 256 << 10       // a batch of this size is closed
	batchAge   = time.Second     // and so is a batch of this age
	queueBytes = 8 << 20         // of batches that wait for the stream
	lastTime   = 3 * time.Second // for the last batches of a stopping node
)

// Stream stores batches. [jetstream.Recording] implements it.
type Stream interface {
	// Store stores a batch of a node. A repeated id has no effect.
	Store(ctx context.Context, node, id string, data []byte) error
	// Ensure creates the stream if it is missing.
	Ensure(ctx context.Context) error
}

// Config configures a Recorder.
type Config struct {
	Node   string
	Keys   *Keys
	Stream Stream
	Span   uint32 // tokens of a name, at most; see [SpanOf]
	Log    *slog.Logger
}

// Recorder writes records to a stream. See the package comment.
type Recorder struct {
	cfg       Config
	wake      chan struct{}
	scratches sync.Pool

	recorded, dropped, stored atomic.Uint64

	mu     sync.Mutex // guards the following fields
	open   batch
	opened time.Time // zero: the batch is closed
	before uint64    // the dropped records in the head of the open batch
	closed []waiting
	bytes  int    // of closed
	lost   uint64 // dropped records that no batch contains yet
	fails  error  // of the last attempt to store a batch
}

// waiting is a closed batch.
type waiting struct {
	data   []byte
	count  int    // records
	before uint64 // the dropped records in its head
}

// scratch has the memory of a caller.
type scratch struct {
	block block
	names []Name
}

// New returns a recorder. Batches are stored only by Run.
func New(cfg Config) *Recorder {
	r := &Recorder{cfg: cfg, wake: make(chan struct{}, 1)}
	r.scratches.New = func() any { return new(scratch) }
	return r
}

// Request records a request with its choice. It does not block, and keeps no reference to o.
func (r *Recorder) Request(o *Observed) {
	x := r.scratches.Get().(*scratch)
	defer r.scratches.Put(x)
	k, q := r.cfg.Keys, &o.Request
	q.Span = SpanOf(r.cfg.Span, q.BlockSize)
	q.Link = k.text(&x.block, requestText, o.ID, "")
	q.Session = k.text(&x.block, sessionText, o.SessionID, o.Salt)
	q.Adapter = k.text(&x.block, adapterText, o.AdapterName, "")
	x.names = k.prompt(x.names[:0], &x.block, q, o.Sequence)
	q.Names = x.names
	r.add(q.Time, func(b *batch) { b.request(q) })
	q.Names = nil
}

// End records the end of the request with an id. It does not block.
func (r *Recorder) End(id string, e End) {
	e.Link = r.link(id)
	r.add(e.Time, func(b *batch) { b.ending(&e) })
}

// Report records the reuse that an engine has reported for the request with an id. It does not block.
func (r *Recorder) Report(id string, p Report) {
	p.Link = r.link(id)
	r.add(p.Time, func(b *batch) { b.report(&p) })
}

// Answer records the tokens of the answer to the request with an id. It does not block.
func (r *Recorder) Answer(id string, a Answer) {
	a.Link = r.link(id)
	r.add(a.Time, func(b *batch) { b.answer(&a) })
}

func (r *Recorder) link(id string) Name {
	x := r.scratches.Get().(*scratch)
	defer r.scratches.Put(x)
	return r.cfg.Keys.text(&x.block, requestText, id, "")
}

// add appends a record to the open batch, or drops the record.
func (r *Recorder) add(at int64, write func(*batch)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.bytes >= queueBytes {
		r.lost++
		r.dropped.Add(1)
		return
	}
	if r.opened.IsZero() {
		r.opened = time.Now()
		r.open.begin(at-batchAge.Milliseconds(), r.lost)
		r.before, r.lost = r.lost, 0
	}
	before := len(r.open.buf)
	if write(&r.open); len(r.open.buf) > MaxBatch-tailBytes { // a single prompt of this size; its texts stay
		r.open.buf, r.open.count = r.open.buf[:before], r.open.count-1
		r.lost++
		r.dropped.Add(1)
		r.close()
		return
	}
	r.recorded.Add(1)
	if len(r.open.buf) >= batchBytes {
		r.close()
		loop.Wake(r.wake)
	}
}

// close closes the open batch. The caller holds the lock.
func (r *Recorder) close() {
	r.opened = time.Time{}
	if r.open.count == 0 {
		r.lost += r.before
		return
	}
	w := waiting{r.open.end(), r.open.count, r.before}
	r.closed = append(r.closed, w)
	r.bytes += len(w.data)
}

// next removes and returns the next batch to store. With all, it closes the open batch at any age.
func (r *Recorder) next(all bool) (w waiting, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.closed) == 0 && !r.opened.IsZero() && (all || time.Since(r.opened) >= batchAge) {
		r.close()
	}
	if len(r.closed) == 0 {
		return w, false
	}
	return r.closed[0], true
}

// done removes the first batch.
func (r *Recorder) done(stored bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.closed[0]
	r.closed[0] = waiting{}
	r.closed, r.bytes = r.closed[1:], r.bytes-len(w.data)
	if stored {
		r.stored.Add(uint64(w.count))
		return
	}
	r.lost += w.before + uint64(w.count)
	r.dropped.Add(uint64(w.count))
}

// Run stores batches until ctx ends, and then the remaining batches for a short time.
func (r *Recorder) Run(ctx context.Context) {
	run := rand.Text()
	number := 0
	tick := time.NewTicker(batchAge / 4)
	defer tick.Stop()
	for ctx.Err() == nil {
		for r.store(ctx, fmt.Sprintf("%s-%d", run, number), false) {
			number++
		}
		select {
		case <-r.wake:
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTime)
	defer cancel()
	for r.store(last, fmt.Sprintf("%s-%d", run, number), true) {
		number++
	}
}

// store stores the next batch, if there is one, and repeats it under the same id until it is stored or ctx ends.
func (r *Recorder) store(ctx context.Context, id string, all bool) (more bool) {
	w, ok := r.next(all)
	if !ok {
		return false
	}
	for retry := (loop.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second}); ; {
		err := r.cfg.Stream.Store(ctx, r.cfg.Node, id, w.data)
		r.failing(err)
		if err == nil || errors.Is(err, jetstream.ErrTooLarge) {
			r.done(err == nil)
			return true
		}
		if !retry.Wait(ctx) {
			return false
		}
		_ = r.cfg.Stream.Ensure(ctx) // a failure shows in the next attempt
	}
}

// failing notes the result of an attempt to store a batch, and logs changes.
func (r *Recorder) failing(err error) {
	r.mu.Lock()
	was := r.fails
	r.fails = err
	r.mu.Unlock()
	switch {
	case err != nil && was == nil:
		r.cfg.Log.Warn("recorded requests cannot be stored; they wait, and are dropped when the queue is full", "error", err,
			"queue_bytes", queueBytes, "what_to_do", "check that JetStream answers and has room; indexer record status shows the state")
	case err == nil && was != nil:
		r.cfg.Log.Info("recorded requests are stored again", "dropped", r.dropped.Load())
	}
}

// Counts describes the work of a recorder since its start.
type Counts struct {
	Recorded, Stored, Dropped uint64 // records
	Waiting                   int    // bytes
	Failing                   error  // of the last attempt to store a batch
}

// Counts returns the counts.
func (r *Recorder) Counts() Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	waits := r.bytes
	if !r.opened.IsZero() {
		waits += len(r.open.buf)
	}
	return Counts{Recorded: r.recorded.Load(), Stored: r.stored.Load(), Dropped: r.dropped.Load(),
		Waiting: waits, Failing: r.fails}
}
