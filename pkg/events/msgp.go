package events

import (
	"encoding/binary"
	"math"
	"slices"
)

// reader reads MessagePack (github.com/msgpack/msgpack › spec.md) by hand: no reflection, no allocation, and no step
// that trusts a length before the bytes for it are there. A method that reads a value returns false and stays where it
// is if the value is of another type; if the bytes themselves are at fault it sets broken, and nothing can be read any
// more.
type reader struct {
	data   []byte
	at     int
	broken bool // cut off, a length beyond the end, or the one byte that MessagePack never uses
}

// form is what kind of value comes next.
type form uint8

const (
	formNone form = iota // nothing left, or broken
	formNil
	formBool
	formInt
	formFloat
	formStr
	formBin
	formArray
	formMap
	formExt
)

// The first bytes of values.
const (
	mpFixMap   = 0x80
	mpFixArray = 0x90
	mpFixStr   = 0xa0
	mpNil      = 0xc0
	mpNever    = 0xc1
	mpFalse    = 0xc2
	mpTrue     = 0xc3
	mpBin8     = 0xc4
	mpBin16    = 0xc5
	mpBin32    = 0xc6
	mpExt8     = 0xc7
	mpExt32    = 0xc9
	mpFloat32  = 0xca
	mpFloat64  = 0xcb
	mpUint8    = 0xcc
	mpUint16   = 0xcd
	mpUint32   = 0xce
	mpUint64   = 0xcf
	mpInt8     = 0xd0
	mpInt16    = 0xd1
	mpInt32    = 0xd2
	mpInt64    = 0xd3
	mpFixExt1  = 0xd4
	mpFixExt16 = 0xd8
	mpStr8     = 0xd9
	mpStr16    = 0xda
	mpStr32    = 0xdb
	mpArray16  = 0xdc
	mpArray32  = 0xdd
	mpMap16    = 0xde
	mpMap32    = 0xdf
	mpNegative = 0xe0
)

func (r *reader) left() int { return len(r.data) - r.at }

// fail marks the reader broken and returns false.
func (r *reader) fail() bool {
	r.broken = true
	return false
}

// next says what comes next.
func (r *reader) next() form {
	if r.broken || r.at >= len(r.data) {
		return formNone
	}
	switch c := r.data[r.at]; {
	case c < mpFixMap || c >= mpNegative:
		return formInt
	case c < mpFixArray:
		return formMap
	case c < mpFixStr:
		return formArray
	case c < mpNil:
		return formStr
	case c == mpNil:
		return formNil
	case c == mpNever:
		return formNone
	case c <= mpTrue:
		return formBool
	case c <= mpBin32:
		return formBin
	case c <= mpExt32:
		return formExt
	case c <= mpFloat64:
		return formFloat
	case c <= mpInt64:
		return formInt
	case c <= mpFixExt16:
		return formExt
	case c <= mpStr32:
		return formStr
	case c <= mpArray32:
		return formArray
	default:
		return formMap
	}
}

// tail is the big-endian number in the width bytes after the first one. It does not move.
func (r *reader) tail(width int) (uint64, bool) {
	if r.left() < 1+width {
		return 0, r.fail()
	}
	b := r.data[r.at+1:]
	switch width {
	case 1:
		return uint64(b[0]), true
	case 2:
		return uint64(binary.BigEndian.Uint16(b)), true
	case 4:
		return uint64(binary.BigEndian.Uint32(b)), true
	default:
		return binary.BigEndian.Uint64(b), true
	}
}

// null reads nil.
func (r *reader) null() bool {
	if r.next() != formNil {
		return false
	}
	r.at++
	return true
}

func (r *reader) bool() (v, ok bool) {
	if r.next() != formBool {
		return false, false
	}
	r.at++
	return r.data[r.at-1] == mpTrue, true
}

// integer reads an integer of any width and sign. bits is its value modulo 2^64; negative says that it is below zero.
func (r *reader) integer() (bits uint64, negative, ok bool) {
	if r.next() != formInt {
		return 0, false, false
	}
	c := r.data[r.at]
	if c < mpFixMap {
		r.at++
		return uint64(c), false, true
	}
	if c >= mpNegative {
		r.at++
		return uint64(int64(int8(c))), true, true
	}
	width := 1 << ((c - mpUint8) & 3)
	v, ok := r.tail(width)
	if !ok {
		return 0, false, false
	}
	r.at += 1 + width
	switch c {
	case mpInt8:
		v = uint64(int64(int8(v)))
	case mpInt16:
		v = uint64(int64(int16(v)))
	case mpInt32:
		v = uint64(int64(int32(v)))
	}
	return v, c >= mpInt8 && int64(v) < 0, true
}

