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

// A shim that goes on from its predecessor's cursor has a decoder that remembers nothing: of a block whose parent was
// stored before the cursor it does not know the cache salt. When a replay has brought the machine up to date, a second
// conversation with the replay socket reads the messages up to the cursor and feeds them to a decoder of their own. It
// publishes nothing, and whatever becomes of it neither clears nor delays anything.
//
// Meanwhile messages are published as they are understood, and recorded. The decoder that has learned reads the record
// too; what it hashes otherwise is removed and stored again, and the machine goes on with what that decoder remembers.

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
	skip      uint32         // how many of its events a shim before this one has published
	published []events.Event // they share the queue's memory
}

// learningStarts is how often learning begins: each replay that becomes due interrupts it.
const learningStarts = 5

func (l *learning) underWay() bool { return l != nil && l.running }

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
func (m *Machine) record(payload []byte, skip uint32, published []entry) {
	l := m.learning
	if l == nil {
		return
	}
	r := recorded{payload: payload, skip: skip}
	l.spare -= len(payload) + frameSize
	for i := range published {
		r.published = append(r.published, published[i].event)
		l.spare -= published[i].memory()
	}
	if l.record = append(l.record, r); l.spare < 0 {
		m.learning = nil
	}
}

// WantsLearning tells, once each time it is due, that the messages up to a cursor are to be learned from. Learned ends
// it.
func (m *Machine) WantsLearning() (to events.Cursor, ok bool) {
	l := m.learning
	if l == nil || !l.ready || l.running || m.replaying || m.snapshot != notWanted {
		return to, false
	}
	if l.starts++; l.starts > learningStarts {
		m.learning = nil
		return to, false
	}
	l.running = true
	return l.cursor, true
}

// Learned takes a decoder that has read what could be had of the messages up to the cursor. nil says that it is of no
// use.
func (m *Machine) Learned(d *events.Decoder) {
	l := m.learning
	if !l.underWay() {
		return
	}
	m.learning = nil
	if d == nil {
		return
	}
	corrections := l.corrections(d)
	for i, e := range corrections {
		cursor := events.Cursor{} // a shim that finds a part of them in the log begins from nothing
		if i == len(corrections)-1 {
			cursor = m.taken
		}
		m.push(e, cursor)
	}
	if len(corrections) > 0 {
		m.counts.Corrections += uint64(len(corrections))
		m.Delayed()
	}
	l.learner.Adopt(d)
}

// copyOf names the copies of a block that the index tells apart.
type copyOf struct {
	name  events.BlockHash
	tier  events.Tier
	group events.GroupIndex
}

