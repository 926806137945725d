package api

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"time"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/vmihailenco/msgpack/v5"
)

// maxNesting is how deep values may lie within each other.
const maxNesting = 32

// sound refuses what is no whole MessagePack value: its lengths must fit into data, so that nobody makes room for more
// than was sent. What follows the value is not looked at.
func sound(data []byte) error {
	if len(data) == 0 {
		return io.EOF
	}
	u := unpacker{b: data}
	return u.skip(maxNesting)
}

var errNested = fmt.Errorf("its values lie more than %d deep", maxNesting)

// unpackReflected decodes any value by reflection. A nil where a time belongs makes the library panic
// (vmihailenco/msgpack v5.4.1 › decode.go, decodeNilValue); here it is an error.
func unpackReflected(data []byte, v any) (err error) {
	if err := sound(data); err != nil {
		return err
	}
	d := msgpack.GetDecoder()
	defer func() {
		if p := recover(); p != nil { // and the decoder is not used again
			err = fmt.Errorf("a nil is where none can be: %v", p)
			return
		}
		msgpack.PutDecoder(d)
	}()
	d.UsePreallocateValues(true)
	d.Reset(bytes.NewReader(data))
	return d.Decode(v)
}

// unpacker reads MessagePack that is written as [packer] writes it, with the fields of a map in any order and numbers
// in any unsigned form. It turns odd at anything else: then what it gave is worth nothing, and reflection decides what
// the bytes mean, or what is wrong with them.
type unpacker struct {
	b   []byte
	odd bool
}

// take returns the next n bytes, or turns odd.
func (u *unpacker) take(n int) []byte {
	if n > len(u.b) {
		u.odd, u.b = true, nil
		return nil
	}
	out := u.b[:n]
	u.b = u.b[n:]
	return out
}

// code returns the next byte.
func (u *unpacker) code() byte {
	if len(u.b) == 0 {
		u.odd = true
		return 0xc1 // which nothing is written as
	}
	c := u.b[0]
	u.b = u.b[1:]
	return c
}

// sized reads an unsigned number of 1, 2, 4 or 8 bytes.
func (u *unpacker) sized(n int) uint64 {
	b := u.take(n)
	if b == nil {
		return 0
	}
	switch n {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.BigEndian.Uint16(b))
	case 4:
		return uint64(binary.BigEndian.Uint32(b))
	}
	return binary.BigEndian.Uint64(b)
}

// length returns what the head of an array or a map says, which takes as many bytes at least.
func (u *unpacker) length(fix, wide byte) int {
	c := u.code()
	n := 0
	switch {
	case c&0xf0 == fix:
		n = int(c & 0x0f)
	case c == wide:
		n = int(u.sized(2))
	case c == wide+1:
		n = int(u.sized(4))
	default:
		u.odd = true
	}
	if n > len(u.b) {
		u.odd = true
	}
	if u.odd {
		return 0
	}
	return n
}

func (u *unpacker) array() int  { return u.length(0x90, 0xdc) }
func (u *unpacker) fields() int { return u.length(0x80, 0xde) }

// key returns a string's bytes, which stay part of the data.
func (u *unpacker) key() []byte {
	c := u.code()
	switch {
	case c&0xe0 == 0xa0:
		return u.take(int(c & 0x1f))
	case c == 0xd9:
		return u.take(int(u.sized(1)))
	case c == 0xda:
		return u.take(int(u.sized(2)))
	case c == 0xdb:
		return u.take(int(u.sized(4)))
	}
	u.odd = true
	return nil
}

func (u *unpacker) text() string { return string(u.key()) }

func (u *unpacker) number() uint64 {
	c := u.code()
	switch {
	case c < 0x80:
		return uint64(c)
	case c >= 0xcc && c <= 0xcf:
		return u.sized(1 << (c - 0xcc))
	}
	u.odd = true
	return 0
}

func (u *unpacker) small() uint32 {
	v := u.number()
	if v >= 1<<32 {
		u.odd = true
	}
	return uint32(v)
}

