package recording

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/kvatlas/kvatlas/internal/base/littleendian"
)

// A batch is a message of the stream. Numbers are unsigned varints, unless noted.
//
//	┌──────────────┬───────────┬──────────────┬────────────────────┬───────────────────┐
//	│ magic "KVRC" │ version 1 │ base u64 LE  │ dropped before     │ records           │
//	│ 4 bytes      │ 1 byte    │ ms since 1970│ this batch         │ …                 │
//	├──────────────┴───────────┴──────────────┴────────────────────┴───────────────────┤
//	│ CRC-32C of all bytes before, u32 LE                                              │
//	└──────────────────────────────────────────────────────────────────────────────────┘
//
//	record:  kind (1 byte), length of the body, body
//
// A text (kind 1) is a model, a policy or a worker. Later records of the batch refer to the texts by their order, from
// 1; 0 is the empty text. Times are milliseconds after the base. Names are u64 LE. A reader skips unknown kinds, and
// rejects other versions.
const (
	magic   = "KVRC"
	version = 1

	kindText    = 1
	kindRequest = 2
	kindEnd     = 3
	kindReport  = 4
	kindAnswer  = 5

	headBytes = len(magic) + 1 + 8
	tailBytes = 4

	// MaxBatch is the greatest size of a batch, in bytes.
	MaxBatch = 900_000
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrFormat reports a batch that is no batch of this format, or is damaged.
var ErrFormat = errors.New("no batch of a recording")

// ErrVersion reports a batch with the format of a later build.
var ErrVersion = errors.New("the batch has the format of a later build")

// batch is a batch that is being written. The zero value is closed: begin opens it.
type batch struct {
	buf   []byte
	base  int64
	texts map[string]uint64
	body  []byte
	count int // records without texts
	last  int // bytes of the batch before
}

// begin opens the batch.
func (b *batch) begin(base int64, dropped uint64) {
	b.base, b.count = base, 0
	if b.texts == nil {
		b.texts = map[string]uint64{}
	}
	clear(b.texts)
	b.buf = append(append(make([]byte, 0, max(b.last+b.last/4, 4<<10)), magic...), version)
	b.buf = binary.LittleEndian.AppendUint64(b.buf, uint64(base))
	b.buf = binary.AppendUvarint(b.buf, dropped)
}

// end closes the batch and returns its bytes, which the batch uses no more.
func (b *batch) end() []byte {
	out := binary.LittleEndian.AppendUint32(b.buf, crc32.Checksum(b.buf, castagnoli))
	b.buf, b.last = nil, len(out)
	return out
}

// text returns the number of a text, and writes the text before its first use.
func (b *batch) text(s string) uint64 {
	if s == "" {
		return 0
	}
	n, ok := b.texts[s]
	if !ok {
		n = uint64(len(b.texts) + 1)
		b.texts[s] = n
		b.buf = binary.AppendUvarint(append(b.buf, kindText), uint64(len(s)))
		b.buf = append(b.buf, s...)
	}
	return n
}

func (b *batch) add(kind byte) {
	b.buf = binary.AppendUvarint(append(b.buf, kind), uint64(len(b.body)))
	b.buf = append(b.buf, b.body...)
	b.count++
}

// time appends the milliseconds after the base. A time before the base becomes the base.
func (b *batch) time(at int64) []byte {
	return binary.AppendUvarint(b.body[:0], uint64(max(0, at-b.base)))
}

func appendName(b []byte, n Name) []byte { return binary.LittleEndian.AppendUint64(b, uint64(n)) }

func appendAll(b []byte, numbers ...uint64) []byte {
	for _, n := range numbers {
		b = binary.AppendUvarint(b, n)
	}
	return b
}

// Bits of a request's shape: the optional parts, before the flags. A further bit moves the flags, so it needs a new
// version of the format.
const (
	hasSession = 1 << iota
	hasAdapter
	hasEngineHashes
	shapeBits = iota
)

func (b *batch) request(r *Request) {
	model, policy, worker, prefill := b.text(r.Model), b.text(r.Policy), b.text(r.Place.Worker), b.text(r.Prefill.Worker)
	shape := uint64(0)
	if r.Session != 0 {
		shape |= hasSession
	}
	if r.Adapter != 0 {
		shape |= hasAdapter
	}
	if r.EngineHashes {
		shape |= hasEngineHashes
	}
	body := appendName(b.time(r.Time), r.Link)
	body = appendAll(body, uint64(r.Flags)<<shapeBits|shape, model, uint64(r.BlockSize), uint64(r.Span), r.Tokens,
		r.Output, policy, uint64(r.Candidates), r.Cached, r.Computed)
	if r.Session != 0 {
		body = appendName(body, r.Session)
	}
	if r.Adapter != 0 {
		body = appendName(body, r.Adapter)
	}
	if r.Flags&Refused == 0 {
		body = appendPlace(body, worker, &r.Place)
	}
	if r.Flags&Disaggregated != 0 {
		body = appendPlace(body, prefill, &r.Prefill)
	}
	body = binary.AppendUvarint(body, uint64(len(r.Names)))
	b.body = littleendian.Append(body, r.Names)
	b.add(kindRequest)
}

func appendPlace(b []byte, worker uint64, p *Place) []byte {
	return appendAll(b, worker, uint64(p.Rank), uint64(p.Device), uint64(p.Host), uint64(p.Disk), uint64(p.Shared),
		uint64(p.Guessed), p.Requests, p.PrefillTokens, p.Blocks)
}

func (b *batch) ending(e *End) {
	freed := uint64(0)
	if e.Freed {
		freed = 1
	}
	b.body = appendAll(appendName(b.time(e.Time), e.Link), freed, e.Life, e.FirstToken, e.Blocks)
	b.add(kindEnd)
}

func (b *batch) report(r *Report) {
	b.body = appendAll(appendName(b.time(r.Time), r.Link), r.Cached)
	b.add(kindReport)
}

func (b *batch) answer(a *Answer) {
	b.body = appendAll(appendName(b.time(a.Time), a.Link), a.Tokens)
	b.add(kindAnswer)
}

// Record is a record of a batch; exactly one field is set.
type Record struct {
	Request *Request
	End     *End
	Report  *Report
	Answer  *Answer
}

// Decode calls visit with every record of a batch, and returns the number of records that were dropped before it. The
// values belong to the caller. An error of visit ends the batch. Other errors wrap [ErrFormat] or [ErrVersion].
func Decode(data []byte, visit func(Record) error) (dropped uint64, err error) {
	if len(data) < headBytes+tailBytes || len(data) > MaxBatch || string(data[:len(magic)]) != magic {
		return 0, fmt.Errorf("%w: %d bytes", ErrFormat, len(data))
	}
	if v := data[len(magic)]; v != version {
		return 0, fmt.Errorf("%w: version %d, this build reads %d", ErrVersion, v, version)
	}
	whole := data[:len(data)-tailBytes]
	if crc32.Checksum(whole, castagnoli) != binary.LittleEndian.Uint32(data[len(whole):]) {
		return 0, fmt.Errorf("%w: the checksum differs", ErrFormat)
	}
	base := binary.LittleEndian.Uint64(data[len(magic)+1:])
	r := reader{data: whole[headBytes:], base: int64(base & math.MaxInt64), bad: base > math.MaxInt64}
	dropped = r.number()
	for !r.bad && len(r.data) > 0 {
		kind := r.bytes(1)
		body := r.bytes(r.number())
		if r.bad {
			break
		}
		in := reader{data: body, base: r.base, texts: r.texts}
		var record Record
		switch kind[0] {
		case kindText:
			r.texts = append(r.texts, string(body))
			continue
		case kindRequest:
			record.Request = in.request()
		case kindEnd:
			record.End = &End{Time: in.time(), Link: in.name(), Freed: in.upTo(1) == 1, Life: in.number(),
				FirstToken: in.number(), Blocks: in.number()}
		case kindReport:
			record.Report = &Report{Time: in.time(), Link: in.name(), Cached: in.number()}
		case kindAnswer:
			record.Answer = &Answer{Time: in.time(), Link: in.name(), Tokens: in.number()}
		default:
			continue
		}
		if in.bad || len(in.data) > 0 {
			r.bad = true
			break
		}
		if err := visit(record); err != nil {
			return dropped, err
		}
	}
	if r.bad {
		return dropped, fmt.Errorf("%w: a record is invalid", ErrFormat)
	}
	return dropped, nil
}

// reader reads values from the front of data. After an invalid value, bad is set and all values are 0.
type reader struct {
	data  []byte
	base  int64
	texts []string
	bad   bool
}

func (r *reader) number() uint64 {
	n, size := binary.Uvarint(r.data)
	if size <= 0 {
		r.bad, r.data = true, nil
		return 0
	}
	r.data = r.data[size:]
	return n
}

func (r *reader) upTo(most uint64) uint64 {
	n := r.number()
	if n > most {
		r.bad = true
		return 0
	}
	return n
}

func (r *reader) small() uint32 { return uint32(r.upTo(math.MaxUint32)) }

func (r *reader) bytes(n uint64) []byte {
	if n > uint64(len(r.data)) {
		r.bad, r.data = true, nil
		return nil
	}
	b := r.data[:n]
	r.data = r.data[n:]
	return b
}

func (r *reader) name() Name {
	if b := r.bytes(8); b != nil {
		return Name(binary.LittleEndian.Uint64(b))
	}
	return 0
}

func (r *reader) time() int64 { return r.base + int64(r.upTo(math.MaxInt64-uint64(r.base))) }

func (r *reader) text() string {
	n := r.upTo(uint64(len(r.texts)))
	if n == 0 {
		return ""
	}
	return r.texts[n-1]
}

func (r *reader) request() *Request {
	q := &Request{Time: r.time(), Link: r.name()}
	shape := r.number()
	q.Flags, q.EngineHashes = Flags(shape>>shapeBits), shape&hasEngineHashes != 0
	q.Model, q.BlockSize, q.Span, q.Tokens, q.Output = r.text(), r.small(), r.small(), r.number(), r.number()
	q.Policy, q.Candidates, q.Cached, q.Computed = r.text(), r.small(), r.number(), r.number()
	if shape&hasSession != 0 {
		q.Session = r.name()
	}
	if shape&hasAdapter != 0 {
		q.Adapter = r.name()
	}
	if q.Flags&Refused == 0 {
		q.Place = r.place()
	}
	if q.Flags&Disaggregated != 0 {
		q.Prefill = r.place()
	}
	n := r.number()
	if n > uint64(len(r.data))/8 || q.BlockSize == 0 || q.Span == 0 || q.Span%q.BlockSize != 0 {
		r.bad = true
		return q
	}
	q.Names = make([]Name, n)
	littleendian.Read(q.Names, r.bytes(8*n))
	return q
}

func (r *reader) place() Place {
	return Place{Worker: r.text(), Rank: r.small(), Device: r.small(), Host: r.small(), Disk: r.small(),
		Shared: r.small(), Guessed: r.small(), Requests: r.number(), PrefillTokens: r.number(), Blocks: r.number()}
}
