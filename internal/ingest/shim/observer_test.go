package shim

import "github.com/kvatlas/kvatlas/pkg/events"

// observing passes the events of a shim to functions. A nil function ignores its event.
type observing struct {
	Unobserved
	state        func(State)
	unserved     func(why string)
	published    func(events.Cursor)
	replayFailed func(error)
}

func (o observing) StateChanged(s State) {
	if o.state != nil {
		o.state(s)
	}
}

func (o observing) Unserved(why string) {
	if o.unserved != nil {
		o.unserved(why)
	}
}

func (o observing) Published(c events.Cursor, _ events.StreamSeq) {
	if o.published != nil {
		o.published(c)
	}
}

func (o observing) ReplayFailed(_ events.EngineSeq, err error) {
	if o.replayFailed != nil {
		o.replayFailed(err)
	}
}
