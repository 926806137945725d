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

// Limits of a body that is being received. A client below them is ended with request_timeout.
const (
	readTimeout = 30 * time.Second // a whole request, from its first byte on
	window      = 5 * time.Second  // within each, a body ends or minPerWindow bytes of it come
	minWindow   = 64 << 10

	// grace is how old a body is at least that is given up to make room for others.
	grace = time.Second

	// minHeld is what a body that is being received costs at least: its connection's buffers and goroutine.
	minHeld = 16 << 10
)

// Intake bounds the memory of the bodies that are received or under way. A body counts by the bytes that have come, not
// by those that it announces. When there is no room for another byte, the slowest unfinished bodies are given up: a
// client that sends slowly costs others nothing. Any number of goroutines may use an Intake.
type Intake struct {
	Most int64 // bytes

	mu      sync.Mutex
	held    int64
	arrival map[*Arrival]struct{} // unfinished
}

// Arrival is one body. Only the goroutine that receives it calls its methods.
type Arrival struct {
	in     *Intake
	begun  time.Time
	bytes  int64 // that have come
	held   int64 // that count
	giveUp func()
	gone   bool // it was given up: nothing of it counts
}

// Begin adds a body. giveUp is called at most once, from another goroutine and under a lock, when the body has to make
// room: it must not block, and the receiver must end then.
func (in *Intake) Begin(giveUp func()) *Arrival {
	a := &Arrival{in: in, begun: time.Now(), giveUp: giveUp}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.arrival == nil {
		in.arrival = map[*Arrival]struct{}{}
	}
	in.arrival[a] = struct{}{}
	in.hold(a, minHeld)
	if in.held > in.Most {
		in.makeRoom(a)
	}
	return a
}

// hold counts bytes of an arrival. mu is held.
func (in *Intake) hold(a *Arrival, bytes int64) {
	in.held += bytes - a.held
	a.held = bytes
}

// Add counts bytes that have come. The error says that the body was given up, or that there is no room for it.
func (a *Arrival) Add(bytes int) *api.Error {
	in := a.in
	in.mu.Lock()
	defer in.mu.Unlock()
	if a.gone {
		return slow(a.bytes)
	}
	a.bytes += int64(bytes)
	in.hold(a, max(a.bytes, minHeld))
	if in.held <= in.Most {
		return nil
	}
	in.makeRoom(a)
	if in.held > in.Most && in.held > a.held { // a body alone has its turn, however large it is
		in.end(a)
		return api.Errorf(api.CodeBusy, "%d MiB of requests are under way; ask again a little later", in.Most>>20)
	}
	return nil
}

// makeRoom gives up unfinished bodies, those with the fewest bytes a second first, until there is room. mu is held.
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

// end has an arrival count no more. mu is held.
func (in *Intake) end(a *Arrival) {
	in.hold(a, 0)
	a.gone = true
	delete(in.arrival, a)
}

// Complete says that all of the body has come: it counts until End, and is not given up. The error is that of Add.
func (a *Arrival) Complete() *api.Error {
	a.in.mu.Lock()
	defer a.in.mu.Unlock()
	if a.gone {
		return slow(a.bytes)
	}
	delete(a.in.arrival, a)
	a.in.hold(a, a.bytes)
	return nil
}

// End says that the body is kept no longer. A second call does nothing.
func (a *Arrival) End() {
	a.in.mu.Lock()
	defer a.in.mu.Unlock()
	a.in.end(a)
}

// Held returns how many bytes count now.
func (in *Intake) Held() int64 {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.held
}

// slow is the error of a body that came too slowly.
func slow(bytes int64) *api.Error {
	return api.Errorf(api.CodeRequestTimeout, "of the body %d bytes came in time, and not its end", bytes)
}

// Place is where a request counts as being worked on. A body that is being received has none: workers do not wait for
// clients.
type Place interface {
	Take() *api.Error // or why there is none
	Leave()
}

// Receive has a request's body count in an Intake, and gives the request's place, which it has, to others while the
// body is received. The returned function says that the request is answered: it gives up whatever the request still
// has.
func (in *Intake) Receive(w http.ResponseWriter, r *http.Request, place Place) (end func()) {
	if r.Body == nil || r.Body == http.NoBody {
		return place.Leave
	}
	b := &receiving{ReadCloser: r.Body, in: in, place: place, control: http.NewResponseController(w), has: true}
	r.Body = b
	return b.end
}

// receiving is a body that is being received.
type receiving struct {
	io.ReadCloser
	in      *Intake
	place   Place
	control *http.ResponseController
	arrival *Arrival // nil: nothing was read yet
	has     bool     // the place
	err     error    // of the end

	mu    sync.Mutex // guards what follows, which giving up uses too
	ended bool
	until time.Time // of the whole body
	came  int       // in the present window
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

// nextWindow has a new window begin.
func (b *receiving) nextWindow() {
	b.came = 0
	at := time.Now().Add(window)
	if at.After(b.until) {
		at = b.until
	}
	b.deadline(at)
}

// deadline sets until when reading may take, unless the body is given up. A writer that cannot is a test's.
func (b *receiving) deadline(at time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.ended {
		_ = b.control.SetReadDeadline(at)
	}
}

// giveUp ends a read that is waiting.
func (b *receiving) giveUp() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.ended {
		b.ended = true
		_ = b.control.SetReadDeadline(time.Unix(1, 0))
	}
}

// end is for when the request is answered.
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
