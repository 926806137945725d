package shared

import (
	"errors"
	"math"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// A message is a sequence of MessagePack values: version, kind, the sender's origin, and the values of its kind.
// Versions and kinds are wire constants. A message of another version is counted and skipped.
const wireVersion = 1

const (
	kindPublished = 1 // array of changes, from the writer of the entries
	kindProposed  = 2 // array of changes, to the writer of the entries
	// ready, ask, leaves, answers, array of [owner, last number, missing numbers, entries, sum of hashes]
	kindBeat = 3
	kindAsk  = 4 // owner, id, bodies
	// owner, id, part, parts, first, last, the sender's last number, array of pairs of an entry's number (as a
	// difference) and hash, array of pairs of a hole's first number and length less one
	kindSummary = 5
	kindWant    = 6 // owner, array of numbers (as differences)
	kindRecall  = 7 // id
	kindMemory  = 8 // id, part, parts, array of pairs of an index of Config.Memories and an item
)

// A change has a kind, an owner, a number, and the table's state. Kinds are wire constants.
const (
	changeWhole = 1 // the whole entry
	changeState = 2 // its changing fields
	changeEnd   = 3 // no state
)

const (
	maxMessage = 4 << 20 // bytes of a received message
	maxSeq     = 1 << 62
	maxParts   = 1 << 16
)

var (
	errMalformed = errors.New("malformed message")
	errVersion   = errors.New("message of another version")
)

// change is a change of an entry.
type change[E any] struct {
	kind  uint64
	key   Key
	state E
	hash  uint64
}

// digest summarizes the published entries of an owner.
type digest struct {
	owner, last, missing uint64
	count                int
	sum                  uint64
}

type beat struct {
	ready  bool
	ask    bool // ready nodes answer with a beat to the sender
	leaves bool // the sender's last message
	answer bool // the answer to a beat with that flag, with all owners
	owners []digest
}

// summary is a part of a node's state of an owner, for the numbers from first to last.
type summary struct {
	owner, id, part, parts uint64
	first, last            uint64
	top                    uint64 // the sender's greatest number
	live                   []live // the sender's entries, ascending
	holes                  spans  // unknown numbers of the sender up to top
}

type live struct{ seq, hash uint64 }

type item struct {
	memory int
	data   []byte
}

type message[E any] struct {
	kind, from uint64
	changes    []change[E]
	beat       beat
	owner, id  uint64
	bodies     bool // of kindAsk: the sender starts without an entry of the owner
	summary    summary
	wants      []uint64
	part       uint64
	parts      uint64
	items      []item
}

func appendHead(b []byte, kind, from uint64) []byte {
	return msgp.AppendUint(msgp.AppendUint(msgp.AppendUint(b, wireVersion), kind), from)
}

func appendBeat(b []byte, m *beat) []byte {
	b = msgp.AppendBool(msgp.AppendBool(b, m.ready), m.ask)
	b = msgp.AppendArrayHead(msgp.AppendBool(msgp.AppendBool(b, m.leaves), m.answer), len(m.owners))
	for _, d := range m.owners {
		b = msgp.AppendUint(msgp.AppendUint(msgp.AppendArrayHead(b, 5), d.owner), d.last)
		b = msgp.AppendUint(msgp.AppendUint(msgp.AppendUint(b, d.missing), uint64(d.count)), d.sum)
	}
	return b
}

func appendSummary(b []byte, s *summary) []byte {
	for _, v := range []uint64{s.owner, s.id, s.part, s.parts, s.first, s.last, s.top} {
		b = msgp.AppendUint(b, v)
	}
	b = msgp.AppendArrayHead(b, 2*len(s.live))
	before := s.first - 1
	for _, l := range s.live {
		b = msgp.AppendUint(msgp.AppendUint(b, l.seq-before), l.hash)
		before = l.seq
	}
	b = msgp.AppendArrayHead(b, 2*len(s.holes))
	for _, p := range s.holes {
		b = msgp.AppendUint(msgp.AppendUint(b, p.first), p.last-p.first)
	}
	return b
}

func appendNumbers(b []byte, list []uint64) []byte {
	b = msgp.AppendArrayHead(b, len(list))
	before := uint64(0)
	for _, n := range list {
		b = msgp.AppendUint(b, n-before)
		before = n
	}
	return b
}

func appendPart(b []byte, id, part, parts uint64) []byte {
	return msgp.AppendUint(msgp.AppendUint(msgp.AppendUint(b, id), part), parts)
}

// Reader reads required values. After the first invalid value, Bad is set and all values are zero.
type Reader struct {
	msgp.Reader
	Bad bool
}

// OK sets Bad unless ok.
func (r *Reader) OK(ok bool) bool {
	r.Bad = r.Bad || !ok
	return !r.Bad
}

// Number reads an integer from 0 to most.
func (r *Reader) Number(most uint64) uint64 {
	v, ok := r.Uint(most)
	if !r.OK(ok) {
		return 0
	}
	return v
}

// Flag reads a boolean.
func (r *Reader) Flag() bool {
	v, ok := r.Bool()
	return r.OK(ok) && v
}

// Text reads a string of at most most bytes.
func (r *Reader) Text(most int) string {
	s, ok := r.Str()
	if !r.OK(ok && len(s) <= most) {
		return ""
	}
	return string(s)
}

// List reads the head of an array, of n elements unless n is negative.
func (r *Reader) List(n int) int {
	got, ok := r.Array()
	if !r.OK(ok && (n < 0 || got == n)) {
		return 0
	}
	return got
}

// Pairs reads the head of an array of pairs.
func (r *Reader) Pairs() int {
	n := r.List(-1)
	r.OK(n%2 == 0)
	return n / 2
}

func (r *Reader) key() (k Key) {
	k = Key{r.Number(math.MaxUint64), r.Number(maxSeq)}
	r.OK(k.Seq > 0)
	return k
}

func (r *Reader) summary() (s summary) {
	s.owner, s.id = r.Number(math.MaxUint64), r.Number(math.MaxUint64)
	s.part, s.parts = r.Number(maxParts), r.Number(maxParts)
	s.first, s.last, s.top = r.Number(maxSeq), r.Number(maxSeq), r.Number(maxSeq)
	r.OK(s.part < s.parts && s.first > 0 && s.first <= s.last)
	before, end := s.first-1, min(s.last, s.top)
	for range r.Pairs() {
		l := live{before + r.Number(maxSeq), r.Number(math.MaxUint64)}
		if !r.OK(l.seq > before && l.seq <= end) {
			return s
		}
		s.live = append(s.live, l)
		before = l.seq
	}
	before, at := s.first-1, 0
	for i := range r.Pairs() {
		p := span{first: r.Number(maxSeq)}
		p.last = p.first + r.Number(maxSeq)
		for at < len(s.live) && s.live[at].seq < p.first {
			at++
		}
		if !r.OK(p.first > before && (i == 0 || p.first > before+1) && p.last <= end &&
			(at == len(s.live) || s.live[at].seq > p.last)) {
			return s
		}
		s.holes = append(s.holes, p)
		before = p.last
	}
	return s
}

// decode decodes a message. Of a message of this node, only the head is decoded.
func (m *Machine[E]) decode(data []byte) (*message[E], error) {
	if len(data) > maxMessage {
		return nil, errMalformed
	}
	r := &Reader{Reader: msgp.Reader{Data: data}}
	switch v := r.Number(math.MaxUint64); {
	case r.Bad:
		return nil, errMalformed
	case v != wireVersion:
		return nil, errVersion
	}
	x := &message[E]{kind: r.Number(math.MaxUint64), from: r.Number(math.MaxUint64)}
	if x.from == m.cfg.Origin && !r.Bad {
		return x, nil
	}
	r.OK(x.from != 0)
	switch x.kind {
	case kindPublished, kindProposed:
		n := r.List(-1)
		x.changes = make([]change[E], 0, min(n, maxChanges))
		for range n {
			c := change[E]{kind: r.Number(changeEnd), key: r.key()}
			if r.OK(c.kind > 0) && c.kind != changeEnd {
				c.state, c.hash = m.cfg.Read(r, c.key, c.kind == changeWhole)
			}
			if x.changes = append(x.changes, c); r.Bad {
				break
			}
		}
	case kindBeat:
		b := &x.beat
		b.ready, b.ask, b.leaves, b.answer = r.Flag(), r.Flag(), r.Flag(), r.Flag()
		for range r.List(-1) {
			r.List(5)
			d := digest{owner: r.Number(math.MaxUint64), last: r.Number(maxSeq), missing: r.Number(maxSeq),
				count: int(r.Number(math.MaxInt32)), sum: r.Number(math.MaxUint64)}
			if b.owners = append(b.owners, d); r.Bad {
				break
			}
		}
	case kindAsk:
		x.owner, x.id, x.bodies = r.Number(math.MaxUint64), r.Number(math.MaxUint64), r.Flag()
	case kindSummary:
		x.summary = r.summary()
	case kindWant:
		x.owner = r.Number(math.MaxUint64)
		before := uint64(0)
		for range r.List(-1) {
			n := r.Number(maxSeq)
			if before += n; !r.OK(n > 0 && before <= maxSeq && len(x.wants) < partPoints) {
				break
			}
			x.wants = append(x.wants, before)
		}
	case kindRecall:
		x.id = r.Number(math.MaxUint64)
	case kindMemory:
		x.id, x.part, x.parts = r.Number(math.MaxUint64), r.Number(maxParts), r.Number(maxParts)
		r.OK(x.part < x.parts)
		for range r.Pairs() {
			i := int(r.Number(math.MaxUint8))
			data, ok := r.Bin()
			if !r.OK(ok && i < len(m.cfg.Memories)) {
				break
			}
			x.items = append(x.items, item{i, data})
		}
	default:
		r.Bad = true
	}
	if r.Bad || r.Left() != 0 {
		return nil, errMalformed
	}
	return x, nil
}
