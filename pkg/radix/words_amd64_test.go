//go:build unix

package radix

import (
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// guarded returns n words at the end of a page, before an unreadable page.
func guarded(t *testing.T, n int) []uint64 {
	t.Helper()
	page := unix.Getpagesize()
	size := (n*8 + page - 1) / page * page
	region, err := unix.Mmap(-1, 0, size+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(region) })
	if err := unix.Mprotect(region[size:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	return unsafe.Slice((*uint64)(unsafe.Pointer(&region[size-n*8])), n)
}

// TestSameRunTwins compares the assembly with its twin in Go: all lengths and places of the first difference, in the
// lowest and highest bits of a word, at all alignments, up to the last readable word.
func TestSameRunTwins(t *testing.T) {
	const most = 80
	rng := rand.New(rand.NewPCG(8, 64))
	a, b := guarded(t, most+8), guarded(t, most+8)
	check := func(x, y []uint64) {
		t.Helper()
		if got, want := sameRunSSE(x, y), sameRunAtomic(x, y); got != want {
			t.Fatalf("%d and %d words: %d equal, the assembly returns %d", len(x), len(y), want, got)
		}
	}
	check(nil, nil)
	check(a, nil)
	for n := 1; n <= most; n++ {
		for _, before := range []int{0, 1, 2, 3, 7} { // unused words at the end: they change the place of both
			for _, off := range []int{0, 1} {
				x, y := a[len(a)-n-before:], b[len(b)-n-before-off:]
				y = y[:n]
				for i := range y {
					y[i] = rng.Uint64()
				}
				copy(x, y)
				check(x, y)
				check(x[:n], y)
				for at := range n {
					for _, bit := range []uint64{1, 1 << 31, 1 << 63} {
						x[at] ^= bit
						check(x, y)
						x[at] ^= bit
					}
				}
				for range 4 { // several differences
					x[rng.IntN(n)]++
				}
				check(x, y)
			}
		}
	}
	long := make([]uint64, 100_000)
	for i := range long {
		long[i] = rng.Uint64()
	}
	other := slices.Clone(long)
	for range 200 {
		at, from := rng.IntN(len(long)), rng.IntN(len(long))
		other[at]++
		check(long[from:], other[from:])
		other[at]--
	}
}

// TestPrefetchReadsNothing prefetches unreadable memory and places of arbitrary hashes. Nothing happens, and nothing
// changes.
func TestPrefetchReadsNothing(t *testing.T) {
	words := guarded(t, 16)
	prefetchWords(&words[15], 4096)
	prefetchWords(&words[0], 0)
	rng := rand.New(rand.NewPCG(8, 65))
	for _, size := range []uint64{8, 56, 64, 1 << 20} {
		n := names{size: size, slots: array[uint64]{s: make([]uint64, size+tailMargin)}}
		for i := range n.slots.s {
			n.slots.s[i] = rng.Uint64()
		}
		was := slices.Clone(n.slots.s)
		hashes := []uint64{0, 1, 1<<32 - 1, 1 << 31}
		for range 100 {
			hashes = append(hashes, uint64(rng.Uint32()))
		}
		want := uint64(0)
		for _, h := range hashes {
			want += n.slots.s[h*(size/8)>>32*8]
		}
		n.prefetch(hashes)
		n.prefetch(nil)
		if got := n.visit(hashes); got != want { // the replacement on machines without the instruction
			t.Errorf("size %d: the visited places have the sum %d, want %d", size, got, want)
		}
		if !slices.Equal(n.slots.s, was) {
			t.Errorf("size %d: the prefetch changed the table", size)
		}
	}
	var none names
	none.prefetch([]uint64{1})
	if none.visit([]uint64{1}) != 0 {
		t.Error("an empty table has places")
	}
}
