package hicache

import "testing"

func TestPrefetchLimit(t *testing.T) {
	for _, c := range []struct {
		release      string
		host, device uint64
		buffer       bool
		want         int
	}{
		{"0.5.23", 200_016, 100_000, false, 100_008}, {"0.5.23", 200_016, 100_000, true, 180_014},
		{"", 200_016, 100_000, true, 180_014}, {"0.5.18", 200_016, 100_000, true, 100_008},
		{"0.5.15.post1", 200_016, 100_000, false, 100_008}, {"0.5.14", 200_016, 100_000, false, 80_012},
		{"0.5.12", 100_000, 100_000, false, 1}, {"0.5.12", 90_000, 100_000, false, 1},
		{"0.5.23", 0, 100_000, false, 0}, {"0.5.23", 1, 1, false, 1},
	} {
		if got := (&SGLang{EngineVersion: c.release}).PrefetchLimit(c.host, c.device, c.buffer); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}
