package snapshot

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/littleendian"
)

// cursor reads the two columns of a chunk. The field err keeps the first error. All later reads return zero, so a
// decoder checks err once per record.
type cursor struct {
	fields []byte
	words  []byte
	err    error
}

var (
	errShortFields = errors.New("fields end too early")
	errShortWords  = errors.New("words end too early")
	errRange       = errors.New("number out of range")
)

func (c *cursor) fail(err error) {
	if c.err == nil {
		c.err = err
	}
	c.fields, c.words = nil, nil
}

func (c *cursor) byte() byte {
	if len(c.fields) == 0 {
		c.fail(errShortFields)
		return 0
	}
	b := c.fields[0]
	c.fields = c.fields[1:]
	return b
}

func (c *cursor) uint() uint64 {
	if len(c.fields) > 0 && c.fields[0] < 0x80 {
		v := c.fields[0]
		c.fields = c.fields[1:]
		return uint64(v)
	}
	v, n := binary.Uvarint(c.fields)
	if n <= 0 {
		c.fail(errShortFields)
		return 0
	}
	c.fields = c.fields[n:]
	return v
}

func (c *cursor) uint32() uint32 {
	v := c.uint()
	if v > math.MaxUint32 {
		c.fail(errRange)
		return 0
	}
	return uint32(v)
}

func (c *cursor) int() int64 {
	v := c.uint()
	return int64(v>>1) ^ -int64(v&1)
}

// near reads a number that is encoded as the distance to from.
func (c *cursor) near(from uint32) uint32 {
	v := int64(from) + c.int()
	if v < 0 || v > math.MaxUint32 {
		c.fail(errRange)
		return 0
	}
	return uint32(v)
}

// count reads the number of following elements of at least one byte of fields each.
func (c *cursor) count() int {
	n := c.uint()
	if n > uint64(len(c.fields)) {
		c.fail(errShortFields)
		return 0
	}
	return int(n)
}

func (c *cursor) bytes(n uint64) []byte {
	if n > uint64(len(c.fields)) {
		c.fail(errShortFields)
		return nil
	}
	b := c.fields[:n:n]
	c.fields = c.fields[n:]
	return b
}

func (c *cursor) wordBytes(n uint64) []byte {
	if n > uint64(len(c.words))/8 {
		c.fail(errShortWords)
		return nil
	}
	b := c.words[: n*8 : n*8]
	c.words = c.words[n*8:]
	return b
}

func (c *cursor) word() uint64 {
	if b := c.wordBytes(1); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func appendUint(b []byte, v uint64) []byte { return binary.AppendUvarint(b, v) }

func appendInt(b []byte, v int64) []byte { return binary.AppendVarint(b, v) }

func appendNear(b []byte, v, from uint32) []byte { return appendInt(b, int64(v)-int64(from)) }

// getWords appends the words of a column to dst.
func getWords[T ~uint64](dst []T, b []byte) []T {
	start := len(dst)
	dst = grow(dst, len(b)/8)
	littleendian.Read(dst[start:], b)
	return dst
}

// grow extends s by n elements with arbitrary content.
func grow[T any](s []T, n int) []T { return slices.Grow(s, n)[:len(s)+n] }
