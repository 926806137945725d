package radix

import (
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// TestArray grows arrays in all kinds of memory next to slices. The contents are equal, also after a mapping is full.
// Elements move only if grow reports a move.
func TestArray(t *testing.T) {
	for name, l := range map[string]limits{
		"heap":   memories[0],
		"mapped": {mapped: 256, reserve: 1 << 20, step: 4 << 10},
		"full":   memories[1],
		// more address space than the system has: reserveMemory halves the size several times
		"refused": {mapped: 64, reserve: math.MaxInt/4 + 1, step: 4 << 10},
	} {
		t.Run(name, func(t *testing.T) {
			m := &memory{limits: l}
			defer m.release()
			rng := rand.New(rand.NewPCG(3, 1))
			for range testkit.Rounds(20) {
				a, twin := array[uint64]{}, []uint64(nil)
				for len(twin) < 40_000 {
					was := unsafe.SliceData(a.s)
					moved := a.grow(m, len(twin)+1+rng.IntN(3000), rng.IntN(500))
					if moved != (was != unsafe.SliceData(a.s)) {
						t.Fatalf("%d elements: moved is %v", len(a.s), moved)
					}
					if !slices.Equal(a.s[:len(twin)], twin) {
						t.Fatalf("%d elements: the content has changed", len(twin))
					}
					for _, v := range a.s[len(twin):] {
						if v != 0 {
							t.Fatal("new elements are not zero")
						}
					}
					for i := len(twin); i < len(a.s); i++ {
						a.s[i] = rng.Uint64()
					}
					twin = slices.Clone(a.s)
				}
				if mapped := a.mapped != nil; runtime.GOOS == "linux" && mapped != (name == "mapped" ||
					name == "refused") {
					if name != "full" { // after the last growth
						t.Errorf("mapped: %v", mapped)
					}
				}
				if m.release(); len(m.regions) != 0 {
					t.Errorf("%d regions remain", len(m.regions))
				}
			}
		})
	}
	if region := reserveMemory(math.MaxInt/2, math.MaxInt/4); region != nil {
		t.Error("the system reserved an impossible size")
	}
}

// TestUsualMemory: the user's build maps large arrays, and a collected index unmaps all of them.
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
		t.Errorf("%d regions remain", len(m.regions))
	}
	m.release() // a second call is harmless
	runtime.KeepAlive(x)
}
