package radix

import "golang.org/x/sys/cpu"

// findVectors looks hashes up, and writes the value of the first slot with each, or 0. It returns how many it has
// looked up: it stops at one that is far from its home.
//
//go:noescape
func findVectors(slots *uint64, size uint64, hashes *uint64, n int, refs *uint32) (done int)

// enterVectors enters hashes and values. It returns how many it has entered: it stops at one whose hash is there, and
// at one that is far from its home or would have many others moved.
//
//go:noescape
func enterVectors(slots *uint64, size uint64, hashes *uint64, n int, refs *uint32) (done int)

// removeVectors takes slots out. It returns how many it has taken out: it stops at one that is far from its home or
// would have many others moved.
//
//go:noescape
func removeVectors(slots *uint64, size uint64, hashes *uint64, n int, refs *uint32) (done int)

// vectors reports whether the processor has what these need.
var vectors = cpu.X86.HasAVX2 && cpu.X86.HasBMI1 && cpu.X86.HasBMI2
