package tables

import (
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestCapacityBounds: the table marks lower bounds, and an unknown difference is never 0.0 points.
func TestCapacityBounds(t *testing.T) {
	c := &api.Capacity{Points: make([]api.CapacityPoint, 1), Tiers: []api.CapacityTier{
		{Tier: "device", Blocks: 900, Source: api.CapacityRegistered, Share: 0.6, Last: 0.02, Beyond: true, LastBound: true},
		{Tier: "host", Blocks: 2000, Source: api.CapacityHeld, Share: 0.75, Beyond: true, ShareBound: true, LastBound: true},
		{Tier: "disk", Blocks: 10, Source: api.CapacityHeld, Share: 0.8, Doubled: 0.01},
	}}
	var out strings.Builder
	Capacity(&out, c)
	lines := strings.Split(out.String(), "\n")
	for i, want := range []string{"device 900 registered 60.0 % unknown >= 2.0 points",
		"host 2000 held >= 75.0 % unknown unknown", "disk 10 held 80.0 % 1.0 points 0.0 points"} {
		if got := strings.Join(strings.Fields(lines[3+i]), " "); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
