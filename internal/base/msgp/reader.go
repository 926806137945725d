package msgp

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// Reader reads MessagePack values one after another. It does not allocate, and uses no length before it has checked
// that the bytes exist. A method for a value returns false and does not move if the value has another type. If the
// bytes are invalid, it sets Broken, and all further reads fail.
//
// The zero Reader with Data set is ready to use. A Reader belongs to a single goroutine.
type Reader struct {
	Data   []byte
	At     int  // position of the next value in Data
	Broken bool // truncated, a length beyond the end, or the byte that MessagePack never uses; a caller may set it too
}

// Form is the type of a value.
type Form uint8

// Types of values.
const (
	None Form = iota // the end, or broken
	Nil
	Bool
	Int
	Float
	Str
	Bin
	Array
	Map
	Ext
)

// First bytes of values (github.com/msgpack/msgpack, spec.md).
const (
	codeFixMap   = 0x80
	codeFixArray = 0x90
	codeFixStr   = 0xa0
	CodeNil      = 0xc0
	codeNever    = 0xc1
	codeFalse    = 0xc2
	codeTrue     = 0xc3
	codeBin8     = 0xc4
	codeBin16    = 0xc5
	codeBin32    = 0xc6
	codeExt8     = 0xc7
	codeExt32    = 0xc9
	codeFloat32  = 0xca
	codeFloat64  = 0xcb
	codeUint8    = 0xcc
	codeUint16   = 0xcd
	codeUint32   = 0xce
	CodeUint64   = 0xcf
	codeInt8     = 0xd0
	codeInt16    = 0xd1
	codeInt32    = 0xd2
	codeInt64    = 0xd3
	codeFixExt1  = 0xd4
	codeFixExt16 = 0xd8
	codeStr8     = 0xd9
	codeStr16    = 0xda
	codeStr32    = 0xdb
	codeArray16  = 0xdc
	codeArray32  = 0xdd
	codeMap16    = 0xde
	codeMap32    = 0xdf
	codeNegative = 0xe0
)

// Left returns the number of unread bytes.
func (r *Reader) Left() int { return len(r.Data) - r.At }

// fail marks the reader broken and returns false.
func (r *Reader) fail() bool {
	r.Broken = true
	return false
}

// Next returns the type of the next value.
func (r *Reader) Next() Form {
	if r.Broken || r.At >= len(r.Data) {
		return None
	}
	switch c := r.Data[r.At]; {
	case c < codeFixMap || c >= codeNegative:
		return Int
	case c < codeFixArray:
		return Map
	case c < codeFixStr:
		return Array
	case c < CodeNil:
		return Str
	case c == CodeNil:
		return Nil
	case c == codeNever:
		return None
	case c <= codeTrue:
		return Bool
	case c <= codeBin32:
		return Bin
	case c <= codeExt32:
		return Ext
	case c <= codeFloat64:
		return Float
	case c <= codeInt64:
		return Int
	case c <= codeFixExt16:
		return Ext
	case c <= codeStr32:
		return Str
	case c <= codeArray32:
		return Array
	default:
		return Map
	}
}

