package registry

import (
	"encoding/json"
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

// TestLeaseIsEnded: a shim ends its own lease at once, and no other's.
func TestLeaseIsEnded(t *testing.T) {
	s := newSite(t)
	l := must(NewLease(s.ns, record("w", time.Hour), LeaseHooks{}))
	s.must(l.End(s.ctx, true)) // there is none
	_, _, err := l.renew(s.ctx, 0)
	s.must(err)
	state := func() State {
		var r Record
		s.must(json.Unmarshal(must(s.bucket.Latest(s.ctx, l.name)).Value, &r))
		return r.State
	}
	other := must(NewLease(s.ns, record("w", time.Hour), LeaseHooks{}))
	s.must(other.End(s.ctx, true))
	if now := state(); now != Held {
		t.Errorf("another shim's End: %s", now)
	}
	s.must(l.End(s.ctx, true))
	if now := state(); now != Expired {
		t.Errorf("its own End: %s", now)
	}
}