// corrections has a decoder read the record, and lists the events that put right what it hashes otherwise.
//
// The index counts a name's copies, and takes a name at one place at a time: so all copies of blocks at a wrong place
// are removed before any is stored again. A copy that is announced without hashes goes where its name is, so it comes
// after those with hashes.
func (l *learning) corrections(d *events.Decoder) []events.Event {
	wrong := map[events.BlockHash]bool{}
	var history, hashed, bare []events.Event
	for _, r := range l.record {
		var read []events.Event
		if r.payload != nil {
			if msg, err := d.Decode(r.payload); err == nil {
				read = msg.Events[min(int(r.skip), len(msg.Events)):]
			}
		}
		for i, e := range r.published {
			if len(read) == len(r.published) && otherwise(&e, &read[i], wrong) {
				e = read[i]
				e.Blocks, e.Locals = slices.Clone(e.Blocks), slices.Clone(e.Locals)
				for _, name := range e.Blocks {
					wrong[name] = true
				}
			}
			history = append(history, e)
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	stored, removed := map[copyOf]int{}, map[copyOf]int{}
	for _, e := range history {
		if e.Kind == events.Cleared {
			in := func(tier events.Tier) bool { return e.Tier == events.AllTiers || e.Tier == tier }
			gone := func(c copyOf, _ int) bool { return in(c.tier) }
			maps.DeleteFunc(stored, gone)
			maps.DeleteFunc(removed, gone)
			of := func(e events.Event) bool { return in(e.Tier) }
			hashed, bare = slices.DeleteFunc(hashed, of), slices.DeleteFunc(bare, of)
			continue
		}
		e.Blocks = slices.Clone(e.Blocks)
		if len(e.Locals) == 0 {
			e.Blocks = slices.DeleteFunc(e.Blocks, func(name events.BlockHash) bool { return !wrong[name] })
		}
		if len(e.Blocks) == 0 || !wrong[e.Blocks[0]] {
			continue
		}
		count := stored
		switch {
		case e.Kind == events.Removed:
			count = removed
		case len(e.Locals) > 0:
			hashed = append(hashed, e)
		default:
			bare = append(bare, e)
		}
		for _, name := range e.Blocks {
			c := copyOf{name, e.Tier, e.Group}
			if e.Kind == events.Removed && removed[c] >= stored[c] {
				continue // of a copy that was stored before the record begins
			}
			count[c]++
		}
	}
	held := map[copyOf]int{}
	for c, n := range stored {
		held[c] = n - removed[c]
	}
	return slices.Concat(removals(held), hashed, bare, removals(removed))
}

// otherwise reports whether blocks that were stored as published belong at another place, as read says.
func otherwise(published, read *events.Event, wrong map[events.BlockHash]bool) bool {
	if len(published.Locals) == 0 {
		return false
	}
	return published.HasParent != read.HasParent || read.HasParent && wrong[read.Parent] ||
		!slices.Equal(published.Locals, read.Locals)
}

// removals lists events that remove so many copies of each.
func removals(copies map[copyOf]int) (list []events.Event) {
	order := slices.SortedFunc(maps.Keys(copies), func(a, b copyOf) int {
		return cmp.Or(cmp.Compare(a.tier, b.tier), cmp.Compare(a.group, b.group), cmp.Compare(a.name, b.name))
	})
	for _, c := range order {
		for range copies[c] {
			if last := len(list) - 1; last >= 0 && list[last].Tier == c.tier && list[last].Group == c.group &&
				len(list[last].Blocks) < events.MaxBlocksPerEvent {
				list[last].Blocks = append(list[last].Blocks, c.name)
				continue
			}
			list = append(list, events.Event{
				Kind: events.Removed, Tier: c.tier, Group: c.group, Blocks: []events.BlockHash{c.name},
			})
		}
	}
	return list
}

// lesson is one attempt of the shell to learn.
type lesson struct {
	learned chan *events.Decoder
	cancel  context.CancelFunc
}

// lessonTries is how often a message that a replay left out is asked for; lessonPatience is how many times as long as
// for one answer may be waited for all of them.
const (
	lessonTries    = 3
	lessonPatience = 5
)

func (r *runner) startLearning(ctx context.Context, to events.Cursor) {
	r.endLearning()
	ctx, cancel := context.WithTimeout(ctx, lessonPatience*r.cfg.ReplayTimeout)
	l := &lesson{learned: make(chan *events.Decoder, 1), cancel: cancel}
	r.lesson = l
	go func() {
		defer cancel()
		d := r.cfg.Decoder.(Learner).Blank() // the machine asks only then
		err := learn(d, to, func(from events.EngineSeq, give func(Frame) bool) error {
			return askReplay(ctx, r.cfg, from, give)
		})
		if errors.Is(err, errOtherEngine) {
			d = nil
		}
		l.learned <- d
	}()
}

func (r *runner) endLearning() {
	if r.lesson != nil {
		r.lesson.cancel()
		r.lesson = nil
	}
}

// errOtherEngine: the message at the cursor is not the one that was taken.
var errOtherEngine = errors.New("another engine answers")

// errLearned ends a replay that has come to the cursor.
var errLearned = errors.New("the cursor is reached")

// learn has a decoder read an engine's messages up to one of them. replay asks for all from a message on, and gives
// them until that wants no more. A ROUTER socket drops what its queue does not take, so what is missing is asked for
// again: each answer brings the messages that follow those before. What never comes is passed over. After an error the
// decoder has read a part, which is better than nothing, unless it is errOtherEngine.
func learn(d *events.Decoder, to events.Cursor, replay func(events.EngineSeq, func(Frame) bool) error) error {
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
			_, _ = d.Decode(f.Payload) // what cannot be read was counted when it was taken
			next, known, tries = f.Seq+1, true, 0
			if f.Seq == to.Seq {
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
