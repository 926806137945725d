package cli

import "testing"

// A small heap grows by 128 MiB between two collections, or to five times its size; a greater one doubles.
func TestGrowth(t *testing.T) {
	for live, want := range map[uint64]int{0: 400, 1 << 20: 400, 32 << 20: 400, 64 << 20: 200, 100 << 20: 128,
		128 << 20: 100, 1 << 40: 100} {
		if got := growth(live); got != want {
			t.Errorf("%d bytes: %d %%, not %d", live, got, want)
		}
	}
}
