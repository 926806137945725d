package harness

import (
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/tools/twin"
)

// NewTruth returns an empty twin of the index for a rank, without expiry.
func NewTruth() *twin.Rank {
	const day = events.Millis(24 * 60 * 60 * 1000)
	return twin.New(twin.Config{MaxPending: radix.DefaultMaxPending, PendingFor: day,
		MaxTombstones: radix.DefaultMaxTombstones, TombstoneFor: day}, BlockSize)
}
