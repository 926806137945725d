package sharedstore

import (
	"context"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// patience is the time limit for an expected event. A busy machine may stall for minutes.
const patience = testkit.Patience

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}
