package radix

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// nextSeq returns the sequence hash of a block from the parent's. Only checksums use it.
func nextSeq(parent, local uint64) uint64 {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], parent)
	binary.LittleEndian.PutUint64(b[8:], local)
	return xxh3.HashSeed(b[:], 1337)
}

// mix is a step of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
