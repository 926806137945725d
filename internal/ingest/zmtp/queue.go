package zmtp

import (
	"context"
	"sync"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// queue is a first-in-first-out bounded in entries and bytes; an entry of any size fits into an empty one. Any number
// of goroutines may put and get.
type queue[T any] struct {
	maxLen, maxBytes int

	ready chan struct{} // a getter may look again
	room  chan struct{} // a putter may look again

	mu     sync.Mutex
	ring   []slot[T]
	head   int
	len    int
	bytes  int
	closed error // what get returns once the queue is empty
}

type slot[T any] struct {
	v    T
	size int
}

func newQueue[T any](maxLen, maxBytes int) *queue[T] {
	return &queue[T]{maxLen: maxLen, maxBytes: maxBytes, ready: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

// tryPut puts v unless it does not fit or the queue is closed.
func (q *queue[T]) tryPut(v T, size int) (bool, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed != nil {
		loop.Wake(q.room)
		return false, q.closed
	}
	if !q.fits(size) {
		return false, nil
	}
	if q.len == len(q.ring) {
		q.grow()
	}
	q.ring[(q.head+q.len)%len(q.ring)] = slot[T]{v, size}
	q.len++
	q.bytes += size
	if q.len == 1 {
		loop.Wake(q.ready)
	}
	if q.fits(0) {
		loop.Wake(q.room) // for the next of several putters
	}
	return true, nil
}

func (q *queue[T]) fits(size int) bool {
	return q.len == 0 || q.len < q.maxLen && q.bytes+size <= q.maxBytes
}

func (q *queue[T]) grow() {
	ring := make([]slot[T], max(16, 2*len(q.ring)))
	n := copy(ring, q.ring[q.head:])
	copy(ring[n:], q.ring[:q.head])
	q.ring, q.head = ring, 0
}

// put waits for room. It returns an error if the queue is closed or ctx ends first.
func (q *queue[T]) put(ctx context.Context, v T, size int) error {
	for {
		if ok, err := q.tryPut(v, size); ok || err != nil {
			return err
		}
		select {
		case <-q.room:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// receive puts v, and then waits until less than maxBytes wait. So a reader does not read the next message into memory
// while one as large as the whole queue waits.
func (q *queue[T]) receive(ctx context.Context, v T, size int) error {
	err := q.put(ctx, v, size)
	for err == nil && size >= q.maxBytes && !q.roomy() {
		select {
		case <-q.room:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	return err
}

// roomy reports whether more may be put, or nothing ever again.
func (q *queue[T]) roomy() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed == nil && !(q.bytes < q.maxBytes) {
		return false
	}
	loop.Wake(q.room) // for the next of several putters
	return true
}

// tryGet takes the first entry. Without one, ok is false, and err says whether the queue is closed.
func (q *queue[T]) tryGet() (v T, ok bool, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.len == 0 {
		if q.closed != nil {
			loop.Wake(q.ready)
		}
		return v, false, q.closed
	}
	s := &q.ring[q.head]
	v = s.v
	q.bytes -= s.size
	*s = slot[T]{}
	q.head = (q.head + 1) % len(q.ring)
	q.len--
	loop.Wake(q.room)
	if q.len > 0 {
		loop.Wake(q.ready) // for the next of several getters
	}
	return v, true, nil
}

// get waits for an entry. What was put before the queue was closed can still be got.
func (q *queue[T]) get(ctx context.Context) (v T, err error) {
	for {
		v, ok, err := q.tryGet()
		if ok || err != nil {
			return v, err
		}
		select {
		case <-q.ready:
		case <-ctx.Done():
			return v, context.Cause(ctx)
		}
	}
}

// close lets nothing more in. The first error is the one that counts.
func (q *queue[T]) close(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed == nil {
		q.closed = err
	}
	loop.Wake(q.ready)
	loop.Wake(q.room)
}

func (q *queue[T]) length() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.len
}
