package web

import (
	"cmp"
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// Limits of a body during its receipt. A client below the limits is disconnected with request_timeout.
const (
	readTimeout = 30 * time.Second // of a whole request, from its first byte on
	window      = 5 * time.Second  // in each window a body ends, or at least minWindow bytes arrive
	minWindow   = 64 << 10

	// grace is the minimum age of a body before it can be aborted to make room.
	grace = time.Second

	// minHeld is the minimum cost of a body during its receipt: its connection's buffers and goroutine.
	minHeld = 16 << 10
)

// Intake bounds the memory of the bodies of all requests that are being received or answered. A body counts with the
// received bytes, not with the announced length. If the room is exhausted, the slowest unfinished bodies are
// aborted, so a slow client does not block others. An Intake is safe for concurrent use.
type Intake struct {
	Most int64 // bytes

	mu      sync.Mutex
	held    int64
	arrival map[*Arrival]struct{} // unfinished bodies
}

// Arrival is one body. Its methods are for the goroutine that receives the body.
type Arrival struct {
	in     *Intake
	begun  time.Time
	bytes  int64 // bytes that have arrived
	held   int64 // bytes that count against Most
	giveUp func()
	gone   bool // aborted: no byte counts any more
}

// Begin adds a body. giveUp is called at most once, from another goroutine and under a lock, if the body has to make
// room. giveUp must not block. The receiver must end then.
func (in *Intake) Begin(giveUp func()) *Arrival {
	a := &Arrival{in: in, begun: time.Now(), giveUp: giveUp}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.arrival == nil {
		in.arrival = map[*Arrival]struct{}{}
	}
	in.arrival[a] = struct{}{}
	in.setHeld(a, minHeld)
	if in.held > in.Most {
		in.makeRoom(a)
	}
	return a
}

// setHeld sets the counted bytes of an arrival. mu is held.
func (in *Intake) setHeld(a *Arrival, bytes int64) {
	in.held += bytes - a.held
	a.held = bytes
}

// Add counts received bytes. It returns an error if the body was aborted or does not fit.
func (a *Arrival) Add(bytes int) *api.Error {
	in := a.in
	in.mu.Lock()
	defer in.mu.Unlock()
	if a.gone {
		return slow(a.bytes)
	}
	a.bytes += int64(bytes)
	in.setHeld(a, max(a.bytes, minHeld))
	if in.held <= in.Most {
		return nil
	}
	in.makeRoom(a)
	if in.held > in.Most && in.held > a.held { // a single body is accepted at any size
		in.end(a)
		return api.Errorf(api.CodeBusy, "%d MiB of requests are in progress; retry later", in.Most>>20)
	}
	return nil
}

// makeRoom aborts unfinished bodies until there is room, those with the fewest bytes per second first. mu is held.
func (in *Intake) makeRoom(except *Arrival) {
	now := time.Now()
	type candidate struct {
		a    *Arrival
		rate float64
	}
	var list []candidate
	for a := range in.arrival {
		if age := now.Sub(a.begun); age >= grace && a != except {
			list = append(list, candidate{a, float64(a.bytes) / age.Seconds()})
		}
	}
	slices.SortFunc(list, func(x, y candidate) int { return cmp.Compare(x.rate, y.rate) })
	for _, c := range list {
		if in.held <= in.Most {
			return
		}
		in.end(c.a)
		c.a.giveUp()
	}
}

// end removes an arrival from the counts. mu is held.
func (in *Intake) end(a *Arrival) {
	in.setHeld(a, 0)
	a.gone = true
	delete(in.arrival, a)
}

// Complete marks the body as received. It counts until End, and is not aborted any more. The errors are those of Add.
func (a *Arrival) Complete() *api.Error {
	a.in.mu.Lock()
	defer a.in.mu.Unlock()
	if a.gone {
		return slow(a.bytes)
	}
	delete(a.in.arrival, a)
	a.in.setHeld(a, a.bytes)
	return nil
}

// End frees the room of the body. A second call has no effect.
func (a *Arrival) End() {
	a.in.mu.Lock()
	defer a.in.mu.Unlock()
	a.in.end(a)
}

// Held returns the bytes that count now.
func (in *Intake) Held() int64 {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.held
}

// slow returns the error of a body that arrived too slowly.
func slow(bytes int64) *api.Error {
	return api.Errorf(api.CodeRequestTimeout, "the body is too slow: only %d bytes arrived in time", bytes)
}

// Place is a request's slot in a bounded set of workers. A body has no slot during its receipt, so workers do not wait
// for clients.
type Place interface {
	Take() *api.Error // returns an error if no slot is free
	Leave()
}

// Receive counts a request's body in the Intake. During the receipt of the body, other requests may use the slot. The
// caller owns the slot before the call. The returned function ends the request and frees its resources.
func (in *Intake) Receive(w http.ResponseWriter, r *http.Request, place Place) (end func()) {
	if r.Body == nil || r.Body == http.NoBody {
		return place.Leave
	}
	b := &receiving{ReadCloser: r.Body, in: in, place: place, control: http.NewResponseController(w), has: true}
	r.Body = b
	return b.end
}

// receiving is a body during its receipt.
type receiving struct {
	io.ReadCloser
	in      *Intake
	place   Place
	control *http.ResponseController
	arrival *Arrival // nil before the first read
	has     bool     // whether the request has its slot
	err     error    // the first error

	mu    sync.Mutex // guards the following fields, which giveUp uses too
	ended bool
	until time.Time // deadline of the whole body
	came  int       // bytes in the present window
}

func (b *receiving) Read(p []byte) (n int, err error) {
	switch {
	case b.err != nil:
		return 0, b.err
	case b.arrival == nil:
		b.until = time.Now().Add(readTimeout)
		b.arrival = b.in.Begin(b.giveUp)
		b.place.Leave()
		b.has = false
		b.nextWindow()
	}
	n, err = b.ReadCloser.Read(p)
	if failure := b.arrival.Add(n); failure != nil {
		b.err = failure
		return 0, failure
	}
	if err == nil {
		if b.came += n; b.came >= minWindow {
			b.nextWindow()
		}
		return n, nil
	}
	b.err = err
	if errors.Is(err, os.ErrDeadlineExceeded) {
		b.err = slow(b.arrival.bytes)
	}
	if errors.Is(err, io.EOF) {
		b.deadline(b.until)
		failure := b.arrival.Complete()
		if failure == nil {
			failure = b.place.Take()
			b.has = failure == nil
		}
		if failure != nil {
			b.err = failure
		}
	}
	return n, b.err
}

// nextWindow starts a new window.
func (b *receiving) nextWindow() {
	b.came = 0
	at := time.Now().Add(window)
	if at.After(b.until) {
		at = b.until
	}
	b.deadline(at)
}

// deadline sets the read deadline, unless the body has ended. Only writers of tests do not support deadlines.
func (b *receiving) deadline(at time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.ended {
		_ = b.control.SetReadDeadline(at)
	}
}

// giveUp aborts a pending read.
func (b *receiving) giveUp() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.ended {
		b.ended = true
		_ = b.control.SetReadDeadline(time.Unix(1, 0))
	}
}

// end ends the body after the answer.
func (b *receiving) end() {
	b.mu.Lock()
	b.ended = true
	b.mu.Unlock()
	if b.arrival != nil {
		b.arrival.End()
	}
	if b.has {
		b.place.Leave()
		b.has = false
	}
}
