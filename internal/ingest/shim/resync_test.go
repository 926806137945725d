package shim

import (
	"context"
	"testing"

	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// readings is a log whose reads return the values of a channel.
type readings chan Published

func (l readings) Last(context.Context) (Published, error) { return <-l, nil }

func (l readings) Publish(context.Context, [][]byte) (events.StreamSeq, error) { return 1, nil }

// TestARequestNeedsALaterRead: the reply to a request after a loss of the log comes from a read of the log that began
// after the request. An earlier read may not see the loss.
func TestARequestNeedsALaterRead(t *testing.T) {
	log := make(readings)
	cfg := Config{Feed: make(chan Frame), Decoder: oneBlock, Log: log, Identity: Identity{Model: "m", BlockSize: 16}}
	cfg.setDefaults()
	r := newRunner(cfg)
	defer r.stopTimers()
	step := func(present ...Published) {
		t.Helper()
		if err := r.begin(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, p := range present {
			log <- p
		}
		if err := r.landed(<-r.flushes); err != nil {
			t.Fatal(err)
		}
	}
	ask := func(id string) <-chan events.Incarnation {
		begun := make(chan events.Incarnation, 1)
		r.requested(request{control.ResyncRequest{ID: id, Lost: true}, begun})
		return begun
	}
	r.machine.Recovered(Published{}, 1)
	step() // publishes the first event
	r.span.first = 1
	whole := Published{Found: true, Identity: cfg.Identity, Reached: r.machine.Acked().Reached, LogFirst: 1}
	first := r.machine.Incarnation()

	reply := ask("before")
	step(whole)
	if got := <-reply; got != first {
		t.Errorf("nothing is lost, and incarnation %d follows %d", got, first)
	}

	ask("early")
	if err := r.begin(t.Context()); err != nil { // a read begins
		t.Fatal(err)
	}
	reply = ask("late")
	step(whole) // of the read before the loss
	select {
	case got := <-reply:
		t.Fatalf("the reply %d comes from a read before the request", got)
	default:
	}
	step(Published{})
	if got := <-reply; got <= first {
		t.Errorf("incarnation %d follows %d after a loss", got, first)
	}
}
