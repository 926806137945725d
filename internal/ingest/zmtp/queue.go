package zmtp

import (
	"context"
	"sync"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// queue is a first-in-first-out queue with a bound on entries and a bound on bytes. An empty queue accepts an entry of
// any size. It is safe for concurrent use.
type queue[T any] struct {
	maxLen, maxBytes int

	ready chan struct{} // wakes a waiting getter
	room  chan struct{} // wakes a waiting putter

	mu     sync.Mutex
	ring   []slot[T]
	head   int
	len    int
	bytes  int
	closed error // the error of get once the queue is empty
}

type slot[T any] struct {
	v    T
	size int
}

func newQueue[T any](maxLen, maxBytes int) *queue[T] {
	return &queue[T]{maxLen: maxLen, maxBytes: maxBytes, ready: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

// tryPut adds v. It returns false if v does not fit, and an error if the queue is closed.
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
		loop.Wake(q.room) // wakes the next of several putters
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

// put waits for room and adds v. It returns an error if the queue is closed or ctx ends first.
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

// receive adds v, and then waits until fewer than maxBytes bytes are queued. A reader therefore does not read the next
// message into memory while a message as large as the whole queue is waiting.
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

// roomy reports whether the queue has room for bytes or is closed.
func (q *queue[T]) roomy() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed == nil && !(q.bytes < q.maxBytes) {
		return false
	}
	loop.Wake(q.room) // wakes the next of several putters
	return true
}

// tryGet removes and returns the first entry. If the queue is empty, ok is false, and err is set if the queue is
// closed.
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
		loop.Wake(q.ready) // wakes the next of several getters
	}
	return v, true, nil
}

// get waits for an entry. Entries from before close are still returned.
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

// close rejects further entries. The first error is kept.
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
