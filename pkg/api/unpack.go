package api

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"time"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// maxNesting is the largest depth of nested values.
const maxNesting = 32

var errNested = fmt.Errorf("its values lie more than %d deep", maxNesting)

// validate returns an error unless data begins with a whole MessagePack value with limited nesting. All lengths then
// fit into data, so a decoder allocates no more than was sent. validate ignores data after the value.
func validate(data []byte) error {
	if len(data) == 0 {
		return io.EOF
	}
	return skipValue(&msgp.Reader{Data: data}, maxNesting)
}

// skipValue skips a value.
func skipValue(r *msgp.Reader, depth int) error {
	switch {
	case r.Left() == 0:
		return io.ErrUnexpectedEOF
	case depth == 0:
		return errNested
	}
	n := 0
	switch r.Next() {
	case msgp.None:
		return errors.New("a byte 0xc1, which stands for nothing")
	case msgp.Array:
		n, _ = r.Array()
	case msgp.Map:
		n, _ = r.Map()
		n *= 2
	default:
		r.Skip()
	}
	if r.Broken {
		return io.ErrUnexpectedEOF
	}
	for range n {
		if err := skipValue(r, depth-1); err != nil {
			return err
		}
	}
	return nil
}

// The library panics for nil in place of a time (vmihailenco/msgpack v5.4.1, decode.go, decodeNilValue). This decoder
// returns an error.
func init() {
	msgpack.Register(time.Time{}, nil, func(d *msgpack.Decoder, v reflect.Value) error {
		if c, err := d.PeekCode(); err != nil || !msgpcode.IsExt(c) {
			return errors.New("a value that is no time stands where a time should")
		}
		t, err := d.DecodeTime()
		*v.Addr().Interface().(*time.Time) = t
		return err
	})
}

// unmarshalReflect decodes any value by reflection.
func unmarshalReflect(data []byte, v any) error {
	if err := validate(data); err != nil {
		return err
	}
	d := msgpack.GetDecoder()
	defer msgpack.PutDecoder(d)
	d.UsePreallocateValues(true)
	d.Reset(bytes.NewReader(data))
	return d.Decode(v)
}

// unpacker decodes the output of packer, with the fields of a map in any order. Any other form, such as a repeated
// field, sets Broken. The results are then void, and another decoder decodes the bytes or reports the fault.
type unpacker struct{ msgp.Reader }

// want sets Broken unless ok.
func (u *unpacker) want(ok bool) { u.Broken = u.Broken || !ok }

func (u *unpacker) array() int {
	n, ok := u.Array()
	u.want(ok)
	return n
}

func (u *unpacker) text() string {
	b, ok := u.Str()
	u.want(ok)
	return string(b)
}

// validText reads text in UTF-8.
func (u *unpacker) validText() string {
	b, ok := u.Str()
	u.want(ok && utf8.Valid(b))
	return string(b)
}

func (u *unpacker) uint64() uint64 {
	v, ok := u.Uint(math.MaxUint64)
	u.want(ok)
	return v
}

func (u *unpacker) uint32() uint32 {
	v, ok := u.Uint(math.MaxUint32)
	u.want(ok)
	return uint32(v)
}

// positive reads a number other than 0, which would mean an absent field.
func (u *unpacker) positive() uint32 {
	v := u.uint32()
	u.want(v > 0)
	return v
}

func (u *unpacker) truth() bool {
	v, ok := u.Bool()
	u.want(ok)
	return v
}

func (u *unpacker) float() float64 {
	ok := u.Next() == msgp.Float // the library reads great integers differently than Float
	v, _ := u.Float()
	u.want(ok)
	return v
}

func (u *unpacker) time() time.Time {
	var secs, nanos uint64
	typ, b, ok := u.Ext()
	switch len(b) {
	case 4:
		secs = uint64(binary.BigEndian.Uint32(b))
	case 8:
		v := binary.BigEndian.Uint64(b)
		secs, nanos = v&(1<<34-1), v>>34
	case 12:
		nanos, secs = uint64(binary.BigEndian.Uint32(b)), binary.BigEndian.Uint64(b[4:])
	default:
		ok = false
	}
	u.want(ok && typ == -1)
	t := time.Unix(int64(secs), int64(nanos))
	if t.IsZero() {
		t = t.UTC()
	}
	return t
}

// numbers reads the bytes of numbers of a size, up to the limit of a query.
func (u *unpacker) numbers(size int) []byte {
	b, ok := u.Bin()
	u.want(ok && len(b)%size == 0 && len(b) <= size*MaxTokens)
	if u.Broken {
		return nil
	}
	return b
}

