package registry

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestAStoredAttempt: after a lost acknowledgement of a renewal, the next renewal writes again, because a node that
// started in between considers the record old.
func TestAStoredAttempt(t *testing.T) {
	s := newSite(t)
	l := must(NewLease(s.ns, record("w", time.Hour), nil))
	first, _, err := l.renew(s.ctx, 0)
	s.must(err)
	stored := must(s.bucket.Commit(s.ctx, nil, jetstream.Value{Key: l.name, Data: l.text()}, first))
	next, expired, err := l.renew(s.ctx, first)
	s.must(err)
	if latest := must(s.bucket.Latest(s.ctx, l.name)).Revision; next <= stored || latest != next || expired {
		t.Errorf("revision %d was stored without an acknowledgement; renewed as %d (expired: %v), the bucket has %d", stored, next,
			expired, latest)
	}
}

// TestLeaseIsEnded: a shim ends only the own lease, at once.
func TestLeaseIsEnded(t *testing.T) {
	s := newSite(t)
	l := must(NewLease(s.ns, record("w", time.Hour), nil))
	s.must(l.End(s.ctx, true)) // no lease exists
	_, _, err := l.renew(s.ctx, 0)
	s.must(err)
	state := func() State {
		var r Record
		s.must(json.Unmarshal(must(s.bucket.Latest(s.ctx, l.name)).Value, &r))
		return r.State
	}
	other := must(NewLease(s.ns, record("w", time.Hour), nil))
	s.must(other.End(s.ctx, true))
	if now := state(); now != Held {
		t.Errorf("another shim's End: %s", now)
	}
	s.must(l.End(s.ctx, true))
	if now := state(); now != Expired {
		t.Errorf("End of the holder: %s", now)
	}
}
