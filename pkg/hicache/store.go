package hicache

import (
	"context"
	"errors"
	"math/bits"
)

// Store says which objects a shared store holds. Implementations: [Mooncake], [Mirror], [Folder].
//
// Exists answers for keys[i] with bit i of present. It may know less than it was asked: a bit that is not set in known
// says nothing. An error says why not all bits are known; what is known counts nevertheless. Exists returns soon after
// ctx ends. Any number of goroutines may call it.
type Store interface {
	Exists(ctx context.Context, keys []string) (present, known Bitmap, err error)
}

// What a caller of a store does next is the same for all of these: it answers without the store and says why.
var (
	// ErrKey is returned by stores for a key that cannot be asked for; such a key is never sent.
	ErrKey = errors.New("key that the store cannot be asked for")

	// ErrReply is returned by stores whose reply is not what the protocol says.
	ErrReply = errors.New("reply that makes no sense")

	// ErrStandby is returned by a store that is there and does not serve.
	ErrStandby = errors.New("the store does not serve")
)

// Bitmap is a list of bits: bit i%64 of word i/64.
type Bitmap []uint64

// NewBitmap returns n bits, all of them 0.
func NewBitmap(n int) Bitmap { return make(Bitmap, (n+63)/64) }

// Get is bit i, which must be within the bitmap's length.
func (b Bitmap) Get(i int) bool { return b[i>>6]>>(i&63)&1 != 0 }

// Set sets bit i.
func (b Bitmap) Set(i int) { b[i>>6] |= 1 << (i & 63) }

// Count is how many bits are set.
func (b Bitmap) Count() (n int) {
	for _, w := range b {
		n += bits.OnesCount64(w)
	}
	return n
}