func (u *unpacker) hashes() Hashes {
	if u.Null() {
		return nil
	}
	return readHashes(u.numbers(8))
}

func (u *unpacker) tokens() Tokens {
	if u.Null() {
		return nil
	}
	return readTokens(u.numbers(4))
}

// listOf reads an array.
func listOf[T any](u *unpacker, each func() T) []T {
	n := u.array()
	list := make([]T, 0, min(n, 4096)) // grows while it is read
	for range n {
		if list = append(list, each()); u.Broken {
			return nil
		}
	}
	return list
}

// optListOf reads an array, or nil.
func optListOf[T any](u *unpacker, each func() T) []T {
	if u.Null() {
		return nil
	}
	return listOf(u, each)
}

// object reads a map of at most 16 fields with different names. field is called with each name and reads the value, or
// returns false for an unknown name. object returns the number of known fields.
func (u *unpacker) object(field func(name []byte) bool) (known int) {
	var names [16][]byte
	n, ok := u.Map()
	u.want(ok && n <= len(names))
	for i := 0; i < n && !u.Broken; i++ {
		name, ok := u.Str()
		for _, earlier := range names[:i] {
			ok = ok && string(earlier) != string(name)
		}
		if u.want(ok); !ok {
			break
		}
		names[i] = name
		if field(name) {
			known++
		} else {
			u.want(!u.Broken && skipValue(&u.Reader, maxNesting) == nil)
		}
	}
	return known
}

// ignore returns false. It sets Broken unless a request may have an unknown field of this name.
func (u *unpacker) ignore(name []byte, unknown unknownFields) bool {
	u.want(unknown == ignoreUnknown && utf8.Valid(name))
	return false
}

// unpackQuery decodes a query into q. If it returns false, q is unchanged, and [readQuery] must decode data.
func unpackQuery(data []byte, q *Query, unknown unknownFields) bool {
	u := unpacker{msgp.Reader{Data: data}}
	out := *q
	u.object(func(name []byte) bool {
		switch string(name) {
		case "model":
			out.Model = u.validText()
		case "block_size":
			out.BlockSize = u.positive()
		case "tokens":
			out.Tokens = u.tokens()
		case "hashes":
			out.Hashes = u.hashes()
		case "hashed":
			out.Hashed = listOf(&u, func() Hashed { return u.hashed(unknown) })
		case "engine_hashes":
			out.EngineHashes = u.hashes()
		case "lora_name":
			out.LoRA = u.validText()
		case "cache_salt":
			out.CacheSalt = u.validText()
		case "workers":
			out.Workers = listOf(&u, func() events.WorkerID { return events.WorkerID(u.validText()) })
		case "ranks":
			out.Ranks = listOf(&u, func() RankPlace { return u.rankPlace(unknown) })
		case "endpoints", "with_endpoint", "by_endpoint", "deadline_ms", "media", "diagnostic", "regions": // rare
			u.Broken = true
		case "within":
			out.Within = listOf(&u, func() Tiers { return Tiers(u.validText()) })
		case "with_engine_hashes":
			out.WithEngineHashes = u.truth()
		case "partitions":
			out.Partitions = listOf(&u, u.partition)
		case "min_seq":
			out.MinSeq = listOf(&u, func() PartitionSeq { return u.minSeq(unknown) })
		case "explain":
			out.Explain = u.truth()
		case "idle":
			out.Idle = u.truth()
		case "l3":
			out.L3 = L3Ask(u.validText())
		case "l3_timeout_ms":
			out.L3TimeoutMS = u.positive()
		default:
			return u.ignore(name, unknown)
		}
		return true
	})
	if u.Broken || u.Left() > 0 {
		return false
	}
	*q = out
	return true
}

func (u *unpacker) partition() events.Partition { return events.Partition(u.uint32()) }

func (u *unpacker) hashed(unknown unknownFields) (h Hashed) {
	u.object(func(name []byte) bool {
		switch string(name) {
		case "lookahead":
			h.Lookahead = u.uint32()
		case "hashes":
			h.Hashes = u.hashes()
		default:
			return u.ignore(name, unknown)
		}
		return true
	})
	return h
}

func (u *unpacker) minSeq(unknown unknownFields) (m PartitionSeq) {
	known := u.object(func(name []byte) bool {
		switch string(name) {
		case "partition":
			m.Partition = u.partition()
		case "seq":
			m.Seq = events.StreamSeq(u.uint64())
		default:
			return u.ignore(name, unknown)
		}
		return true
	})
	u.want(known == 2) // both are required
	return m
}

