package api

import (
	"math"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// listCommas finds the commas in blocks of 64 bytes of text, and writes their places. It ends before the first block
// in which there is anything else than elements of a list with a comma behind each: whole numbers in decimal digits
// without zeros that lead, with a blank before each or none. The text begins with an element, or the blank before it.
// There must be room for eight places more than are found.
//
//go:noescape
func listCommas(text *byte, blocks int, at *uint32) (n int)

// listNumbers reads groups of eight elements that end at the commas at, and writes their numbers. The place before the
// first is that of the comma before. It ends before a group with an element of more than eight bytes. Eight bytes of
// text may be read from where an element begins.
//
//go:noescape
func listNumbers(text *byte, at *uint32, groups int, to *uint32) (done int)

// vectors reports whether the processor has what these need.
var vectors = cpu.X86.HasAVX2 && cpu.X86.HasBMI1 && cpu.X86.HasPOPCNT

// fewBlocks are looked at for commas before their numbers are read.
const fewBlocks = 32

// shortNumbers appends to dst, up to its capacity, numbers at the front of data that each have a comma behind them,
// with a blank after it or none: those of at most seven digits, and perhaps of eight. It returns their length with
// these.
func shortNumbers(dst []uint32, data []byte) ([]uint32, int) {
	i := 0
	if vectors {
		dst, i = vectorNumbers(dst, data)
	}
	dst, n := wordNumbers(dst, data[i:])
	return dst, i + n
}

// vectorNumbers is shortNumbers for what comes in eights: the commas are found in 64 bytes at a time, and eight numbers
// are read at once between them, without a branch that depends on how long they are.
func vectorNumbers(dst []uint32, data []byte) ([]uint32, int) {
	var at [1 + 64/2*fewBlocks + 8]uint32 // at[0] is the place before the text
	at[0] = math.MaxUint32
	i := 0
	for {
		blocks := min((len(data)-i-8)/64, fewBlocks)
		groups := (cap(dst) - len(dst)) / 8
		if blocks < 1 || groups == 0 {
			return dst, i
		}
		text := &data[i]
		groups = min(groups, listCommas(text, blocks, &at[1])/8)
		done := listNumbers(text, &at[1], groups, (*uint32)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(dst)), 4*len(dst))))
		if done == 0 {
			return dst, i
		}
		dst = dst[:len(dst)+8*done]
		i += int(at[8*done]) + 1
	}
}
