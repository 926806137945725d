package shim

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
)

// speakers selects the followed engine at a socket with several engines. A rank has a single engine. Several engines
// publish here if several connect to a listening socket, or if a forwarder carries several over a connection. Their
// message numbers are unrelated, so a machine that processed all messages would detect a restart in each.
//
// The machine receives the messages of a single speaker. The messages of other speakers are counted and skipped.
// speakers is stepped: it reads no clock. Run's loop owns it.
//
//	                   its connection ends
//	  ┌───────────────────────────────────────────────┐
//	  ▼         first message                         │
//	none ──────────────────────▶ a speaker followed ──┤ a newer connection with the same topic:
//	                                  ▲    │          │ this connection is followed
//	                                  │    │ numbers decrease repeatedly on a connection
//	                    mutedFor ends │    ▼
//	                                 muted (no speaker is followed)
type speakers struct {
	followed *speaker // nil: none
	known    bool     // a speaker was followed before: last
	last     speaker
	newest   uint64 // the number of the newest connection
	ended    uint64 // the newest connection at the end of the last followed connection

	open   map[uint64]string     // addresses of open connections
	others map[speaker]time.Time // times of the last messages of other speakers

	restarts []time.Time // of the followed speaker, on a connection, within restartsWithin
	muted    time.Time   // until then nothing is followed; zero: not muted
}

// speaker identifies an engine by connection and topic.
type speaker struct {
	conn  uint64
	topic string
}

// verdict is the treatment of a message.
type verdict uint8

const (
	follow  verdict = iota // the machine receives the message
	replace                // the same, but the engine differs from the earlier engine
	skip                   // the engine is not followed
)

const (
	// A restarted engine opens a new connection. Three restarts on a connection within a minute mean several engines
	// behind a forwarder.
	restartsMost   = 3
	restartsWithin = time.Minute

	// mutedFor is the time without a followed speaker after that. It limits the incarnations of such a connection.
	mutedFor = time.Minute

	// An engine that is not followed is reported until the end of its connection, or until this silence.
	otherFor = 5 * time.Minute

	// othersMost is the maximum number of kept speakers.
	othersMost = 64
)

func (s *speakers) opened(p *zmtp.Peer) {
	if s.open == nil {
		s.open, s.others = map[uint64]string{}, map[speaker]time.Time{}
	}
	s.open[p.Conn] = p.Remote
	s.newest = max(s.newest, p.Conn)
}

// closed reports whether the followed engine is gone while other engines publish: its blocks are not theirs.
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
		s.recordOther(speaker{p.Conn, string(topic)}, now)
		return skip
	}
	next := speaker{p.Conn, string(topic)}
	if f != nil { // a newer connection with the same topic: the old connection may be dead, or the engine is another
		s.recordOther(*f, now)
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

// recordOther records a speaker that is not followed.
func (s *speakers) recordOther(o speaker, now time.Time) {
	if _, is := s.others[o]; is || len(s.others) < othersMost {
		s.others[o] = now
	}
}

// restarted records a new incarnation of the followed speaker on its connection. It reports whether the speaker is
// muted from now on.
func (s *speakers) restarted(now time.Time) bool {
	s.restarts = slices.DeleteFunc(s.restarts, func(t time.Time) bool { return now.Sub(t) > restartsWithin })
	if s.restarts = append(s.restarts, now); len(s.restarts) < restartsMost {
		return false
	}
	s.muted = now.Add(mutedFor)
	return true
}

// calm drops the restarts.
func (s *speakers) calm() { s.restarts, s.muted = nil, time.Time{} }

// tick drops speakers after a long silence, and ends a mute that is over. It reports whether the followed engine
// counts as another engine from now on: messages were skipped.
func (s *speakers) tick(now time.Time) (replaced bool) {
	maps.DeleteFunc(s.others, func(_ speaker, last time.Time) bool { return now.Sub(last) > otherFor })
	if replaced = !s.muted.IsZero() && !now.Before(s.muted); replaced {
		s.calm()
	}
	return replaced
}

// several describes the publishing engines; empty: at most a single engine.
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
