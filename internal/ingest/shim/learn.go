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

// When a replay has brought a machine from its predecessor's cursor up to date, a second conversation with the replay
// socket reads the messages up to the cursor. That socket sends all from a message on, and drops what its queue does
// not take; so the conversation ends at the cursor, and where a message is missing a new one begins there. The decoder
// that has read them reads the record of later messages too, and the machine goes on with what it remembers.

// learning is what a machine needs for that. Its methods may be called on nil: then there is nothing to learn.
type learning struct {
	learner Learner
	cursor  events.Cursor // the last message to learn from
	ready   bool          // a replay has shown that the engine is the one that the cursor is of
	running bool          // the shell learns
	starts  int
	record  []recorded // what was taken since the cursor
	spare   int        // bytes that the record may still take
}

// recorded is an engine message that was taken, and what was published of it.
type recorded struct {
	payload   []byte
	skip      int            // how many of its events a shim before this one has published
	published []events.Event // copies
}

// learningStarts is how often learning begins: each replay that becomes due interrupts it.
const learningStarts = 5

// pending reports whether there is more to learn, soon or now.
func (l *learning) pending() bool { return l != nil && l.ready }

// verified tells that the engine is the one that the cursor is of.
func (l *learning) verified() {
	if l != nil {
		l.ready = true
	}
}

// interrupt tells that a replay has become due, which goes first.
func (l *learning) interrupt() {
	if l != nil {
		l.ready, l.running = false, false
	}
}

// record keeps a message that was taken, for as long as its hashes may have to be corrected.
func (m *Machine) record(payload []byte) {
	if l := m.learning; l != nil {
		l.record = append(l.record, recorded{payload: payload})
		m.spend(len(payload) + frameSize)
	}
}

// recordEvent keeps an event of the message that was recorded last.
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

// spend takes bytes for the record. Learning ends when there are none left.
func (m *Machine) spend(bytes int) {
	if m.learning.spare -= bytes; m.learning.spare < 0 {
		m.learning = nil
	}
}

// dueLearning returns, once each time it is due, the cursor up to which messages are to be learned from.
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

// Learned takes what could be had of the messages up to the cursor. nil says that it is of no use.
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
		cursor := events.Cursor{} // a shim that finds a part of them in the log begins from nothing
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

// corrections has a decoder read the record, and lists the events that put right what it hashes otherwise.
//
// The index keeps a name at one place at a time, and counts its copies: a name that has copies at another place is not
// stored, nor is the rest of its event. So what the index made of the record is worked out, beside what it ought to
// have made of it. Copies at a wrong place are removed before any is stored again. Copies that are missing then are
// announced without hashes, which adds them where the name is.
func (l *learning) corrections(k *knowledge) []events.Event {
	type understood struct {
		event events.Event
		wrong bool // it was published with other hashes
	}
	wrong := map[events.BlockHash]bool{}
	var record []understood
	for _, r := range l.record {
		var read []events.Event
		if r.payload != nil {
			_ = eachEvent(k.decoder, r.payload, func(e *events.Event) { // an error was counted when it was taken
				if len(read) <= r.skip+len(r.published) { // else they differ
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
	held := k.held.of(wrong)
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

// otherwise reports whether blocks that were stored as published belong at another place, as read says.
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

// copyOf names the copies of a block that the index tells apart.
type copyOf struct {
	name  events.BlockHash
	tier  events.Tier
	group events.GroupIndex
}

// copies counts copies of blocks for main groups: the others have no places.
type copies struct {
	count map[copyOf]int
	total map[events.BlockHash]int
	side  map[events.GroupIndex]bool // groups that are no part of the prefix
	only  map[events.BlockHash]bool  // nil: all names are counted
}

func newCopies() copies {
	return copies{count: map[copyOf]int{}, total: map[events.BlockHash]int{}, side: map[events.GroupIndex]bool{}}
}

// of returns the copies of some names.
func (h *copies) of(names map[events.BlockHash]bool) copies {
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

// apply counts what an event stores and removes.
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

// changes lists events that store or remove so many copies of each, if that is a positive number.
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

// knowledge is what can be had of the messages up to a cursor.
type knowledge struct {
	decoder *events.Decoder // has read them
	held    copies          // what the engine held at the cursor, as far as its replay buffer says
}

// maxLearned bounds the blocks that are counted while learning, in 100 MB of memory. An engine that holds more is not
// learned from.
const maxLearned = 1 << 20

// errHoldsMore: the engine holds more than maxLearned blocks.
var errHoldsMore = errors.New("the engine holds too many blocks to learn from")

// lessonTries is how often a message that a replay left out is asked for; lessonPatience is how many times as long as
// for one answer may be waited for all of them.
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
		k := &knowledge{decoder: r.cfg.Decoder.(Learner).Blank(), held: newCopies()} // the machine asks only then
		err := k.learn(to, func(from events.EngineSeq, give func(Frame) bool) error {
			return askReplay(ctx, r.cfg, from, give)
		})
		if errors.Is(err, errOtherEngine) || errors.Is(err, errHoldsMore) {
			k = nil
		}
		l.out <- k
	}()
}

// errOtherEngine: the message at the cursor is not the one that was taken.
var errOtherEngine = errors.New("another engine answers")

// errLearned ends a replay that has come to the cursor.
var errLearned = errors.New("the cursor is reached")

// learn has the decoder read an engine's messages up to one of them. replay asks for all from a message on, and
// gives them until that wants no more. A ROUTER socket drops what its queue does not take, so what is missing is asked
// for again: each answer brings the messages that follow those before. What never comes is passed over. After an error
// the decoder has read a part, which is better than nothing, unless it is errOtherEngine or errHoldsMore.
func (k *knowledge) learn(to events.Cursor, replay func(events.EngineSeq, func(Frame) bool) error) error {
	next, known := events.EngineSeq(0), false // the message that is to come; not known: the oldest that the engine has
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
			_ = eachEvent(k.decoder, f.Payload, func(e *events.Event) { // an error was counted when it was taken
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