// uint reads an integer from 0 to most.
func (r *reader) uint(most uint64) (uint64, bool) {
	before := r.at
	v, negative, ok := r.integer()
	if !ok || negative || v > most {
		r.at = before
		return 0, false
	}
	return v, true
}

// float reads a floating-point number or an integer.
func (r *reader) float() (float64, bool) {
	if v, negative, ok := r.integer(); ok {
		if negative {
			return float64(int64(v)), true
		}
		return float64(v), true
	}
	if r.next() != formFloat {
		return 0, false
	}
	if r.data[r.at] == mpFloat32 {
		v, ok := r.tail(4)
		if !ok {
			return 0, false
		}
		r.at += 5
		return float64(math.Float32frombits(uint32(v))), true
	}
	v, ok := r.tail(8)
	if !ok {
		return 0, false
	}
	r.at += 9
	return math.Float64frombits(v), true
}

// span returns head and body lengths of the string, binary or extension that comes next.
func (r *reader) span() (head, body int, ok bool) {
	c := r.data[r.at]
	width := 0
	switch {
	case c < mpNil: // fixstr
		head, body = 1, int(c&31)
	case c >= mpFixExt1 && c <= mpFixExt16:
		head, body = 2, 1<<(c-mpFixExt1)
	case c >= mpStr8:
		width = 1 << (c - mpStr8)
	case c >= mpExt8:
		width = 1 << (c - mpExt8)
	default:
		width = 1 << (c - mpBin8)
	}
	if width > 0 {
		n, ok := r.tail(width)
		if !ok {
			return 0, 0, false
		}
		if n > uint64(r.left()) {
			return 0, 0, r.fail()
		}
		head, body = 1+width, int(n)
		if c >= mpExt8 && c <= mpExt32 {
			head++ // the extension's type
		}
	}
	if r.left()-head < body {
		return 0, 0, r.fail()
	}
	return head, body, true
}

// bytes reads a string or binary and returns its bytes, which are the input's own.
func (r *reader) bytes(want form) ([]byte, bool) {
	if r.next() != want {
		return nil, false
	}
	head, body, ok := r.span()
	if !ok {
		return nil, false
	}
	r.at += head + body
	return r.data[r.at-body : r.at : r.at], true
}

func (r *reader) str() ([]byte, bool) { return r.bytes(formStr) }
func (r *reader) bin() ([]byte, bool) { return r.bytes(formBin) }

// array reads the head of an array and returns how many elements follow. Each takes a byte at least, so a number of
// elements beyond what is left is a fault.
func (r *reader) array() (int, bool) {
	if r.next() != formArray {
		return 0, false
	}
	return r.head(mpFixArray, mpArray16, 1)
}

// mapping reads the head of a map and returns how many pairs follow.
func (r *reader) mapping() (int, bool) {
	if r.next() != formMap {
		return 0, false
	}
	return r.head(mpFixMap, mpMap16, 2)
}

func (r *reader) head(fix, first byte, each int) (int, bool) {
	c := r.data[r.at]
	n, size := int(c&^fix), 1
	if c >= first {
		width := 2 << (c - first)
		v, ok := r.tail(width)
		if !ok {
			return 0, false
		}
		if v > uint64(r.left()) {
			return 0, r.fail()
		}
		n, size = int(v), 1+width
	}
	if n > (r.left()-size)/each {
		return 0, r.fail()
	}
	r.at += size
	return n, true
}

// skip passes over one value, however deep it is.
func (r *reader) skip() bool { return r.skipN(1) }

// skipN passes over n values. It keeps count of what is still to be passed instead of going down into values, so depth
// costs nothing.
func (r *reader) skipN(n int) bool {
	for ; n > 0; n-- {
		var more int
		ok := true
		switch r.next() {
		case formNil, formBool:
			r.at++
		case formInt:
			_, _, ok = r.integer()
		case formFloat:
			_, ok = r.float()
		case formStr, formBin, formExt:
			var head, body int
			head, body, ok = r.span()
			r.at += head + body
		case formArray:
			more, ok = r.array()
		case formMap:
			more, ok = r.mapping()
			more *= 2
		default:
			return r.fail()
		}
		if !ok {
			return false
		}
		// What was opened and not yet passed takes a byte each: this bounds n, too.
		if n += more; n-1 > r.left() {
			return r.fail()
		}
	}
	return true
}

