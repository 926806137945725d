package radix

import "golang.org/x/sys/cpu"

// findVectors looks up hashes and writes the value of the first slot with each, or 0. It stops at a hash far from its
// home and returns the number of finished hashes.
//
//go:noescape
func findVectors(slots *uint64, size uint64, hashes *uint64, n int, refs *uint32) (done int)

// enterVectors enters hashes and values. It stops at an existing hash, at a hash far from its home, and at a hash that
// would move many others. It returns the number of finished hashes.
//
//go:noescape
func enterVectors(slots *uint64, size uint64, hashes *uint64, n int, refs *uint32) (done int)

// removeVectors removes slots. It stops at a slot far from its home and at a slot that would move many others. It
// returns the number of finished slots.
//
//go:noescape
func removeVectors(slots *uint64, size uint64, hashes *uint64, n int, refs *uint32) (done int)

// vectors reports whether the processor has the required instructions.
var vectors = cpu.X86.HasAVX2 && cpu.X86.HasBMI1 && cpu.X86.HasBMI2
