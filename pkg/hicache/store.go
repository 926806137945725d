package hicache

import (
	"context"
	"math/bits"
)

// Store reports which objects a shared store has. Implementations are in
// internal/ingest/sharedstore.
//
// Exists sets bit i of present for keys[i]. The bits of present are valid only for the bits in known. If bits are
// unknown, the error has the reason, and the known bits are valid nevertheless. Exists returns soon after ctx is done.
// It is safe for concurrent use.
type Store interface {
	Exists(ctx context.Context, keys []string) (present, known Bitmap, err error)
}

// Bitmap is a list of bits: bit i%64 of word i/64.
type Bitmap []uint64

// NewBitmap returns a bitmap of n zero bits.
func NewBitmap(n int) Bitmap { return make(Bitmap, (n+63)/64) }

// Get returns bit i, which must be within the length of the bitmap.
func (b Bitmap) Get(i int) bool { return b[i>>6]>>(i&63)&1 != 0 }

// Set sets bit i.
func (b Bitmap) Set(i int) { b[i>>6] |= 1 << (i & 63) }

// Count returns the number of set bits.
func (b Bitmap) Count() (n int) {
	for _, w := range b {
		n += bits.OnesCount64(w)
	}
	return n
}
