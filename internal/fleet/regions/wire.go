package regions

import (
	"errors"
	"math"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// wireVersion is the version of messages and of digests, a wire constant. Others are counted and skipped.
const wireVersion = 1

// Limits of a digest.
const (
	// MaxDigestBytes is the largest size of all filters of a node's digest.
	MaxDigestBytes = 8 << 20

	maxBody       = 12 << 20 // bytes of an encoded digest; filters of few hashes need more bytes for each
	maxSets       = 256
	maxName       = 255 // bytes of a model's name
	maxLookaheads = 16
	maxPartitions = 1 << 16
	maxBlockSize  = 1 << 20

	chunkBytes = 128 << 10 // of a digest in a message; small enough for other messages on the same link
	maxChunks  = (maxBody + chunkBytes - 1) / chunkBytes
)

// Errors of received messages.
var (
	errMalformed = errors.New("malformed message")
	errVersion   = errors.New("message of another version")
)

// Digest is a summary of the blocks in a node's partitions.
type Digest struct {
	Partitions uint32             // of the namespace
	Covered    []events.Partition // of the digest, ascending
	Sets       []Set
}

// Set has the prefixes of a model's prompts that a single rank holds: with a block, the set has all blocks before it.
type Set struct {
	Model      string
	BlockSize  uint32   // in tokens
	Lookaheads []uint32 // of the hashes, ascending
	Held       uint64   // blocks in the index; the filter has fewer if the digest has no room for all of them
	Bounded    bool     // prefixes may be shorter than in the filter, as with api.BoundFullAttentionOnly
	Filter     *Filter
}

// encode returns the bytes of a digest: the version, the partitions, and an array for each set.
func (d *Digest) encode() []byte {
	b := msgp.AppendUint(msgp.AppendUint(nil, wireVersion), uint64(d.Partitions))
	b = msgp.AppendArrayHead(b, len(d.Covered))
	for _, p := range d.Covered {
		b = msgp.AppendUint(b, uint64(p))
	}
	b = msgp.AppendArrayHead(b, len(d.Sets))
	for i := range d.Sets {
		s := &d.Sets[i]
		b = msgp.AppendUint(msgp.AppendStr(msgp.AppendArrayHead(b, setFields), s.Model), uint64(s.BlockSize))
		b = msgp.AppendArrayHead(b, len(s.Lookaheads))
		for _, l := range s.Lookaheads {
			b = msgp.AppendUint(b, uint64(l))
		}
		b = msgp.AppendBool(msgp.AppendUint(b, s.Held), s.Bounded)
		f := s.Filter
		b = msgp.AppendUint(msgp.AppendUint(b, f.n), f.seed)
		b = msgp.AppendUint(msgp.AppendUint(b, uint64(f.segment)), uint64(f.segments))
		b = append(msgp.AppendBinHead(b, len(f.prints)), f.prints...)
	}
	return b
}

const setFields = 10

// decode reads a digest. The digest keeps parts of data.
func decode(data []byte) (*Digest, error) {
	r := &shared.Reader{Reader: msgp.Reader{Data: data}}
	if err := version(r); err != nil {
		return nil, err
	}
	d := &Digest{Partitions: uint32(r.Number(maxPartitions))}
	for range r.List(-1) {
		p := events.Partition(r.Number(maxPartitions))
		if !r.OK(uint32(p) < d.Partitions && (len(d.Covered) == 0 || p > d.Covered[len(d.Covered)-1])) {
			return nil, errMalformed
		}
		d.Covered = append(d.Covered, p)
	}
	sets := r.List(-1)
	r.OK(sets <= maxSets)
	for range sets {
		s := readSet(r)
		if r.Bad {
			return nil, errMalformed
		}
		d.Sets = append(d.Sets, s)
	}
	if r.Bad || r.Left() > 0 {
		return nil, errMalformed
	}
	return d, nil
}

// version reads the first value of a message or a digest.
func version(r *shared.Reader) error {
	switch v := r.Number(math.MaxUint64); {
	case r.Bad:
		return errMalformed
	case v != wireVersion:
		return errVersion
	}
	return nil
}

func readSet(r *shared.Reader) (s Set) {
	r.List(setFields)
	s.Model, s.BlockSize = r.Text(maxName), uint32(r.Number(maxBlockSize))
	r.OK(s.Model != "" && s.BlockSize > 0)
	lookaheads := r.List(-1)
	r.OK(lookaheads <= maxLookaheads)
	for range lookaheads {
		l := uint32(r.Number(maxBlockSize))
		if !r.OK(len(s.Lookaheads) == 0 || l > s.Lookaheads[len(s.Lookaheads)-1]) {
			return s
		}
		s.Lookaheads = append(s.Lookaheads, l)
	}
	s.Held, s.Bounded = r.Number(math.MaxInt64), r.Flag()
	f := &Filter{n: r.Number(math.MaxInt32), seed: r.Number(math.MaxUint64), segment: uint32(r.Number(maxSegment)),
		segments: uint32(r.Number(maxBody))}
	prints, ok := r.Bin()
	f.prints = prints
	r.OK(ok && f.valid() && f.n <= s.Held)
	s.Filter = f
	return s
}

// chunk is a message with a part of a digest.
type chunk struct {
	incarnation uint64 // of the node: a later start has a greater number
	number      uint64 // of the digest in the incarnation, ascending
	ageMS       uint64 // of the digest when it was sent
	part, parts uint64
	total       uint64 // bytes of the digest
	sum         uint64 // XXH3-64 of the digest
	data        []byte
}

func (c *chunk) encode() []byte {
	b := msgp.AppendUint(make([]byte, 0, 64+len(c.data)), wireVersion)
	for _, v := range []uint64{c.incarnation, c.number, c.ageMS, c.part, c.parts, c.total, c.sum} {
		b = msgp.AppendUint(b, v)
	}
	return append(msgp.AppendBinHead(b, len(c.data)), c.data...)
}

func decodeChunk(data []byte) (c chunk, err error) {
	r := &shared.Reader{Reader: msgp.Reader{Data: data}}
	if err := version(r); err != nil {
		return c, err
	}
	c.incarnation, c.number = r.Number(math.MaxUint64), r.Number(math.MaxUint64)
	c.ageMS, c.part, c.parts = r.Number(math.MaxInt32), r.Number(maxChunks), r.Number(maxChunks)
	c.total, c.sum = r.Number(maxBody), r.Number(math.MaxUint64)
	body, ok := r.Bin()
	c.data = body
	begins := c.part * chunkBytes
	r.OK(ok && c.part < c.parts && begins < c.total && uint64(len(body)) == min(chunkBytes, c.total-begins) &&
		(c.part+1 == c.parts) == (begins+uint64(len(body)) == c.total))
	if r.Bad || r.Left() > 0 {
		return c, errMalformed
	}
	return c, nil
}

// Messages returns the messages with a digest, to be sent in order. Each has at most some 128 KiB. An error means that
// the digest has too many sets or bytes.
func (d *Digest) Messages(incarnation, number, ageMS uint64) ([][]byte, error) {
	body := d.encode()
	if len(d.Sets) > maxSets || len(body) > maxBody {
		return nil, errors.New("the digest has too many models or bytes")
	}
	c := chunk{incarnation: incarnation, number: number, ageMS: ageMS, total: uint64(len(body)), sum: xxh3.Hash(body),
		parts: uint64(len(body)+chunkBytes-1) / chunkBytes}
	var list [][]byte
	for ; c.part < c.parts; c.part++ {
		c.data = body[c.part*chunkBytes : min((c.part+1)*chunkBytes, c.total)]
		list = append(list, c.encode())
	}
	return list, nil
}