// tokenShape says, by the first byte of an integer, how many bytes it takes, and by how much the eight bytes that begin
// with it must be shifted up and then down to leave its value. Zero: it is no unsigned integer of at most 32 bits.
var tokenShape = func() (shape [256]uint32) {
	of := func(size, up, down uint32) uint32 { return size<<16 | up<<8 | down }
	for c := range mpFixMap {
		shape[c] = of(1, 0, 56)
	}
	shape[mpUint8] = of(2, 8, 56)
	shape[mpUint16] = of(3, 8, 48)
	shape[mpUint32] = of(5, 8, 32)
	return shape
}()

// tokens appends n integers to dst, which is where an engine's message has most of its bytes. It returns false, with
// the reader somewhere inside, if one of them is not an integer from 0 to 2^32-1.
func (r *reader) tokens(dst []uint32, n int) ([]uint32, bool) {
	dst = slices.Grow(dst, n)
	fast := dst[len(dst) : len(dst)+n]
	data, at := r.data, r.at
	done := 0
	for done < len(fast) && at <= len(data)-8 {
		word := binary.BigEndian.Uint64(data[at:])
		shape := tokenShape[word>>56]
		if shape == 0 {
			break
		}
		fast[done] = uint32(word << (shape >> 8 & 63) >> (shape & 63))
		done++
		at += int(shape >> 16)
	}
	r.at = at
	dst = dst[:len(dst)+done]
	for range n - done { // near the end, or in a form that no engine chooses
		v, ok := r.uint(math.MaxUint32)
		if !ok {
			return dst, false
		}
		dst = append(dst, uint32(v))
	}
	return dst, true
}

// Writing.

func appendNil(b []byte) []byte { return append(b, mpNil) }

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, mpTrue)
	}
	return append(b, mpFalse)
}

func appendUint(b []byte, v uint64) []byte {
	switch {
	case v < mpFixMap:
		return append(b, byte(v))
	case v <= math.MaxUint8:
		return append(b, mpUint8, byte(v))
	case v <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, mpUint16), uint16(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(b, mpUint32), uint32(v))
	default:
		return binary.BigEndian.AppendUint64(append(b, mpUint64), v)
	}
}

func uintSize(v uint64) int {
	switch {
	case v < mpFixMap:
		return 1
	case v <= math.MaxUint8:
		return 2
	case v <= math.MaxUint16:
		return 3
	case v <= math.MaxUint32:
		return 5
	default:
		return 9
	}
}

func appendStr(b []byte, s string) []byte {
	switch n := len(s); {
	case n < 32:
		b = append(b, mpFixStr|byte(n))
	case n <= math.MaxUint8:
		b = append(b, mpStr8, byte(n))
	case n <= math.MaxUint16:
		b = binary.BigEndian.AppendUint16(append(b, mpStr16), uint16(n))
	default:
		b = binary.BigEndian.AppendUint32(append(b, mpStr32), uint32(n))
	}
	return append(b, s...)
}

func strSize(n int) int {
	if n < 32 {
		return 1 + n
	}
	return binSize(n)
}

func appendBinHead(b []byte, n int) []byte {
	switch {
	case n <= math.MaxUint8:
		return append(b, mpBin8, byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, mpBin16), uint16(n))
	default:
		return binary.BigEndian.AppendUint32(append(b, mpBin32), uint32(n))
	}
}

func binSize(n int) int {
	switch {
	case n <= math.MaxUint8:
		return 2 + n
	case n <= math.MaxUint16:
		return 3 + n
	default:
		return 5 + n
	}
}

func appendArrayHead(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, mpFixArray|byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, mpArray16), uint16(n))
	default:
		return binary.BigEndian.AppendUint32(append(b, mpArray32), uint32(n))
	}
}

func arrayHeadSize(n int) int {
	switch {
	case n < 16:
		return 1
	case n <= math.MaxUint16:
		return 3
	default:
		return 5
	}
}
