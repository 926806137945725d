package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/control"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Desk answers what others ask a running shim: who it is, and to say again what its engine holds.
type Desk struct {
	who  control.Shim
	stop func()
	asks chan ask

	incarnation atomic.Uint64                   // of the machine, as of its last step
	waiting     atomic.Pointer[control.Waiting] // for the log; nil: it takes events

	mu    sync.Mutex // one resync at a time
	done  map[string]events.Incarnation
	order []string // the keys of done, oldest first
}

// ask is a request for a new incarnation, on its way to the loop that owns the machine.
type ask struct {
	lost  bool // as in control.Ask
	begun chan<- events.Incarnation
}

// remembered is how many resyncs a desk knows again.
const remembered = 64

// Claim opens the desk of a rank, unless another shim that lives has it: then the error is ErrFenced and says who. Two
// that claim at the same moment may both get it; the log tells them apart when both publish.
func Claim(ctx context.Context, ns *jetstream.Namespace, key events.RankKey, replay bool) (*Desk, error) {
	other, err := control.Who(ctx, ns, key)
	if err != nil {
		return nil, err
	}
	if other != nil {
		return nil, fmt.Errorf("%w: %s is served by %v", ErrFenced, key, other)
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	d := &Desk{asks: make(chan ask), done: map[string]events.Incarnation{}}
	d.who = control.Shim{Instance: key.Instance, Rank: key.Rank, Host: host, PID: os.Getpid(), Since: time.Now(),
		Replay: replay}
	d.stop, err = control.Serve(ns, key, d)
	return d, err
}

// Close gives the rank up.
func (d *Desk) Close() { d.stop() }

// Who says whose desk this is.
func (d *Desk) Who() control.Shim {
	who := d.who
	who.Incarnation = events.Incarnation(d.incarnation.Load())
	who.Waiting = d.waiting.Load()
	return who
}

// Wait has the desk say that the log takes nothing, and why; nil says that it does. A nil desk says nothing.
func (d *Desk) Wait(w *control.Waiting) {
	if d != nil {
		d.waiting.Store(w)
	}
}

var errNotStarted = errors.New("the shim has not read the log yet")

// Resync has the machine begin a new incarnation, once for each id, if what is asked makes it necessary.
func (d *Desk) Resync(ctx context.Context, a control.Ask) (control.Shim, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	who := d.Who()
	if incarnation, ok := d.done[a.ID]; ok {
		who.Incarnation = incarnation
		return who, nil
	}
	if a.Of != 0 && who.Incarnation > a.Of {
		return who, nil
	}
	begun := make(chan events.Incarnation, 1)
	select {
	case d.asks <- ask{a.Lost, begun}:
	case <-ctx.Done():
		return who, errNotStarted
	}
	select {
	case who.Incarnation = <-begun:
	case <-ctx.Done(): // the log cannot be looked into; whoever asks will ask again
		return who, errNotStarted
	}
	d.done[a.ID] = who.Incarnation
	if d.order = append(d.order, a.ID); len(d.order) > remembered {
		delete(d.done, d.order[0])
		d.order = d.order[1:]
	}
	return who, nil
}
