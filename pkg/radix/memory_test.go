package radix

import (
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"unsafe"
)

// TestArray grows arrays of all kinds of memory beside slices: what they hold is the same, also after a mapping is
// full, and where they lie changes only when they say so.
func TestArray(t *testing.T) {
	for name, l := range map[string]limits{
		"heap":   memories[0],
		"mapped": {mapped: 256, reserve: 1 << 20, step: 4 << 10},
		"full":   memories[1],
		// more address space than there is: half is asked for, and half again
		"refused": {mapped: 64, reserve: math.MaxInt/4 + 1, step: 4 << 10},
	} {
		t.Run(name, func(t *testing.T) {
			m := &memory{limits: l}
			defer m.release()
			rng := rand.New(rand.NewPCG(3, 1))
			for range 20 {
				a, twin := array[uint64]{}, []uint64(nil)
				for len(twin) < 40_000 {
					was := unsafe.SliceData(a.s)
					moved := a.grow(m, len(twin)+1+rng.IntN(3000), rng.IntN(500))
					if moved != (was != unsafe.SliceData(a.s)) {
						t.Fatalf("of %d elements: moved is %v", len(a.s), moved)
					}
					if !slices.Equal(a.s[:len(twin)], twin) {
						t.Fatalf("of %d elements: what was there is not what is there", len(twin))
					}
					for _, v := range a.s[len(twin):] {
						if v != 0 {
							t.Fatal("what is new is not zero")
						}
					}
					for i := len(twin); i < len(a.s); i++ {
						a.s[i] = rng.Uint64()
					}
					twin = slices.Clone(a.s)
				}
				if mapped := a.mapped != nil; runtime.GOOS == "linux" && mapped != (name == "mapped" ||
					name == "refused") {
					if name != "full" { // as the last growth left it
						t.Errorf("mapped: %v", mapped)
					}
				}
				if m.release(); len(m.regions) != 0 {
					t.Errorf("%d regions are left", len(m.regions))
				}
			}
		})
	}
	if region := reserveMemory(math.MaxInt/2, math.MaxInt/4); region != nil {
		t.Error("the system has more address space than there is")
	}
}

// TestUsualMemory: the build that users get maps large arrays, and an index that is collected gives all of it back.
func TestUsualMemory(t *testing.T) {
	x := New(Config{})
	x.slabEnd = uint32(mappedLimits.mapped / slabBlocks)
	x.growBlocks()
	if mapped, want := x.locals.mapped != nil, usualLimits.mapped != math.MaxInt &&
		runtime.GOOS == "linux"; mapped != want {
		t.Errorf("locals are mapped: %v, want %v", mapped, want)
	}
	m := x.memory
	m.release()
	if len(m.regions) != 0 {
		t.Errorf("%d regions are left", len(m.regions))
	}
	m.release() // again does no harm
	runtime.KeepAlive(x)
}
