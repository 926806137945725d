package shim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// After a replay has brought a machine up to date from its predecessor's cursor, a second conversation with the replay
// socket reads the messages up to the cursor. The socket sends all messages from a number on, and drops messages when
// its queue is full. So the conversation ends at the cursor, and a new conversation begins at a missing message. The
// decoder of this conversation also reads the recorded later messages, and the machine then uses the decoder's state.

// learning is the state of this process. A nil learning has nothing left to learn; the methods accept it.
type learning struct {
	learner Decoder
	cursor  events.Cursor // the last message to learn from
	ready   bool          // a replay has shown that the cursor belongs to the engine
	running bool          // the shell is learning
	starts  int
	record  []recorded // messages since the cursor
	spare   int        // remaining bytes for the record
}

// recorded is a processed engine message with the published events.
type recorded struct {
	payload   []byte
	skip      int            // number of events that an earlier shim has published
	published []events.Event // copies
}

// learningStarts is the maximum number of starts of learning, because every due replay interrupts it.
const learningStarts = 5

// pending reports whether learning is due or running.
func (l *learning) pending() bool { return l != nil && l.ready }

// verified records that the cursor belongs to the engine.
func (l *learning) verified() {
	if l != nil {
		l.ready = true
	}
}

// interrupt stops learning for a due replay, which has priority.
func (l *learning) interrupt() {
	if l != nil {
		l.ready, l.running = false, false
	}
}

// record keeps a processed message while its hashes may need a correction.
func (m *Machine) record(payload []byte) {
	if l := m.learning; l != nil {
		l.record = append(l.record, recorded{payload: payload})
		m.spend(len(payload) + frameSize)
	}
}

// recordEvent keeps an event of the last recorded message.
func (m *Machine) recordEvent(e *events.Event, published bool) {
	l := m.learning
	if l == nil {
		return
	}
	if r := &l.record[len(l.record)-1]; published {
		r.published = append(r.published, cloned(e))
	} else {
		r.skip++
	}
	m.spend(e.EncodedSize() + entrySize)
}

// spend uses bytes of the record. Learning ends when no bytes are left.
func (m *Machine) spend(bytes int) {
	if m.learning.spare -= bytes; m.learning.spare < 0 {
		m.learning = nil
	}
}

// dueLearning returns the cursor of a due learning, once every time.
func (m *Machine) dueLearning() events.Cursor {
	l := m.learning
	if l == nil || !l.ready || l.running {
		return events.Cursor{}
	}
	if l.starts++; l.starts > learningStarts {
		m.learning = nil
		return events.Cursor{}
	}
	l.running = true
	return l.cursor
}

// Learned receives the result of learning. nil means that the result is not usable.
func (m *Machine) Learned(k *knowledge) {
	m.complete()
	l := m.learning
	if l == nil || !l.running {
		return
	}
	m.learning = nil
	if k == nil {
		return
	}
	corrections := l.corrections(k)
	for i := range corrections {
		cursor := events.Cursor{} // a shim that finds a part of the corrections in the log begins without a cursor
		if i == len(corrections)-1 {
			cursor = m.taken
		}
		m.push(&corrections[i], cursor)
	}
	if len(corrections) > 0 {
		m.counts.Corrections += uint64(len(corrections))
		m.Delayed()
	}
	l.learner.Adopt(k.decoder)
}

