package api

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
)

// TestShortNumbers compares texts, some of them broken, with a reader of one number after another. No number is written
// beyond the capacity of the list.
func TestShortNumbers(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 4))
	read := 0
	for range 3000 {
		var text []byte
		blank, digits := rng.IntN(3), 1+rng.IntN(9)
		for most := rng.IntN(6000); len(text) < most; {
			if len(text) > 0 && (blank == 1 || blank == 2 && rng.IntN(2) == 0) {
				text = append(text, ' ')
			}
			text = append(strconv.AppendUint(text, rng.Uint64N(uint64(powers[min(digits, 8)]))<<(digits/9), 10), ',')
		}
		for range rng.IntN(3) {
			if len(text) > 0 {
				text[rng.IntN(len(text))] = "0123456789, -.]\"\x00\xff"[rng.IntN(18)]
			}
		}
		// The bytes after the text must not matter.
		text = append(append([]byte{}, text...), "]1,2,3,"[:rng.IntN(8)]...)
		text = text[:rng.IntN(len(text)+1)]
		room := rng.IntN(1 + len(text))
		memory := make([]uint32, room+8)
		for _, f := range []func([]uint32, []byte) ([]uint32, int){shortNumbers, wordNumbers} {
			for i := range memory {
				memory[i] = 0xdeadbeef
			}
			got, n := f(memory[:0:room], text)
			for _, v := range memory[len(got):] {
				if v != 0xdeadbeef {
					t.Fatalf("%q, room for %d: memory behind the %d numbers was written", text, room, len(got))
				}
			}
			if want := twinNumbers(text[:n]); !slices.Equal(got, want) {
				t.Fatalf("%q, room for %d: %d bytes are read as %v, are %v", text, room, n, got, want)
			}
			read += len(got)
		}
	}
	if read < 300_000 {
		t.Errorf("only %d numbers were read", read)
	}
}

// twinNumbers returns the numbers of a text with a comma after each number and at most one blank before it; nil for
// other texts.
func twinNumbers(text []byte) []uint32 {
	out := []uint32{}
	for i := 0; i < len(text); i++ {
		if text[i] == ' ' {
			if i++; i == len(text) {
				break
			}
		}
		from := i
		for i < len(text) && text[i] != ',' {
			i++
		}
		v, err := strconv.ParseUint(string(text[from:i]), 10, 32)
		if err != nil || i == len(text) || i-from > 1 && text[from] == '0' {
			return nil
		}
		out = append(out, uint32(v))
	}
	return out
}
