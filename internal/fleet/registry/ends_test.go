package registry

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestAHangingClearBlocksNoOther: a rank with a blocked log delays the end of no other lease.
func TestAHangingClearBlocksNoOther(t *testing.T) {
	s := newSite(t)
	s.mu.Lock()
	s.hangs = "hangs"
	s.mu.Unlock()
	endHanging, end := s.shim("hangs", time.Second), s.shim("later", time.Second)
	s.until("both are known", func() bool { return s.know("hangs", "later") })
	endHanging()
	<-s.hanging
	end()
	s.until("the other lease ends", func() bool { return s.wasCleared("later") })
}

// TestEnds: a waiting lease is ended once, few leases of a partition end at a time, and no partition waits for another.
func TestEnds(t *testing.T) {
	var e ends
	release, stuck := make(chan struct{}), make(chan struct{}, 100)
	var mu sync.Mutex
	calls, most, now := 0, 0, 0
	rank := func(i int) events.RankKey { return events.RankKey{Instance: events.WorkerID(fmt.Sprint(i))} }
	for range 2 {
		for i := range 20 {
			e.add(1, rank(i), func() {
				mu.Lock()
				calls, now = calls+1, now+1
				most = max(most, now)
				mu.Unlock()
				stuck <- struct{}{}
				<-release
				mu.Lock()
				now--
				mu.Unlock()
			})
		}
	}
	for range endsAtOnce {
		<-stuck
	}
	other := make(chan struct{})
	e.add(2, rank(100), func() { close(other) })
	<-other
	close(release)
	e.wait()
	if calls != 20 || most != endsAtOnce || len(e.known) != 0 || len(e.of) != 0 {
		t.Errorf("%d calls, %d at once, %d and %d are left", calls, most, len(e.known), len(e.of))
	}
}
