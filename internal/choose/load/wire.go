package load

import (
	"errors"
	"math"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/littleendian"
	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// A message is a sequence of MessagePack values: version, kind, the sender's origin, and what the kind has. Versions
// and kinds are wire constants. A message of another version is passed over and counted.
const wireVersion = 1

const (
	kindEvents = 1 // name, group, number, array of events
	kindBeat   = 2 // ready, ask, answers, array of
	//   [name, group, requests, tokens, outputs, hash, last own key's number, last message's number, calm]
	kindSummary = 3 // name, group, to, id, part, parts, reply, last message's number, array of origins, array of shares
	kindRecall  = 4 // name, group, to, id
	kindPast    = 5 // name, group, to, id, part, parts, array of requests, as [appendPast] writes them
	// name, group, to, id of a summary, array of origins each with a number: the sender had all messages of events of
	// that origin up to it before it was sent the summary that this one answers
	kindVersions = 6
)

const (
	maxMessage  = 4 << 20 // bytes, of what is read
	maxName     = 255     // bytes of a model, group or worker
	maxSeq      = 1 << 62
	bookingSize = 12 // values of a booked event
)

var (
	errMalformed = errors.New("malformed message")
	errVersion   = errors.New("message of another version")
)

// event is one change of one request.
type event struct {
	kind change
	record
	left time.Duration // until it expires, when the event was sent
}

// beat is what a node says of all its tables now and then.
type beat struct {
	ready, ask bool   // ask: others answer at once
	answers    uint64 // who has asked; 0: nobody
	models     []modelBeat
}

type modelBeat struct {
	Model
	Digest
	last uint64 // number of the sender's last own key
	sent uint64 // number of its last message of events
	calm bool   // nothing has changed there for a moment
}

// summary is one part of what a table has and has seen. A question for past requests, and the parts of its answer, have
// the first four.
type summary struct {
	to, id      uint64
	part, parts uint64
	reply       bool     // it answers one of the receiver's; else the receiver's is wanted
	sent        uint64   // the last message of events that it makes unnecessary
	origins     []uint64 // all of which anything was seen, in the first part
	shares      []share
}

// share is what a table says of the numbers from first to last of one origin: those in spans were seen, and of these
// the live ones are under way. They are ascending.
type share struct {
	origin      uint64
	first, last uint64
	spans       []span
	live        []live
}

type live struct{ seq, digest uint64 }

// version is up to which message of events of a node all have come.
type version struct{ origin, number uint64 }

type message struct {
	kind   uint64
	from   uint64
	model  Model
	number uint64 // of a message of events, among those of the sender and model
	events []event
	beat
	summary
	past     []Request
	versions []version
}

func appendHead(b []byte, kind, from uint64) []byte {
	return msgp.AppendUint(msgp.AppendUint(msgp.AppendUint(b, wireVersion), kind), from)
}

func appendModel(b []byte, m Model) []byte { return msgp.AppendStr(msgp.AppendStr(b, m.Name), m.Group) }

// appendState appends a state in the one form that it has.
func appendState(b []byte, s *state) []byte {
	b = msgp.AppendArrayHead(b, 5)
	b = msgp.AppendBool(msgp.AppendBool(b, s.done), s.gone)
	b = msgp.AppendArrayHead(b, 2*len(s.outs))
	for _, o := range s.outs {
		b = msgp.AppendUint(msgp.AppendUint(b, o.origin), uint64(o.n))
	}
	if s.mark.after == 0 {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendUint(msgp.AppendArrayHead(b, 3), uint64(s.mark.after))
		b = msgp.AppendUint(msgp.AppendUint(b, s.mark.origin), s.mark.weight)
	}
	b = msgp.AppendArrayHead(b, 2*len(s.runs))
	for _, r := range s.runs {
		b = msgp.AppendUint(msgp.AppendUint(b, uint64(r.from)), r.weight)
	}
	return b
}

// appendEvent appends a change of r: all of it if it is booked, its state if it is updated, its key if it is freed.
func appendEvent(b []byte, kind change, r *record, left time.Duration) []byte {
	n := map[change]int{booked: bookingSize, updated: 5, freed: 3}[kind]
	b = msgp.AppendUint(msgp.AppendArrayHead(b, n), uint64(kind))
	b = msgp.AppendUint(msgp.AppendUint(b, r.key.Origin), r.key.Seq)
	if kind == freed {
		return b
	}
	b = appendState(msgp.AppendUint(b, uint64(max(left, 0).Milliseconds())), &r.state)
	if kind == updated {
		return b
	}
	b = msgp.AppendStr(msgp.AppendStr(b, r.id), string(r.rank.Instance))
	b = msgp.AppendUint(msgp.AppendUint(b, uint64(r.rank.Rank)), uint64(r.private))
	b = msgp.AppendUint(msgp.AppendUint(b, uint64(r.tokens)), uint64(r.expected))
	return appendHashes(b, r.hashes)
}

func appendHashes(b []byte, list []events.SeqHash) []byte {
	return littleendian.Append(msgp.AppendBinHead(b, 8*len(list)), list)
}

// appendPast appends a past request.
func appendPast(b []byte, q *Request) []byte {
	b = msgp.AppendUint(msgp.AppendUint(msgp.AppendArrayHead(b, 8), q.Key.Origin), q.Key.Seq)
	b = msgp.AppendUint(b, uint64(min(max(q.Age.Milliseconds(), 0), math.MaxUint32)))
	b = msgp.AppendStr(msgp.AppendBool(b, q.PrefillDone), string(q.Rank.Instance))
	b = msgp.AppendUint(msgp.AppendUint(b, uint64(q.Rank.Rank)), uint64(q.Private))
	return appendHashes(b, q.Hashes)
}

func appendEvents(b []byte, number uint64, n int, events []byte) []byte {
	return append(msgp.AppendArrayHead(msgp.AppendUint(b, number), n), events...)
}

func appendBeat(b []byte, m *beat) []byte {
	b = msgp.AppendUint(msgp.AppendBool(msgp.AppendBool(b, m.ready), m.ask), m.answers)
	b = msgp.AppendArrayHead(b, len(m.models))
	for i := range m.models {
		d := &m.models[i]
		b = appendModel(msgp.AppendArrayHead(b, 9), d.Model)
		b = msgp.AppendUint(msgp.AppendUint(b, uint64(d.Requests)), uint64(d.PrefillTokens))
		b = msgp.AppendUint(msgp.AppendUint(msgp.AppendUint(b, d.Outputs), d.Hash), d.last)
		b = msgp.AppendBool(msgp.AppendUint(b, d.sent), d.calm)
	}
	return b
}

func appendPart(b []byte, to, id, part, parts uint64) []byte {
	return msgp.AppendUint(msgp.AppendUint(msgp.AppendUint(msgp.AppendUint(b, to), id), part), parts)
}

func appendSummary(b []byte, s *summary) []byte {
	b = appendPart(b, s.to, s.id, s.part, s.parts)
	b = msgp.AppendArrayHead(msgp.AppendUint(msgp.AppendBool(b, s.reply), s.sent), len(s.origins))
	for _, o := range s.origins {
		b = msgp.AppendUint(b, o)
	}
	b = msgp.AppendArrayHead(b, len(s.shares))
	for i := range s.shares {
		h := &s.shares[i]
		b = msgp.AppendUint(msgp.AppendUint(msgp.AppendUint(msgp.AppendArrayHead(b, 5), h.origin), h.first), h.last)
		b = msgp.AppendArrayHead(b, 2*len(h.spans))
		for _, p := range h.spans {
			b = msgp.AppendUint(msgp.AppendUint(b, p.first), p.last-p.first)
		}
		b = msgp.AppendArrayHead(b, 2*len(h.live))
		before := h.first - 1
		for _, l := range h.live {
			b = msgp.AppendUint(msgp.AppendUint(b, l.seq-before), l.digest)
			before = l.seq
		}
	}
	return b
}

func appendVersions(b []byte, to, id uint64, list []version) []byte {
	b = msgp.AppendArrayHead(msgp.AppendUint(msgp.AppendUint(b, to), id), 2*len(list))
	for _, v := range list {
		b = msgp.AppendUint(msgp.AppendUint(b, v.origin), v.number)
	}
	return b
}

// reader reads values of which each must be there. After the first that is not, bad is set and all are zero.
type reader struct {
	msgp.Reader
	bad bool
}

func (r *reader) ok(ok bool) bool {
	r.bad = r.bad || !ok
	return !r.bad
}

func (r *reader) uint(most uint64) uint64 {
	v, ok := r.Uint(most)
	if !r.ok(ok) {
		return 0
	}
	return v
}

func (r *reader) bool() bool {
	v, ok := r.Bool()
	return r.ok(ok) && v
}

func (r *reader) str(most int) string {
	s, ok := r.Str()
	if !r.ok(ok && len(s) <= most) {
		return ""
	}
	return string(s)
}

// array reads the head of an array, of n elements unless n is negative.
func (r *reader) array(n int) int {
	got, ok := r.Array()
	if !r.ok(ok && (n < 0 || got == n)) {
		return 0
	}
	return got
}

// pairs reads the head of an array of pairs.
func (r *reader) pairs() int {
	n := r.array(-1)
	r.ok(n%2 == 0)
	return n / 2
}

// decode reads a message. Of one that this origin has sent only the head is read.
func decode(data []byte, self uint64) (*message, error) {
	if len(data) > maxMessage {
		return nil, errMalformed
	}
	r := &reader{Reader: msgp.Reader{Data: data}}
	switch v := r.uint(math.MaxUint64); {
	case r.bad:
		return nil, errMalformed
	case v != wireVersion:
		return nil, errVersion
	}
	m := &message{kind: r.uint(math.MaxUint64), from: r.uint(math.MaxUint64)}
	if m.from == self && !r.bad {
		return m, nil
	}
	if m.kind != kindBeat {
		m.model = r.model()
	}
	switch m.kind {
	case kindEvents:
		m.number = r.uint(maxSeq)
		n := r.array(-1)
		m.events = make([]event, 0, min(n, maxEvents))
		for range n {
			if m.events = append(m.events, r.event()); r.bad {
				break
			}
		}
	case kindBeat:
		m.ready, m.ask, m.answers = r.bool(), r.bool(), r.uint(math.MaxUint64)
		for range r.array(-1) {
			r.array(9)
			d := modelBeat{Model: r.model()}
			d.Requests, d.PrefillTokens = int(r.uint(math.MaxInt32)), int64(r.uint(math.MaxInt64))
			d.Outputs, d.Hash, d.last = r.uint(math.MaxUint64), r.uint(math.MaxUint64), r.uint(maxSeq)
			d.sent, d.calm = r.uint(maxSeq), r.bool()
			if m.models = append(m.models, d); r.bad {
				break
			}
		}
	case kindSummary:
		m.summary = r.summary()
	case kindRecall:
		m.to, m.id = r.uint(math.MaxUint64), r.uint(math.MaxUint64)
	case kindVersions:
		m.to, m.id = r.uint(math.MaxUint64), r.uint(math.MaxUint64)
		r.ok(m.id > 0)
		for range r.pairs() {
			if m.versions = append(m.versions, version{r.uint(math.MaxUint64), r.uint(maxSeq)}); r.bad {
				break
			}
		}
	case kindPast:
		m.to, m.id, m.part, m.parts = r.part()
		for range r.array(-1) {
			if m.past = append(m.past, r.past()); r.bad {
				break
			}
		}
	default:
		r.bad = true
	}
	if r.bad || r.Left() != 0 {
		return nil, errMalformed
	}
	return m, nil
}

func (r *reader) model() Model { return Model{r.str(maxName), r.str(maxName)} }

func (r *reader) key() (k Key) {
	k = Key{r.uint(math.MaxUint64), r.uint(maxSeq)}
	r.ok(k.Seq > 0)
	return k
}

func (r *reader) event() (e event) {
	n := r.array(-1)
	e.kind = change(r.uint(uint64(freed)))
	switch e.kind {
	case booked:
		r.ok(n == bookingSize)
	case updated:
		r.ok(n == 5)
	case freed:
		r.ok(n == 3)
	default:
		r.bad = true
	}
	e.key = r.key()
	if e.kind == freed {
		return e
	}
	e.left = r.milliseconds()
	e.state = r.state()
	if e.kind == updated {
		return e
	}
	e.id = r.str(maxID)
	e.rank.Instance = events.WorkerID(r.str(maxName))
	e.rank.Rank = events.Rank(r.uint(math.MaxUint32))
	e.private = uint32(r.uint(maxPrompt))
	e.tokens = int64(r.uint(maxTokens))
	e.expected = uint32(r.uint(math.MaxUint32))
	r.ok(e.id != "" && e.rank.Instance != "")
	e.hashes = r.hashes()
	return e
}

func (r *reader) milliseconds() time.Duration {
	return time.Duration(r.uint(math.MaxUint32)) * time.Millisecond
}

func (r *reader) hashes() (list []events.SeqHash) {
	if r.bad {
		return nil
	}
	bin, ok := r.Bin()
	if r.ok(ok && len(bin)%8 == 0 && len(bin)/8 <= maxPrompt) && len(bin) > 0 {
		list = make([]events.SeqHash, len(bin)/8)
		littleendian.Read(list, bin)
	}
	return list
}

func (r *reader) past() (q Request) {
	r.array(8)
	q = Request{Key: r.key(), Age: r.milliseconds(), PrefillDone: r.bool()}
	q.Rank = events.RankKey{Instance: events.WorkerID(r.str(maxName)), Rank: events.Rank(r.uint(math.MaxUint32))}
	r.ok(q.Rank.Instance != "")
	q.Private, q.Hashes = int(r.uint(math.MaxUint32)), r.hashes()
	return q
}

// part reads for whom a message is, what it answers, and which part it is of how many.
func (r *reader) part() (to, id, part, parts uint64) {
	to, id, part, parts = r.uint(math.MaxUint64), r.uint(math.MaxUint64), r.uint(maxParts), r.uint(maxParts)
	r.ok(part < parts)
	return to, id, part, parts
}

func (r *reader) state() (s state) {
	r.array(5)
	s.done, s.gone = r.bool(), r.bool()
	total := uint64(0)
	for i := range r.pairs() {
		o := outCount{r.uint(math.MaxUint64), uint32(r.uint(maxOutputs))}
		if !r.ok(o.n > 0 && (i == 0 || s.outs[i-1].origin < o.origin)) {
			return s
		}
		s.outs = append(s.outs, o)
		total += uint64(o.n)
	}
	if r.bad || !r.Null() {
		r.array(3)
		s.mark = mark{uint32(r.uint(min(total, math.MaxUint32))), r.uint(math.MaxUint64), r.uint(one)}
		r.ok(s.mark.after > 0)
	}
	for i := range r.pairs() {
		v := run{uint32(r.uint(maxPrompt)), r.uint(one)}
		if !r.ok(i == 0 || s.runs[i-1].from < v.from) {
			return s
		}
		s.runs = append(s.runs, v)
	}
	return s
}

func (r *reader) summary() (s summary) {
	s.to, s.id, s.part, s.parts = r.part()
	s.reply, s.sent = r.bool(), r.uint(maxSeq)
	for range r.array(-1) {
		s.origins = append(s.origins, r.uint(math.MaxUint64))
	}
	for range r.array(-1) {
		r.array(5)
		h := share{origin: r.uint(math.MaxUint64), first: r.uint(math.MaxUint64), last: r.uint(math.MaxUint64)}
		r.ok(h.first > 0 && h.first <= h.last)
		before := h.first - 1
		for i := range r.pairs() {
			p := span{first: r.uint(maxSeq)}
			n := r.uint(maxSeq)
			p.last = p.first + n
			apart := p.first > before && (i == 0 || p.first > before+1)
			if !r.ok(apart && p.first <= p.last && p.last <= min(h.last, maxSeq)) {
				return s
			}
			h.spans = append(h.spans, p)
			before = p.last
		}
		before = h.first - 1
		for range r.pairs() {
			delta := r.uint(maxSeq)
			l := live{before + delta, r.uint(math.MaxUint64)}
			if !r.ok(l.seq > before && l.seq <= h.last && (&seen{spans: h.spans}).has(l.seq)) {
				return s
			}
			h.live = append(h.live, l)
			before = l.seq
		}
		if s.shares = append(s.shares, h); r.bad {
			return s
		}
	}
	return s
}
