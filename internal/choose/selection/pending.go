package selection

import (
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// PendingLimits bound the choices that are kept for a booking by id, as in Dynamo's selection service.
type PendingLimits struct {
	Life    time.Duration // default 120 s
	Entries int           // default 4,096; the oldest are dropped first
	Bytes   int           // default 256 MiB
}

func (l *PendingLimits) setDefaults() {
	if l.Life <= 0 {
		l.Life = 120 * time.Second
	}
	if l.Entries <= 0 {
		l.Entries = 4096
	}
	if l.Bytes <= 0 {
		l.Bytes = 256 << 20
	}
}

type pendingKey struct{ model, id string }

type pendingChoice struct {
	chosen
	expires time.Time
}

func (c *pendingChoice) bytes() int {
	return 384 + len(c.booking.ID) + len(c.prefill.ID) + len(c.session) + 8*len(c.booking.Hashes)
}

// pending has choices that wait for their booking.
type pending struct {
	limits PendingLimits
	now    func() time.Time

	mu    sync.Mutex
	lru   *simplelru.LRU[pendingKey, *pendingChoice]
	bytes int
}

func newPending(limits PendingLimits) *pending {
	limits.setDefaults()
	p := &pending{limits: limits, now: time.Now}
	p.lru, _ = simplelru.NewLRU(limits.Entries, func(_ pendingKey, c *pendingChoice) { p.bytes -= c.bytes() })
	return p
}

// add keeps a choice in place of an earlier one for its id. It copies the hashes.
func (p *pending) add(model string, choice *chosen) {
	c := &pendingChoice{chosen: *choice, expires: p.now().Add(p.limits.Life)}
	c.out, c.booking.Hashes = nil, slices.Clone(c.booking.Hashes)
	p.mu.Lock()
	defer p.mu.Unlock()
	key := pendingKey{model, c.booking.ID}
	p.lru.Remove(key)
	p.lru.Add(key, c)
	for p.bytes += c.bytes(); p.bytes > p.limits.Bytes; {
		p.lru.RemoveOldest()
	}
}

// claim removes and returns the choice for an id.
func (p *pending) claim(model, id string) (chosen, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := pendingKey{model, id}
	c, ok := p.lru.Peek(key)
	p.lru.Remove(key)
	if !ok || !p.now().Before(c.expires) {
		return chosen{}, false
	}
	return c.chosen, true
}

// Pending returns the rank of the kept choice for an id, if there is one.
func (s *Service) Pending(model, id string) (events.RankKey, bool) {
	p := s.pending
	p.mu.Lock()
	defer p.mu.Unlock()
	c, ok := p.lru.Peek(pendingKey{model, id})
	if !ok || !p.now().Before(c.expires) {
		return events.RankKey{}, false
	}
	return c.chosen.booking.Rank, true
}

// DropPending drops the kept choice for an id.
func (s *Service) DropPending(model, id string) { s.pending.drop(model, id) }

// drop drops the kept choice for an id.
func (p *pending) drop(model, id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lru.Remove(pendingKey{model, id})
}
