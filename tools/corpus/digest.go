package corpus

import "fmt"

// Digest is the digest of all answers: the sum modulo 2⁶⁴ over every query, worker and depth above zero of
// Mix(query<<40 ^ worker<<20 ^ depth). The order of additions does not matter.
type Digest uint64

// Add adds an answer: worker holds the first depth blocks of the query in the device tier. query is the number in order
// of the file, from 0.
func (d *Digest) Add(query int, worker uint32, depth int) {
	if depth > 0 {
		*d += Digest(Mix(uint64(query)<<40 ^ uint64(worker)<<20 ^ uint64(depth)))
	}
}

func (d Digest) String() string { return fmt.Sprintf("%016x", uint64(d)) }

// Mix returns an output step of SplitMix64 for the state x (Steele, Lea, Flood: Fast splittable pseudorandom number
// generators, OOPSLA 2014).
func Mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb
	return x ^ (x >> 31)
}
