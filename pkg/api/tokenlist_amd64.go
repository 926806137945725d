package api

import (
	"math"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// listCommas finds the commas in blocks of 64 bytes of text, and writes their positions. It ends before the first block
// with anything else than list elements with a comma after each. An element is a whole number in decimal digits without
// leading zeros, with at most one blank before it. The text begins with an element, or the blank before it. at must
// have room for eight further positions.
//
//go:noescape
func listCommas(text *byte, blocks int, at *uint32) (n int)

// listNumbers reads groups of eight elements that end at the commas at, and writes their numbers. The element before at
// is the position of the previous comma. listNumbers ends before a group with an element of more than eight bytes. It
// may read eight bytes of text from the start of each element.
//
//go:noescape
func listNumbers(text *byte, at *uint32, groups int, to *uint32) (done int)

// vectors reports whether the processor supports these functions.
var vectors = cpu.X86.HasAVX2 && cpu.X86.HasBMI1 && cpu.X86.HasPOPCNT

// fewBlocks is the number of blocks to search for commas before their numbers are read.
const fewBlocks = 32

// shortNumbers appends to dst, up to its capacity, the numbers at the front of data that have a comma after each, with
// at most one blank after the comma. The numbers have up to seven digits, or eight in some cases. It returns the length
// of the numbers and separators.
func shortNumbers(dst []uint32, data []byte) ([]uint32, int) {
	i := 0
	if vectors {
		dst, i = vectorNumbers(dst, data)
	}
	dst, n := wordNumbers(dst, data[i:])
	return dst, i + n
}

// vectorNumbers is shortNumbers for groups of eight. It finds the commas in 64 bytes at a time, and reads eight numbers
// at once without a branch that depends on their lengths.
func vectorNumbers(dst []uint32, data []byte) ([]uint32, int) {
	var at [1 + 64/2*fewBlocks + 8]uint32 // at[0] is the position before the text
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