// tail returns the big-endian number in the width bytes after the first byte, without a move.
func (r *Reader) tail(width int) (uint64, bool) {
	if r.Left() < 1+width {
		return 0, r.fail()
	}
	b := r.Data[r.At+1:]
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

// Null reads a nil.
func (r *Reader) Null() bool {
	if r.Next() != Nil {
		return false
	}
	r.At++
	return true
}

// Bool reads a Boolean.
func (r *Reader) Bool() (v, ok bool) {
	if r.Next() != Bool {
		return false, false
	}
	r.At++
	return r.Data[r.At-1] == codeTrue, true
}

// Int reads an integer of any width and sign. bits is the value modulo 2^64; negative reports whether it is below zero.
func (r *Reader) Int() (bits uint64, negative, ok bool) {
	if r.Next() != Int {
		return 0, false, false
	}
	c := r.Data[r.At]
	if c < codeFixMap {
		r.At++
		return uint64(c), false, true
	}
	if c >= codeNegative {
		r.At++
		return uint64(int64(int8(c))), true, true
	}
	width := 1 << ((c - codeUint8) & 3)
	v, ok := r.tail(width)
	if !ok {
		return 0, false, false
	}
	r.At += 1 + width
	switch c {
	case codeInt8:
		v = uint64(int64(int8(v)))
	case codeInt16:
		v = uint64(int64(int16(v)))
	case codeInt32:
		v = uint64(int64(int32(v)))
	}
	return v, c >= codeInt8 && int64(v) < 0, true
}

// Uint reads an integer from 0 to most.
func (r *Reader) Uint(most uint64) (uint64, bool) {
	if r.At < len(r.Data) && !r.Broken && r.Data[r.At] < codeFixMap && uint64(r.Data[r.At]) <= most { // the usual case
		r.At++
		return uint64(r.Data[r.At-1]), true
	}
	before := r.At
	v, negative, ok := r.Int()
	if !ok || negative || v > most {
		r.At = before
		return 0, false
	}
	return v, true
}

// Float reads a floating-point number or an integer.
func (r *Reader) Float() (float64, bool) {
	if v, negative, ok := r.Int(); ok {
		if negative {
			return float64(int64(v)), true
		}
		return float64(v), true
	}
	if r.Next() != Float {
		return 0, false
	}
	if r.Data[r.At] == codeFloat32 {
		v, ok := r.tail(4)
		if !ok {
			return 0, false
		}
		r.At += 5
		return float64(math.Float32frombits(uint32(v))), true
	}
	v, ok := r.tail(8)
	if !ok {
		return 0, false
	}
	r.At += 9
	return math.Float64frombits(v), true
}

// span returns the lengths of head and body of the next value: a string, binary or extension.
func (r *Reader) span() (head, body int, ok bool) {
	c := r.Data[r.At]
	width := 0
	switch {
	case c < CodeNil: // fixstr
		head, body = 1, int(c&31)
	case c >= codeFixExt1 && c <= codeFixExt16:
		head, body = 2, 1<<(c-codeFixExt1)
	case c >= codeStr8:
		width = 1 << (c - codeStr8)
	case c >= codeExt8:
		width = 1 << (c - codeExt8)
	default:
		width = 1 << (c - codeBin8)
	}
	if width > 0 {
		n, ok := r.tail(width)
		if !ok {
			return 0, 0, false
		}
		if n > uint64(r.Left()) {
			return 0, 0, r.fail()
		}
		head, body = 1+width, int(n)
		if c >= codeExt8 && c <= codeExt32 {
			head++ // the type of the extension
		}
	}
	if r.Left()-head < body {
		return 0, 0, r.fail()
	}
	return head, body, true
}

// body reads a value with a span and returns the body, which is part of Data.
func (r *Reader) body(want Form) ([]byte, bool) {
	if r.Next() != want {
		return nil, false
	}
	head, body, ok := r.span()
	if !ok {
		return nil, false
	}
	r.At += head + body
	return r.Data[r.At-body : r.At : r.At], true
}

// Str reads a string and returns the bytes, which are part of Data.
func (r *Reader) Str() ([]byte, bool) {
	if begin := r.At + 1; begin <= len(r.Data) && !r.Broken && r.Data[r.At]&0xe0 == codeFixStr { // the usual case
		if end := begin + int(r.Data[r.At]&31); end <= len(r.Data) {
			r.At = end
			return r.Data[begin:end:end], true
		}
	}
	return r.body(Str)
}

// Bin reads a binary and returns the bytes, which are part of Data.
func (r *Reader) Bin() ([]byte, bool) { return r.body(Bin) }

// Ext reads an extension and returns the type and the bytes, which are part of Data.
func (r *Reader) Ext() (typ int8, body []byte, ok bool) {
	if body, ok = r.body(Ext); ok {
		typ = int8(r.Data[r.At-len(body)-1])
	}
	return typ, body, ok
}

// Array reads the head of an array and returns the number of elements. An element has at least one byte: a larger
// number than the remaining bytes breaks the reader.
func (r *Reader) Array() (int, bool) {
	if r.Next() != Array {
		return 0, false
	}
	return r.head(codeFixArray, codeArray16, 1)
}

// Map reads the head of a map and returns the number of pairs.
func (r *Reader) Map() (int, bool) {
	if r.Next() != Map {
		return 0, false
	}
	return r.head(codeFixMap, codeMap16, 2)
}

// EachKey calls do for each key of a map with strings as keys. do must read the value and returns false for a fault.
// EachKey stops at the first fault and returns its description, or "". It copies the keys.
func (r *Reader) EachKey(do func(key string) bool) (fault string) {
	n, ok := r.Map()
	if !ok {
		return "not a map"
	}
	for range n {
		key, ok := r.Str()
		if !ok || !do(string(key)) || r.Broken {
			return fmt.Sprintf("no readable value of %.40q", key)
		}
	}
	return ""
}

func (r *Reader) head(fix, first byte, each int) (int, bool) {
	c := r.Data[r.At]
	n, size := int(c&^fix), 1
	if c >= first {
		width := 2 << (c - first)
		v, ok := r.tail(width)
		if !ok {
			return 0, false
		}
		if v > uint64(r.Left()) {
			return 0, r.fail()
		}
		n, size = int(v), 1+width
	}
	if n > (r.Left()-size)/each {
		return 0, r.fail()
	}
	r.At += size
	return n, true
}

// Skip skips a value of any depth.
func (r *Reader) Skip() bool { return r.SkipN(1) }

// SkipN skips n values. It counts the remaining values in place of a recursion, so depth costs nothing.
func (r *Reader) SkipN(n int) bool {
	for ; n > 0; n-- {
		var more int
		ok := true
		switch r.Next() {
		case Nil, Bool:
			r.At++
		case Int:
			_, _, ok = r.Int()
		case Float:
			_, ok = r.Float()
		case Str, Bin, Ext:
			var head, body int
			head, body, ok = r.span()
			r.At += head + body
		case Array:
			more, ok = r.Array()
		case Map:
			more, ok = r.Map()
			more *= 2
		default:
			return r.fail()
		}
		if !ok {
			return false
		}
		// A remaining value has at least one byte: this also limits n.
		if n += more; n-1 > r.Left() {
			return r.fail()
		}
	}
	return true
}

// uintShape describes an unsigned integer of at most 32 bits by its first byte: the number of bytes, and the shifts up
// and down that extract the value from the eight bytes there. Zero means another value.
var uintShape = func() (shape [256]uint32) {
	pack := func(size, up, down uint32) uint32 { return size<<16 | up<<8 | down }
	for c := range codeFixMap {
		shape[c] = pack(1, 0, 56)
	}
	shape[codeUint8] = pack(2, 8, 56)
	shape[codeUint16] = pack(3, 8, 48)
	shape[codeUint32] = pack(5, 8, 32)
	return shape
}()

// Uint32s appends n integers to dst: an engine's message consists mostly of tokens. It returns false, with the reader
// at the integer, for an integer outside of 0 to 2^32-1.
func (r *Reader) Uint32s(dst []uint32, n int) ([]uint32, bool) {
	dst = slices.Grow(dst, n)
	fast := dst[len(dst) : len(dst)+n]
	data, at := r.Data, r.At
	done := 0
	for done < len(fast) && at <= len(data)-8 {
		word := binary.BigEndian.Uint64(data[at:])
		// Most tokens have one of three codes. The last two bits of the code give the length: 1, 2 or 4 bytes after the code.
		// So the loop finds the code of the next token without a second access to memory.
		code, long := word>>56, 1+uint(1)<<(word>>56&3)
		next := word << (8 * long & 63) >> 56
		if code-codeUint8 <= codeUint32-codeUint8 && next-codeUint8 <= codeUint32-codeUint8 && done < len(fast)-1 &&
			at <= len(data)-16 {
			second := binary.BigEndian.Uint64(data[at+int(long):])
			fast[done] = uint32(word << 8 >> ((64 - 8<<(code&3)) & 63))
			fast[done+1] = uint32(second << 8 >> ((64 - 8<<(next&3)) & 63))
			done += 2
			at += int(long + 1 + uint(1)<<(next&3))
			continue
		}
		shape := uintShape[word>>56]
		if shape == 0 {
			break
		}
		fast[done] = uint32(word << (shape >> 8 & 63) >> (shape & 63))
		done++
		at += int(shape >> 16)
	}
	r.At = at
	dst = dst[:len(dst)+done]
	for range n - done { // near the end, or in a form that no engine writes
		v, ok := r.Uint(math.MaxUint32)
		if !ok {
			return dst, false
		}
		dst = append(dst, uint32(v))
	}
	return dst, true
}
