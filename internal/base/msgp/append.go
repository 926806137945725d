package msgp

import (
	"encoding/binary"
	"math"
)

// AppendNil appends a nil.
func AppendNil(b []byte) []byte { return append(b, CodeNil) }

// AppendBool appends a Boolean.
func AppendBool(b []byte, v bool) []byte {
	if v {
		return append(b, codeTrue)
	}
	return append(b, codeFalse)
}

// AppendUint appends an integer in the shortest form.
func AppendUint(b []byte, v uint64) []byte {
	switch {
	case v < codeFixMap:
		return append(b, byte(v))
	case v <= math.MaxUint8:
		return append(b, codeUint8, byte(v))
	case v <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, codeUint16), uint16(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(b, codeUint32), uint32(v))
	default:
		return binary.BigEndian.AppendUint64(append(b, CodeUint64), v)
	}
}

// UintSize returns the number of bytes that AppendUint appends.
func UintSize(v uint64) int {
	switch {
	case v < codeFixMap:
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

// AppendStr appends a string.
func AppendStr(b []byte, s string) []byte {
	if len(s) < 32 {
		b = append(b, codeFixStr|byte(len(s)))
	} else {
		b = appendLength(b, codeStr8, len(s))
	}
	return append(b, s...)
}

// appendLength appends a length in 8, 16 or 32 bits, after the code of the width. code8 is the first code.
func appendLength(b []byte, code8 byte, n int) []byte {
	switch {
	case n <= math.MaxUint8:
		return append(b, code8, byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, code8+1), uint16(n))
	default:
		return binary.BigEndian.AppendUint32(append(b, code8+2), uint32(n))
	}
}

// StrSize returns the number of bytes that AppendStr appends for n bytes.
func StrSize(n int) int {
	if n < 32 {
		return 1 + n
	}
	return BinSize(n)
}

// AppendBinHead appends the head of a binary of n bytes. The caller appends the bytes.
func AppendBinHead(b []byte, n int) []byte { return appendLength(b, codeBin8, n) }

// BinSize returns the size of a binary of n bytes, with the head.
func BinSize(n int) int {
	switch {
	case n <= math.MaxUint8:
		return 2 + n
	case n <= math.MaxUint16:
		return 3 + n
	default:
		return 5 + n
	}
}

// AppendArrayHead appends the head of an array of n elements. The caller appends the elements.
func AppendArrayHead(b []byte, n int) []byte { return appendCount(b, codeFixArray, codeArray16, n) }

// AppendMapHead appends the head of a map of n pairs of key and value. The caller appends the pairs.
func AppendMapHead(b []byte, n int) []byte { return appendCount(b, codeFixMap, codeMap16, n) }

// appendCount appends a count in four bits of the code fix, or in 16 or 32 bits after code16 or the next code.
func appendCount(b []byte, fix, code16 byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, fix|byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, code16), uint16(n))
	default:
		return binary.BigEndian.AppendUint32(append(b, code16+1), uint32(n))
	}
}

// ArrayHeadSize returns the number of bytes that AppendArrayHead appends.
func ArrayHeadSize(n int) int {
	switch {
	case n < 16:
		return 1
	case n <= math.MaxUint16:
		return 3
	default:
		return 5
	}
}

// AppendFloat appends a 64-bit floating-point number.
func AppendFloat(b []byte, v float64) []byte {
	return binary.BigEndian.AppendUint64(append(b, codeFloat64), math.Float64bits(v))
}