func (u *unpacker) rankPlace(unknown unknownFields) (p RankPlace) {
	known := u.object(func(name []byte) bool {
		switch string(name) {
		case "instance":
			p.Instance = events.WorkerID(u.validText())
		case "rank":
			p.Rank = events.Rank(u.uint32())
		default:
			return u.ignore(name, unknown)
		}
		return true
	})
	u.want(known == 2 && p.Instance != "")
	return p
}

// unpackAnswer decodes an answer into a. If it returns false, a is unchanged, and data is an error or must be decoded
// by reflection.
func unpackAnswer(data []byte, a *Answer) bool {
	u := unpacker{msgp.Reader{Data: data}}
	out := *a
	u.object(func(name []byte) bool {
		switch string(name) {
		case "model":
			out.Model = u.text()
		case "block_size":
			out.BlockSize = u.uint32()
		case "blocks":
			out.Blocks = int(u.uint32())
		case "lookaheads":
			out.Lookaheads = listOf(&u, u.uint32)
		case "complete":
			out.Complete = u.truth()
		case "missing":
			out.Missing = listOf(&u, u.partition)
		case "workers":
			out.Workers = optListOf(&u, u.overlap)
		case "partitions":
			out.Partitions = optListOf(&u, u.status)
		case "reason":
			out.Reason = Reason(u.text())
		case "l3":
			out.L3 = u.l3()
		case "unknown_endpoints":
			out.UnknownEndpoints = listOf(&u, u.text)
		case "error", "by_endpoint", "regions", "tokenized": // the last three by reflection
			u.Broken = true
		default:
			return false
		}
		return true
	})
	if !u.Broken {
		*a = out
	}
	return !u.Broken
}

// overlap is written without object, since an answer consists mostly of overlaps. The last of equal fields counts, as
// in reflection.
func (u *unpacker) overlap() (o Overlap) {
	n, ok := u.Map()
	for u.want(ok); n > 0 && !u.Broken; n-- {
		name, ok := u.Str()
		u.want(ok)
		switch string(name) {
		case "instance":
			o.Instance = events.WorkerID(u.text())
		case "rank":
			o.Rank = events.Rank(u.uint32())
		case "device":
			o.Device = u.uint32()
		case "host":
			o.Host = u.uint32()
		case "disk":
			o.Disk = u.uint32()
		case "external":
			o.External = u.uint32()
		case "l3":
			o.L3 = u.uint32()
		case "l3_stop":
			o.L3Stop = u.text()
		case "path": // by reflection: for people only
			u.Broken = true
		case "bound":
			o.Bound = Bound(u.text())
		case "engine":
			o.Engine = EngineState(u.text())
		case "catching_up":
			o.CatchingUp = u.truth()
		case "guessed":
			o.Guessed = u.uint32()
		case "endpoint":
			o.Endpoint = u.text()
		case "within":
			o.Within = listOf(u, u.uint32)
		case "engine_hashes":
			o.EngineHashes = u.hashes()
		case "held":
			o.Held = u.uint32()
		case "full":
			o.Full = u.uint32()
		default:
			u.want(!u.Broken && skipValue(&u.Reader, maxNesting) == nil)
		}
	}
	return o
}

func (u *unpacker) status() (s PartitionStatus) {
	u.object(func(name []byte) bool {
		switch string(name) {
		case "partition":
			s.Partition = u.partition()
		case "epoch":
			s.Epoch = u.time()
		case "seq":
			s.Seq = events.StreamSeq(u.uint64())
		case "stale_ms":
			s.StaleMS = u.uint64()
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
	u.object(func(name []byte) bool {
		switch string(name) {
		case "status":
			l.Status = L3Status(u.text())
		case "reason":
			l.Reason = u.text()
		case "ranges":
			l.Ranges = listOf(u, u.pair)
		case "total":
			l.Total = u.uint32()
		case "age_ms":
			l.AgeMS = u.float()
		case "unknown":
			l.Unknown = listOf(u, u.pair)
		case "from_start":
			l.FromStart = u.uint32()
		case "broken": // by reflection: for people only
			u.Broken = true
		default:
			return false
		}
		return true
	})
	return l
}

func (u *unpacker) pair() (r [2]uint32) {
	u.want(u.array() == 2)
	r[0], r[1] = u.uint32(), u.uint32()
	return r
}