func (u *unpacker) truth() bool {
	switch u.code() {
	case 0xc2:
		return false
	case 0xc3:
		return true
	}
	u.odd = true
	return false
}

// none takes a nil, if that is what comes.
func (u *unpacker) none() bool {
	if len(u.b) == 0 || u.b[0] != 0xc0 {
		return false
	}
	u.b = u.b[1:]
	return true
}

func (u *unpacker) float() float64 {
	if u.code() != 0xcb {
		u.odd = true
	}
	return math.Float64frombits(u.sized(8))
}

func (u *unpacker) time() time.Time {
	var secs, nanos uint64
	switch u.code() {
	case 0xd6:
		u.odd = u.odd || u.code() != 0xff
		secs = u.sized(4)
	case 0xd7:
		u.odd = u.odd || u.code() != 0xff
		v := u.sized(8)
		secs, nanos = v&(1<<34-1), v>>34
	case 0xc7:
		u.odd = u.odd || u.code() != 12 || u.code() != 0xff
		nanos, secs = u.sized(4), u.sized(8)
	default:
		u.odd = true
	}
	t := time.Unix(int64(secs), int64(nanos))
	if t.IsZero() {
		t = t.UTC()
	}
	return t
}

// bytes returns what is written as bytes, which stays part of the data.
func (u *unpacker) bytes() []byte {
	switch c := u.code(); c {
	case 0xc4, 0xc5, 0xc6:
		return u.take(int(u.sized(1 << (c - 0xc4))))
	}
	u.odd = true
	return nil
}

// bin returns the bytes of numbers of a size, no more than a query may have.
func (u *unpacker) bin(size int) []byte {
	b := u.bytes()
	if len(b)%size != 0 || len(b) > size*MaxTokens {
		u.odd = true
		return nil
	}
	return b
}

