package registry

import (
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestAnAttemptThatWasStored: where the acknowledgement of a renewal was lost, the next one writes again, since a node
// that began in between takes what is in the bucket for old.
func TestAnAttemptThatWasStored(t *testing.T) {
	s := newSite(t)
	l := must(NewLease(s.ns, record("w", time.Hour), LeaseHooks{}))
	first, _, err := l.renew(s.ctx, 0)
	s.must(err)
	stored := must(s.bucket.Commit(s.ctx, nil, jetstream.Value{Key: l.name, Data: l.text()}, first))
	next, expired, err := l.renew(s.ctx, first)
	s.must(err)
	if latest := must(s.bucket.Latest(s.ctx, l.name)).Revision; next <= stored || latest != next || expired {
		t.Errorf("%d was stored unknown to the shim; it renewed as %d (expired: %v), and %d is there", stored, next,
			expired, latest)
	}
}