// corrections decodes the record with a new decoder, and returns events that correct different hashes.
//
// The index keeps a name at a single place at a time, and counts its copies. A name with copies at another place is not
// stored, and the rest of its event is not stored either. So corrections computes the index's actual state of the
// record beside the intended state. Copies at a wrong place are removed before any copy is stored again. Missing copies
// are then announced without hashes, which adds them at the name's place.
func (l *learning) corrections(k *knowledge) []events.Event {
	type understood struct {
		event events.Event
		wrong bool // published with other hashes
	}
	wrong := map[events.BlockHash]bool{}
	var record []understood
	for _, r := range l.record {
		var read []events.Event
		if r.payload != nil {
			_ = eachEvent(k.decoder, r.payload, func(e *events.Event) { // the error was counted before
				if len(read) <= r.skip+len(r.published) { // otherwise the events differ
					read = append(read, cloned(e))
				}
			})
		}
		for i := range min(r.skip, len(read)) {
			record = append(record, understood{event: read[i]})
		}
		read = read[min(r.skip, len(read)):]
		for i, e := range r.published {
			u := understood{event: e}
			if len(read) == len(r.published) && otherwise(&e, &read[i], wrong) {
				u.event, u.wrong = read[i], true
				for _, name := range e.Blocks {
					wrong[name] = true
				}
			}
			record = append(record, u)
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	held := k.held.subset(wrong)
	var again []events.Event
	for _, u := range record {
		e := &u.event
		held.apply(e)
		switch {
		case u.wrong:
			again = append(again, *e)
		case e.Kind == events.Cleared:
			again = slices.DeleteFunc(again, func(a events.Event) bool {
				return e.Tier == events.AllTiers || a.Tier == e.Tier
			})
		}
	}
	stored := newCopies()
	for i := range again {
		stored.apply(&again[i])
	}
	missing, surplus := map[copyOf]int{}, map[copyOf]int{}
	for c, n := range held.count {
		missing[c] = n - stored.count[c]
	}
	for c, n := range stored.count {
		surplus[c] = n - held.count[c]
	}
	return slices.Concat(changes(events.Removed, held.count), again,
		changes(events.Stored, missing), changes(events.Removed, surplus))
}

// otherwise reports whether published blocks belong at another place by read.
func otherwise(published, read *events.Event, wrong map[events.BlockHash]bool) bool {
	if !published.Places() || !published.Attention.Main() {
		return false
	}
	return published.HasParent != read.HasParent || read.HasParent && wrong[read.Parent] ||
		!slices.Equal(published.Locals, read.Locals)
}

func cloned(e *events.Event) events.Event {
	c := *e
	c.Blocks, c.Locals = slices.Clone(e.Blocks), slices.Clone(e.Locals)
	return c
}

// copyOf identifies the copies of a block that the index distinguishes.
type copyOf struct {
	name  events.BlockHash
	tier  events.Tier
	group events.GroupIndex
}

// copies counts copies of blocks for main groups, because other groups have no places.
type copies struct {
	count map[copyOf]int
	total map[events.BlockHash]int
	side  map[events.GroupIndex]bool // groups outside of the prefix
	only  map[events.BlockHash]bool  // nil: all names are counted
}

func newCopies() copies {
	return copies{count: map[copyOf]int{}, total: map[events.BlockHash]int{}, side: map[events.GroupIndex]bool{}}
}

// subset returns the copies of some names.
func (h *copies) subset(names map[events.BlockHash]bool) copies {
	some := newCopies()
	some.only, some.side = names, maps.Clone(h.side)
	for c, n := range h.count {
		if names[c.name] {
			some.add(c, n)
		}
	}
	return some
}

func (h *copies) add(c copyOf, n int) {
	if h.total[c.name] += n; h.total[c.name] == 0 {
		delete(h.total, c.name)
	}
	if h.count[c] += n; h.count[c] == 0 {
		delete(h.count, c)
	}
}

// apply counts the stores and removals of an event.
func (h *copies) apply(e *events.Event) {
	n := 1
	switch e.Kind {
	case events.Cleared:
		for c, n := range h.count {
			if e.Tier == events.AllTiers || e.Tier == c.tier {
				h.add(c, -n)
			}
		}
		return
	case events.Removed:
		n = -1
	case events.Stored:
		if !e.Attention.Main() {
			h.side[e.Group] = true
		}
	}
	for _, name := range e.Blocks {
		c := copyOf{name, e.Tier, e.Group}
		if (h.only == nil || h.only[name]) && !h.side[e.Group] && h.count[c]+n >= 0 {
			h.add(c, n)
		}
	}
}

// changes lists events that store or remove the positive numbers of copies.
func changes(kind events.Kind, copies map[copyOf]int) (list []events.Event) {
	order := slices.SortedFunc(maps.Keys(copies), func(a, b copyOf) int {
		return cmp.Or(cmp.Compare(a.tier, b.tier), cmp.Compare(a.group, b.group), cmp.Compare(a.name, b.name))
	})
	for _, c := range order {
		for range copies[c] {
			list = append(list, events.Event{
				Kind: kind, Tier: c.tier, Group: c.group, Blocks: []events.BlockHash{c.name},
			})
		}
	}
	return list
}

// knowledge is the result of reading the messages up to a cursor.
type knowledge struct {
	decoder *events.Decoder // after reading the messages
	held    copies          // blocks held by the engine at the cursor, as far as the replay buffer shows
}

// maxLearned is the maximum number of blocks during learning, in 100 MB of memory. Learning does not support engines
// with more blocks.
const maxLearned = 1 << 20

// errHoldsMore: the engine holds more than maxLearned blocks.
var errHoldsMore = errors.New("the engine holds too many blocks to learn from")

// lessonTries is the number of requests for a message that replays omit. lessonPatience limits the wait for all
// replies, as a multiple of the timeout for a single reply.
const (
	lessonTries    = 3
	lessonPatience = 5
)

// eachEvent decodes a message in parts. do must not keep the event.
func eachEvent(d *events.Decoder, payload []byte, do func(*events.Event)) error {
	msg, more, err := d.Begin(payload)
	for part := msg.Events; ; part, more = d.Continue() {
		for i := range part {
			do(&part[i])
		}
		if !more {
			return err
		}
	}
}

func (r *runner) startLearning(ctx context.Context, to events.Cursor) {
	r.lesson.end()
	ctx, l := converse[*knowledge](ctx, 1)
	r.lesson = l
	go func() {
		defer l.cancel()
		ctx, cancel := context.WithTimeout(ctx, lessonPatience*r.cfg.ReplayTimeout)
		defer cancel()
		k := &knowledge{decoder: r.cfg.Decoder.Blank(), held: newCopies()}
		err := k.learn(to, func(from events.EngineSeq, give func(Frame) bool) error {
			return askReplay(ctx, r.cfg, from, give)
		})
		if errors.Is(err, errOtherEngine) || errors.Is(err, errHoldsMore) {
			k = nil
		}
		l.out <- k
	}()
}

// errOtherEngine reports a different message at the cursor.
var errOtherEngine = errors.New("another engine answers")

// errLearned ends a replay at the cursor.
var errLearned = errors.New("the cursor is reached")

// learn decodes an engine's messages up to the message to. replay requests all messages from a number on, and passes
// them on until the function returns false. A ROUTER socket drops messages when its queue is full, so learn requests
// missing messages again: every reply has the messages after the messages before. Permanently missing messages are
// skipped. After an error the decoder has read a part, which is usable unless the error is errOtherEngine or
// errHoldsMore.
func (k *knowledge) learn(to events.Cursor, replay func(events.EngineSeq, func(Frame) bool) error) error {
	next, known := events.EngineSeq(0), false // the next expected message; not known: the oldest message of the engine
	for tries := 0; ; tries++ {
		var end error
		err := replay(next, func(f Frame) bool {
			switch {
			case known && f.Seq < next:
				return true
			case known && f.Seq > next && tries < lessonTries:
				return false
			case f.Seq > to.Seq:
				end = errLearned
				return false
			case f.Seq == to.Seq && f.digest() != to.Digest:
				end = errOtherEngine
				return false
			}
			_ = eachEvent(k.decoder, f.Payload, func(e *events.Event) { // the error was counted before
				if len(k.held.count) <= maxLearned {
					k.held.apply(e)
				}
			})
			next, known, tries = f.Seq+1, true, 0
			switch {
			case len(k.held.count) > maxLearned:
				end = errHoldsMore
			case f.Seq == to.Seq:
				end = errLearned
			}
			return end == nil
		})
		switch {
		case errors.Is(end, errLearned):
			return nil
		case end != nil:
			return end
		case tries >= lessonTries:
			return fmt.Errorf("message %d of the replay does not come: %w", next, err)
		}
	}
}