func (u *unpacker) hashes() Hashes {
	if u.none() {
		return nil
	}
	b := u.bin(8)
	h := make(Hashes, len(b)/8)
	for i := range h {
		h[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	return h
}

func (u *unpacker) tokens() Tokens {
	if u.none() {
		return nil
	}
	b := u.bin(4)
	t := make(Tokens, len(b)/4)
	for i := range t {
		t[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return t
}

// listOf reads an array.
func listOf[T any](u *unpacker, each func() T) []T {
	n := u.array()
	list := make([]T, 0, min(n, 4096)) // more only as it is read
	for range n {
		if list = append(list, each()); u.odd {
			return nil
		}
	}
	return list
}

// once notes that a field was seen. One that comes twice is odd.
func (u *unpacker) once(seen *uint32, field uint32) {
	u.odd = u.odd || *seen&(1<<field) != 0
	*seen |= 1 << field
}

// object reads a map: field is told of each key, and reads its value; it reports false for a key that it does not know.
func (u *unpacker) object(field func(key []byte) bool) {
	for range u.fields() {
		if key := u.key(); !u.odd && !field(key) {
			u.odd = u.odd || u.skip(maxNesting) != nil
		}
		if u.odd {
			return
		}
	}
}

// skip passes over one value.
func (u *unpacker) skip(depth int) error {
	if len(u.b) == 0 {
		return io.ErrUnexpectedEOF
	}
	if depth == 0 {
		return errNested
	}
	c := u.code()
	n, values := 0, 0
	switch {
	case c < 0x80, c >= 0xe0, c == 0xc0, c == 0xc2, c == 0xc3:
	case c < 0x90:
		values = 2 * int(c&0x0f)
	case c < 0xa0:
		values = int(c & 0x0f)
	case c < 0xc0:
		n = int(c & 0x1f)
	case c >= 0xc4 && c <= 0xc6: // bin
		n = int(u.sized(1 << (c - 0xc4)))
	case c >= 0xc7 && c <= 0xc9: // ext
		n = int(u.sized(1<<(c-0xc7))) + 1
	case c == 0xca:
		n = 4
	case c == 0xcb:
		n = 8
	case c >= 0xcc && c <= 0xcf: // uint
		n = 1 << (c - 0xcc)
	case c >= 0xd0 && c <= 0xd3: // int
		n = 1 << (c - 0xd0)
	case c >= 0xd4 && c <= 0xd8: // fixext
		n = 1 + 1<<(c-0xd4)
	case c >= 0xd9 && c <= 0xdb: // str
		n = int(u.sized(1 << (c - 0xd9)))
	case c == 0xdc || c == 0xdd:
		values = int(u.sized(2 << (c - 0xdc)))
	case c == 0xde || c == 0xdf:
		values = 2 * int(u.sized(2<<(c-0xde)))
	default:
		return errors.New("a byte 0xc1, which stands for nothing")
	}
	u.take(n)
	if u.odd || values > len(u.b) {
		return io.ErrUnexpectedEOF
	}
	for range values {
		if err := u.skip(depth - 1); err != nil {
			return err
		}
	}
	return nil
}

// unpackQuery reads a query into q; false says that it is to be read by [readQuery], with what that says of it.
func unpackQuery(data []byte, q *Query, unknown UnknownFields) bool {
	u := unpacker{b: data}
	out := *q
	var seen uint32
	u.object(func(key []byte) bool {
		switch string(key) {
		case "model":
			u.once(&seen, 0)
			out.Model = u.valid()
		case "block_size":
			u.once(&seen, 1)
			out.BlockSize = u.given()
		case "tokens":
			u.once(&seen, 2)
			out.Tokens = u.tokens()
		case "hashes":
			u.once(&seen, 3)
			out.Hashes = u.hashes()
		case "hashed":
			u.once(&seen, 4)
			out.Hashed = listOf(&u, func() Hashed { return u.hashed(unknown) })
		case "lora_name":
			u.once(&seen, 5)
			out.LoRA = u.valid()
		case "cache_salt":
			u.once(&seen, 6)
			out.CacheSalt = u.valid()
		case "workers":
			u.once(&seen, 7)
			out.Workers = listOf(&u, func() events.WorkerID { return events.WorkerID(u.valid()) })
		case "partitions":
			u.once(&seen, 8)
			out.Partitions = listOf(&u, u.partition)
		case "min_seq":
			u.once(&seen, 9)
			out.MinSeq = listOf(&u, func() PartitionSeq { return u.minSeq(unknown) })
		case "explain":
			u.once(&seen, 10)
			out.Explain = u.truth()
		case "idle":
			u.once(&seen, 11)
			out.Idle = u.truth()
		case "l3":
			u.once(&seen, 12)
			out.L3 = L3Ask(u.valid())
		case "l3_timeout_ms":
			u.once(&seen, 13)
			out.L3TimeoutMS = u.given()
		default:
			u.odd = u.odd || unknown == RefuseUnknown || !utf8.Valid(key)
			return false
		}
		return true
	})
	if u.odd = u.odd || len(u.b) > 0; !u.odd {
		*q = out
	}
	return !u.odd
}

// valid reads text that is UTF-8.
func (u *unpacker) valid() string {
	b := u.key()
	u.odd = u.odd || !utf8.Valid(b)
	return string(b)
}

// given reads a number that is not 0, which stands for one that is not given.
func (u *unpacker) given() uint32 {
	v := u.small()
	u.odd = u.odd || v == 0
	return v
}

func (u *unpacker) partition() events.Partition { return events.Partition(u.small()) }

func (u *unpacker) hashed(unknown UnknownFields) (h Hashed) {
	var seen uint32
	u.object(func(key []byte) bool {
		switch string(key) {
		case "lookahead":
			u.once(&seen, 0)
			h.Lookahead = u.small()
		case "hashes":
			u.once(&seen, 1)
			h.Hashes = u.hashes()
		default:
			u.odd = u.odd || unknown == RefuseUnknown || !utf8.Valid(key)
			return false
		}
		return true
	})
	return h
}

func (u *unpacker) minSeq(unknown UnknownFields) (m PartitionSeq) {
	var seen uint32
	u.object(func(key []byte) bool {
		switch string(key) {
		case "partition":
			u.once(&seen, 0)
			m.Partition = u.partition()
		case "seq":
			u.once(&seen, 1)
			m.Seq = events.StreamSeq(u.number())
		default:
			u.odd = u.odd || unknown == RefuseUnknown || !utf8.Valid(key)
			return false
		}
		return true
	})
	u.odd = u.odd || seen != 0b11 // a place has both
	return m
}

// unpackAnswer reads an answer into a; false says that it is to be read by reflection, or is an error.
func unpackAnswer(data []byte, a *Answer) bool {
	u := unpacker{b: data}
	out := *a
	var seen uint32
	u.object(func(key []byte) bool {
		switch string(key) {
		case "error":
			u.odd = true
		case "model":
			out.Model = u.text()
		case "block_size":
			out.BlockSize = u.small()
		case "blocks":
			out.Blocks = int(u.small())
		case "lookaheads":
			u.once(&seen, 0)
			out.Lookaheads = listOf(&u, u.small)
		case "complete":
			out.Complete = u.truth()
		case "missing":
			u.once(&seen, 1)
			out.Missing = listOf(&u, u.partition)
		case "workers":
			if u.once(&seen, 2); u.none() {
				out.Workers = nil
			} else {
				out.Workers = listOf(&u, u.overlap)
			}
		case "partitions":
			if u.once(&seen, 3); u.none() {
				out.Partitions = nil
			} else {
				out.Partitions = listOf(&u, u.status)
			}
		case "reason":
			out.Reason = Reason(u.text())
		case "l3":
			u.once(&seen, 4)
			out.L3 = u.l3()
		default:
			return false
		}
		return true
	})
	if !u.odd {
		*a = out
	}
	return !u.odd
}

func (u *unpacker) overlap() (o Overlap) {
	for range u.fields() {
		switch string(u.key()) {
		case "instance":
			o.Instance = events.WorkerID(u.text())
		case "rank":
			o.Rank = events.Rank(u.small())
		case "device":
			o.Device = u.small()
		case "host":
			o.Host = u.small()
		case "disk":
			o.Disk = u.small()
		case "external":
			o.External = u.small()
		case "l3":
			o.L3 = u.small()
		case "l3_stop":
			o.L3Stop = u.text()
		case "path": // which is for people
			u.odd = true
		case "bound":
			o.Bound = Bound(u.text())
		case "engine":
			o.Engine = EngineState(u.text())
		case "catching_up":
			o.CatchingUp = u.truth()
		default:
			u.odd = u.odd || u.skip(maxNesting) != nil
		}
		if u.odd {
			break
		}
	}
	return o
}

func (u *unpacker) status() (s PartitionStatus) {
	u.object(func(key []byte) bool {
		switch string(key) {
		case "partition":
			s.Partition = u.partition()
		case "epoch":
			s.Epoch = u.time()
		case "seq":
			s.Seq = events.StreamSeq(u.number())
		case "stale_ms":
			s.StaleMS = u.number()
		case "resync_needed":
			s.ResyncNeeded = u.truth()
		default:
			return false
		}
		return true
	})
	return s
}

func (u *unpacker) l3() (l L3) {
	var seen uint32
	u.object(func(key []byte) bool {
		switch string(key) {
		case "status":
			l.Status = L3Status(u.text())
		case "reason":
			l.Reason = u.text()
		case "ranges":
			u.once(&seen, 0)
			l.Ranges = listOf(u, u.pair)
		case "total":
			l.Total = u.small()
		case "age_ms":
			l.AgeMS = u.float()
		case "unknown":
			u.once(&seen, 1)
			l.Unknown = listOf(u, u.pair)
		case "broken":
			u.odd = true // for people
		case "from_start":
			l.FromStart = u.small()
		default:
			return false
		}
		return true
	})
	return l
}

func (u *unpacker) pair() (r [2]uint32) {
	if u.array() != 2 {
		u.odd = true
	}
	r[0], r[1] = u.small(), u.small()
	return r
}
