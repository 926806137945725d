package littleendian

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestLists: the bytes equal the result of encoding/binary for each number, for any prefix and alignment, and convert
// back to the same list.
func TestLists(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 1))
	for range 200 {
		n, before := rng.IntN(50), make([]byte, rng.IntN(9))
		words, halves := make([]uint64, n), make([]uint32, n)
		for i := range n {
			words[i], halves[i] = rng.Uint64(), rng.Uint32()
		}
		check(t, before, words)
		check(t, before, halves)
	}
	check(t, nil, []uint64(nil))
	if got := Append(nil, []uint32{0x04030201}); !bytes.Equal(got, []byte{1, 2, 3, 4}) {
		t.Errorf("0x04030201 is % x", got)
	}
	if got := Append(nil, []uint64{0x0807060504030201}); !bytes.Equal(got, []byte{1, 2, 3, 4, 5, 6, 7, 8}) {
		t.Errorf("0x0807060504030201 is % x", got)
	}
}

func check[T Number](t *testing.T, before []byte, list []T) {
	t.Helper()
	got, want := Append(slices.Clone(before), list), appendEach(slices.Clone(before), list)
	if !bytes.Equal(got, want) {
		t.Fatalf("%x: appended % x, one by one % x", list, got, want)
	}
	back, each := make([]T, len(list)), make([]T, len(list))
	Read(back, append(got[len(before):], 0xff)) // later bytes are ignored
	readEach(each, got[len(before):])
	if !slices.Equal(back, list) || !slices.Equal(each, list) {
		t.Fatalf("%x converts back to %x, one by one to %x", list, back, each)
	}
}

// TestReadTooFew: missing bytes are a mistake of the caller.
func TestReadTooFew(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("three bytes were read as a number of four")
		}
	}()
	Read(make([]uint32, 1), make([]byte, 3))
}
