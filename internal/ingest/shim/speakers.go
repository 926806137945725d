package shim

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
)

// speakers decides which of the engines behind one socket is followed. A rank has one engine. More of them publish
// here if several dial one listening socket, or if a forwarder carries several over one connection. Their message
// numbers have nothing to do with each other, so a machine that heard them all would see a restart in each message.
//
// The machine receives the messages of one speaker. The messages of the others are counted and skipped. speakers is
// stepped: it reads no clock. Run's loop owns it.
//
//	                    its connection ends
//	   ┌───────────────────────────────────────────────┐
//	   ▼         first message                         │
//	nobody ────────────────────────▶ one is followed ──┤ a newer connection speaks with the same topic:
//	                                   ▲    │          │ that one is followed
//	                                   │    │ numbers go back again and again on one connection
//	                     mutedFor ends │    ▼
//	                                  muted (nothing is followed)
type speakers struct {
	followed *speaker // nil: nobody
	known    bool     // somebody was followed before, as last says
	last     speaker
	newest   uint64 // the number of the newest connection
	ended    uint64 // the newest connection when the last followed one ended

	open   map[uint64]string     // the address of each open connection
	others map[speaker]time.Time // speakers that are not followed, and when each spoke last

	restarts []time.Time // of the followed speaker, on one connection, within restartsWithin
	muted    time.Time   // until then nothing is followed; zero: not muted
}

// speaker is an engine as it can be told from others: by its connection and its topic.
type speaker struct {
	conn  uint64
	topic string
}

// verdict is what becomes of a message.
type verdict uint8

const (
	follow  verdict = iota // the machine receives it
	replace                // the same, and it is of another engine than the messages before
	skip                   // it is of an engine that is not followed
)

const (
	// An engine that restarts opens a new connection. Three restarts on one connection within a minute are several
	// engines behind a forwarder.
	restartsMost   = 3
	restartsWithin = time.Minute

	// mutedFor is how long nothing is followed after that. It bounds the incarnations that such a connection begins.
	mutedFor = time.Minute

	// An engine that is not followed is reported until its connection ends, or until it has said nothing for so long.
	otherFor = 5 * time.Minute

	// othersMost bounds the speakers that are remembered.
	othersMost = 64
)

func (s *speakers) opened(p *zmtp.Peer) {
	if s.open == nil {
		s.open, s.others = map[uint64]string{}, map[speaker]time.Time{}
	}
	s.open[p.Conn] = p.Remote
	s.newest = max(s.newest, p.Conn)
}

// closed reports true if the engine that was followed is gone while others speak: what it held is not theirs.
func (s *speakers) closed(p *zmtp.Peer) (replaced bool) {
	delete(s.open, p.Conn)
	maps.DeleteFunc(s.others, func(o speaker, _ time.Time) bool { return o.conn == p.Conn })
	if s.followed == nil || s.followed.conn != p.Conn {
		return false
	}
	s.followed, s.ended = nil, s.newest
	s.calm()
	if len(s.others) > 0 {
		s.known = false
		return true
	}
	return false
}

// message decides about a message.
func (s *speakers) message(p *zmtp.Peer, topic []byte, now time.Time) verdict {
	f := s.followed
	switch {
	case f != nil && f.conn == p.Conn && f.topic == string(topic):
		if s.muted.IsZero() {
			return follow
		}
		if now.Before(s.muted) {
			return skip
		}
		s.calm()
		return replace
	case f != nil && (f.topic != string(topic) || p.Conn < f.conn):
		s.heard(speaker{p.Conn, string(topic)}, now)
		return skip
	}
	next := speaker{p.Conn, string(topic)}
	if f != nil { // a newer connection with the same topic: the old one may be dead, or it is another engine
		s.heard(*f, now)
	}
	delete(s.others, next)
	same := f == nil && (!s.known || s.last.topic == next.topic && p.Conn > s.ended)
	s.followed, s.last, s.known = &next, next, true
	s.calm()
	if same {
		return follow
	}
	return replace
}

// heard remembers a speaker that is not followed.
func (s *speakers) heard(o speaker, now time.Time) {
	if _, is := s.others[o]; is || len(s.others) < othersMost {
		s.others[o] = now
	}
}

// restarted notes that the followed speaker began a new incarnation on its connection. It reports true if the speaker
// is muted from now on.
func (s *speakers) restarted(now time.Time) bool {
	s.restarts = slices.DeleteFunc(s.restarts, func(t time.Time) bool { return now.Sub(t) > restartsWithin })
	if s.restarts = append(s.restarts, now); len(s.restarts) < restartsMost {
		return false
	}
	s.muted = now.Add(mutedFor)
	return true
}

// calm forgets the restarts.
func (s *speakers) calm() { s.restarts, s.muted = nil, time.Time{} }

// tick forgets speakers that have said nothing for long.
func (s *speakers) tick(now time.Time) {
	maps.DeleteFunc(s.others, func(_ speaker, last time.Time) bool { return now.Sub(last) > otherFor })
}

// several returns how many engines speak, and which; empty: not more than one.
func (s *speakers) several() string {
	switch {
	case !s.muted.IsZero():
		return fmt.Sprintf("several engines publish over one connection (%s, topic %.64q): their message numbers "+
			"contradict each other", s.open[s.followed.conn], s.followed.topic)
	case len(s.others) == 0:
		return ""
	}
	var list []string
	for o := range s.others {
		list = append(list, s.name(o))
	}
	slices.Sort(list)
	text := fmt.Sprintf("%d engines publish here: ", len(s.others))
	if s.followed != nil {
		text = fmt.Sprintf("%d engines publish here: %s is followed, and not ", len(s.others)+1, s.name(*s.followed))
	}
	const named = 3
	if n := len(list) - named; n > 0 {
		list = append(list[:named], fmt.Sprintf("%d more", n))
	}
	return text + strings.Join(list, ", ")
}

func (s *speakers) name(o speaker) string {
	return fmt.Sprintf("%s with topic %.64q", s.open[o.conn], o.topic)
}
