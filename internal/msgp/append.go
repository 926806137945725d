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

// AppendUint appends an integer in its shortest form.
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

// UintSize is how many bytes AppendUint appends.
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
	switch n := len(s); {
	case n < 32:
		b = append(b, codeFixStr|byte(n))
	case n <= math.MaxUint8:
		b = append(b, codeStr8, byte(n))
	case n <= math.MaxUint16:
		b = binary.BigEndian.AppendUint16(append(b, codeStr16), uint16(n))
	default:
		b = binary.BigEndian.AppendUint32(append(b, codeStr32), uint32(n))
	}
	return append(b, s...)
}

// StrSize is how many bytes AppendStr appends for n bytes.
func StrSize(n int) int {
	if n < 32 {
		return 1 + n
	}
	return BinSize(n)
}

// AppendBinHead appends the head of a binary of n bytes, which must follow.
func AppendBinHead(b []byte, n int) []byte {
	switch {
	case n <= math.MaxUint8:
		return append(b, codeBin8, byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, codeBin16), uint16(n))
	default:
		return binary.BigEndian.AppendUint32(append(b, codeBin32), uint32(n))
	}
}

// BinSize is how many bytes a binary of n bytes takes, with its head.
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

// AppendArrayHead appends the head of an array of n elements, which must follow.
func AppendArrayHead(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, codeFixArray|byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, codeArray16), uint16(n))
	default:
		return binary.BigEndian.AppendUint32(append(b, codeArray32), uint32(n))
	}
}

// ArrayHeadSize is how many bytes AppendArrayHead appends.
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

// AppendMapHead appends the head of a map of n pairs of key and value, which must follow.
func AppendMapHead(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, codeFixMap|byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, codeMap16), uint16(n))
	default:
		return binary.BigEndian.AppendUint32(append(b, codeMap32), uint32(n))
	}
}

// AppendFloat appends a 64-bit floating-point number.
func AppendFloat(b []byte, v float64) []byte {
	return binary.BigEndian.AppendUint64(append(b, codeFloat64), math.Float64bits(v))
}
