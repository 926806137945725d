package guess

import (
	"cmp"
	"container/heap"
	"math"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Rule is how long guesses of a rank hold. Without either there are none.
type Rule struct {
	TTL      time.Duration // since a request with the block was last sent there
	Capacity int           // blocks that the rank has room for, in place of TTL; 0: not known

	// Life is since when the rank's engine is known to run; 0: not known. In another life it holds nothing of before.
	Life int64
}

func (r Rule) off() bool { return r.TTL <= 0 && r.Capacity <= 0 }

// Reason is why a guess was dropped.
type Reason int

// The reasons.
const (
	Expired Reason = iota // its TTL is over
	Evicted               // the rank's capacity is used up
	Pruned                // the table is full
	Refuted               // the rank's events have passed it by
	Removed               // the rank is not registered any more, or not for guesses, or its engine is another
	reasons
)

func (r Reason) String() string {
	return [...]string{"expired", "evicted", "pruned", "refuted", "removed"}[r]
}

// Table is the guesses of one model. See the package's documentation for its invariants.
type Table struct {
	Dropped [reasons]uint64 // blocks, counted for each rank that was guessed to hold them

	blocks int     // at most; beyond, the table is pruned
	ratio  float64 // to this share of blocks
	unruly time.Duration

	rules    map[events.RankKey]Rule
	ranks    []*rank // by id; nil where no rank is
	free     []uint32
	byKey    map[events.RankKey]*rank
	changes  uint64 // of which ids ranks have
	root     node
	size     int // of all ranks
	requests map[load.Key]*request
}

// rank is one of which something is guessed, or was a while ago.
type rank struct {
	key     events.RankKey
	id      uint32
	rule    Rule
	known   bool // rule is of its registration
	size    int  // blocks: see invariant 3
	queue   queue
	running map[*request]bool // with leases
}

// request is one under way whose blocks are leased.
type request struct {
	key    load.Key
	rank   *rank
	tail   *node // the end of its prompt
	beside int   // blocks that have no hashes: its output, and of its prompt what it shares with nobody
}

// NewTable returns an empty table for so many blocks, counted for each rank. When it has more it drops what expires
// soonest, until a share ratio of them is left. Ranks that are not registered (yet) have the TTL unruly.
func NewTable(blocks int, ratio float64, unruly time.Duration) *Table {
	return &Table{blocks: blocks, ratio: ratio, unruly: unruly, byKey: map[events.RankKey]*rank{},
		requests: map[load.Key]*request{}}
}

// Size is how many blocks are guessed, or taken beside them, counted for each rank.
func (t *Table) Size() int { return t.size }

// SetRules says which ranks are registered. Guesses of one that was and is not any more are dropped.
func (t *Table) SetRules(now time.Duration, rules map[events.RankKey]Rule) {
	t.rules = rules
	for _, k := range slices.Clone(t.ranks) {
		if k == nil {
			continue
		}
		rule, known := rules[k.key]
		switch {
		case !known && k.known, known && rule.off(), rule.Life != 0 && k.rule.Life != 0 && rule.Life != k.rule.Life:
			t.remove(k, Removed)
		case known && (!k.known || k.rule != rule):
			if rule.Life == 0 {
				rule.Life = k.rule.Life
			}
			k.known, k.rule = true, rule
			t.changes++
			if rule.Capacity <= 0 {
				t.dropBeside(k)
			}
			t.evict(k)
		}
	}
	t.Expire(now)
}

// Observe takes news of a request, of whichever node.
func (t *Table) Observe(now time.Duration, r *load.Request) {
	q := t.requests[r.Key] // if its blocks are leased
	switch {
	case r.New:
		if !r.Ended {
			t.begin(now, r, false)
		}
	case q != nil && r.Ended:
		t.end(now, q)
	case q != nil:
		t.resize(q.rank, r.Private+r.Outputs-q.beside)
		q.beside = r.Private + r.Outputs
		t.evict(q.rank)
		t.prune()
	}
	if r.PrefillDone || r.Ended {
		t.arrived(now, r)
	}
}

// Recall takes a request that [Table.Past] of another node's table has yielded.
func (t *Table) Recall(now time.Duration, r *load.Request) {
	t.begin(now, r, true)
	if r.PrefillDone {
		t.arrived(now, r)
	}
}

// begin enters the prompt of a request that is sent to a rank, or was and has ended.
func (t *Table) begin(now time.Duration, r *load.Request, ended bool) {
	if rule, known := t.rules[r.Rank]; known && rule.off() {
		return
	}
	k := t.rankOf(r.Rank)
	at, leased := now-r.Age, k.rule.Capacity > 0 && !ended
	if len(r.Hashes) > 0 && (leased || at+t.ttl(k) > now) {
		tail := t.root.reach(r.Hashes)
		for n := tail; n != &t.root; n = n.parent {
			t.use(k, n, at, leased, r.Key)
		}
		if leased {
			t.lease(k, r, tail)
		}
	} else if leased {
		t.lease(k, r, &t.root)
	}
	if ended && k.rule.Capacity > 0 {
		t.leaveBehind(k, r.Private, at, r.Key)
	}
	t.evict(k)
	t.prune()
}

// leaveBehind notes what an ended request has left behind beside its prompt, in a rank with a capacity.
func (t *Table) leaveBehind(k *rank, blocks int, used time.Duration, owner load.Key) {
	if blocks > 0 {
		heap.Push(&k.queue, &slot{rank: k, blocks: blocks, used: used, owner: owner})
		t.resize(k, blocks)
	}
}

// Past yields requests of which follows what is guessed that is not leased, the latest first, and no more of them than
// say all.
func (t *Table) Past(now time.Duration, yield func(*load.Request) bool) {
	var all []*slot
	for _, k := range t.ranks {
		if k == nil {
			continue
		}
		for _, s := range k.queue {
			if !s.covered() {
				all = append(all, s)
			}
		}
	}
	slices.SortFunc(all, func(a, b *slot) int { return cmp.Compare(b.used, a.used) })
	for _, s := range all {
		r := load.Request{Key: s.owner, Rank: s.rank.key, Private: s.blocks, PrefillDone: s.due != 0, Age: now - s.used}
		if s.node != nil {
			r.Hashes = s.node.path()
		}
		if !yield(&r) {
			return
		}
	}
}

func (t *Table) lease(k *rank, r *load.Request, tail *node) {
	q := &request{key: r.Key, rank: k, tail: tail, beside: r.Private + r.Outputs}
	t.requests[r.Key] = q
	k.running[q] = true
	t.resize(k, q.beside)
}

// use says that a request was sent to a rank with the blocks of a node.
func (t *Table) use(k *rank, n *node, at time.Duration, leased bool, owner load.Key) {
	i, ok := n.slot(k.id)
	if !ok {
		n.slots = slices.Insert(n.slots, i, ref{k.id, &slot{rank: k, node: n, used: at, at: -1, owner: owner}})
		t.resize(k, len(n.edge))
	}
	s := n.slots[i].slot
	if at > s.used {
		s.used, s.owner, s.due = at, owner, 0
	}
	switch {
	case leased:
		if s.leases++; s.at >= 0 {
			heap.Remove(&k.queue, s.at)
		}
	case s.leases > 0:
	case s.at < 0:
		heap.Push(&k.queue, s)
	default:
		heap.Fix(&k.queue, s.at)
	}
}

// end says that a request has ended: its blocks may be evicted from now on.
func (t *Table) end(now time.Duration, q *request) {
	delete(t.requests, q.key)
	k := q.rank
	delete(k.running, q)
	for n := q.tail; n != &t.root; n = n.parent {
		i, _ := n.slot(k.id)
		s := n.slots[i].slot
		s.used = max(s.used, now)
		if s.leases--; s.leases == 0 {
			heap.Push(&k.queue, s)
		}
	}
	t.resize(k, -q.beside)
	if k.rule.Capacity > 0 {
		t.leaveBehind(k, q.beside, now, q.key)
	}
	t.evict(k)
	t.prune()
}

// arrived notes that a request's blocks are at its rank.
func (t *Table) arrived(now time.Duration, r *load.Request) {
	k := t.byKey[r.Rank]
	if k == nil {
		return
	}
	n := &t.root
	for pos := 0; pos < len(r.Hashes); pos = n.end() {
		if n = n.kid(r.Hashes[pos]); n == nil {
			return
		}
		i, ok := n.slot(k.id)
		if !ok {
			return
		}
		if s := n.slots[i].slot; s.owner == r.Key && s.due == 0 {
			s.due = now
		}
	}
}

// Expire drops what is too old, and ranks of which nothing is left and that are not registered.
func (t *Table) Expire(now time.Duration) {
	for _, k := range t.ranks {
		if k == nil {
			continue
		}
		if ttl := t.ttl(k); ttl < forever {
			for len(k.queue) > 0 && k.queue[0].used+ttl <= now {
				t.shrink(k.queue[0], math.MaxInt, Expired)
			}
		}
		if !k.known && k.size == 0 && len(k.running) == 0 {
			t.forget(k)
		}
	}
}

const forever = time.Duration(math.MaxInt64 / 2)

// ttl is how long a rank's guesses hold that are not leased.
func (t *Table) ttl(k *rank) time.Duration {
	switch {
	case k.rule.Capacity > 0:
		return forever
	case k.known:
		return k.rule.TTL
	}
	return t.unruly
}

// evict makes a rank as small as its capacity, if it has one.
func (t *Table) evict(k *rank) {
	if k.rule.Capacity <= 0 {
		return
	}
	for k.size > k.rule.Capacity && len(k.queue) > 0 {
		t.shrink(k.queue[0], k.size-k.rule.Capacity, Evicted)
	}
}

// prune makes the table small, if it is too large. What expires soonest goes first, and of what never expires what was
// used longest ago. Leased blocks stay.
func (t *Table) prune() {
	if t.size <= t.blocks {
		return
	}
	var all []*slot
	for _, k := range t.ranks {
		if k != nil {
			all = append(all, k.queue...)
		}
	}
	slices.SortFunc(all, func(a, b *slot) int {
		return cmp.Or(cmp.Compare(t.ttl(a.rank)+a.used, t.ttl(b.rank)+b.used), cmp.Compare(b.depth(), a.depth()),
			a.rank.key.Compare(b.rank.key))
	})
	target := int(t.ratio * float64(t.blocks))
	for _, s := range all {
		if t.size <= target {
			break
		}
		t.shrink(s, t.size-target, Pruned)
	}
}

// dropBeside drops what a rank's ended requests have left behind beside their prompts.
func (t *Table) dropBeside(k *rank) {
	for _, s := range slices.Clone(k.queue) {
		if s.node == nil {
			t.shrink(s, s.blocks, Removed)
		}
	}
}

// shrink drops so many blocks, or all if there are no more, of a slot that is in its rank's queue, and behind whose
// node the rank has nothing.
func (t *Table) shrink(s *slot, blocks int, why Reason) {
	k, n := s.rank, s.node
	blocks = min(blocks, s.size())
	t.Dropped[why] += uint64(blocks)
	if n == nil {
		if s.blocks -= blocks; s.blocks == 0 {
			heap.Remove(&k.queue, s.at)
		}
		t.resize(k, -blocks)
		return
	}
	if blocks < len(n.edge) {
		n.split(len(n.edge) - blocks)
	}
	heap.Remove(&k.queue, s.at)
	t.leave(k, n)
}

// leave takes a rank's slot out of a node.
func (t *Table) leave(k *rank, n *node) {
	i, _ := n.slot(k.id)
	n.slots = slices.Delete(n.slots, i, i+1)
	t.resize(k, -len(n.edge))
	if len(n.slots) == 0 {
		n.parent.orphan(n)
	}
}

func (t *Table) resize(k *rank, by int) {
	k.size += by
	t.size += by
}

// rankOf returns a rank, and makes it if it is new.
func (t *Table) rankOf(key events.RankKey) *rank {
	if k := t.byKey[key]; k != nil {
		return k
	}
	k := &rank{key: key, id: uint32(len(t.ranks)), running: map[*request]bool{}}
	k.rule, k.known = t.rules[key]
	if last := len(t.free) - 1; last >= 0 {
		k.id, t.free = t.free[last], t.free[:last]
		t.ranks[k.id] = k
	} else {
		t.ranks = append(t.ranks, k)
	}
	t.byKey[key] = k
	t.changes++
	return k
}

// Refute drops what a rank is guessed to hold of seq beyond its first blocks, which the index confirms, if the rank's
// events of the time up to passed are in the index and the blocks were there before. It reports whether it did.
func (t *Table) Refute(key events.RankKey, seq []events.SeqHash, confirmed int, passed time.Duration) bool {
	k, n := t.byKey[key], &t.root
	for pos := 0; pos <= confirmed; pos = n.end() {
		if pos == len(seq) {
			return false
		}
		if n = n.kid(seq[pos]); n == nil {
			return false
		}
		if k := load.Common(n.edge, seq[pos:]); k < len(n.edge) && pos+k <= confirmed {
			return false
		}
	}
	if k == nil {
		return false
	}
	i, ok := n.slot(k.id)
	if !ok || n.slots[i].due == 0 || n.slots[i].due > passed || n.slots[i].leases > 0 {
		return false
	}
	if confirmed > n.start {
		n.split(confirmed - n.start)
	}
	t.cut(k, n)
	return true
}

// cut drops what a rank is guessed to hold from a node on.
func (t *Table) cut(k *rank, n *node) {
	i, ok := n.slot(k.id)
	if !ok {
		return
	}
	s := n.slots[i].slot
	for kid := range n.each {
		t.cut(k, kid)
	}
	t.shrink(s, math.MaxInt, Refuted)
}

// remove forgets a rank with all its guesses and requests.
func (t *Table) remove(k *rank, why Reason) {
	for q := range k.running {
		delete(t.requests, q.key)
		t.resize(k, -q.beside)
		for n := q.tail; n != &t.root; n = n.parent {
			i, _ := n.slot(k.id)
			s := n.slots[i].slot
			if s.leases--; s.leases == 0 {
				heap.Push(&k.queue, s)
			}
		}
	}
	for len(k.queue) > 0 {
		t.shrink(k.queue[0], math.MaxInt, why)
	}
	t.forget(k)
}

// forget drops a rank that has nothing.
func (t *Table) forget(k *rank) {
	delete(t.byKey, k.key)
	t.ranks[k.id] = nil
	t.free = append(t.free, k.id)
	t.changes++
}

// Depths sets, for each rank that is guessed to hold leading blocks of seq, how many: at place[id] of depths. Ids are
// those of [Table.Places]. It reports whether there is any.
func (t *Table) Depths(seq []events.SeqHash, place []int32, depths []uint32) (some bool) {
	t.root.depths(seq, func(list []ref, depth int) {
		for i := range list {
			if at := place[list[i].id]; at >= 0 {
				depths[at], some = uint32(depth), true
			}
		}
	})
	return some
}

// Places is where [Table.Depths] finds each rank's place: a rank that is registered and listed has its index in the
// list, others -1. It holds until the table's ranks change, as the second result does.
func (t *Table) Places(list map[events.RankKey]int32) (place []int32, changes uint64) {
	place = make([]int32, len(t.ranks))
	for id, k := range t.ranks {
		place[id] = -1
		if k == nil || !k.known {
			continue
		}
		if at, ok := list[k.key]; ok {
			place[id] = at
		}
	}
	return place, t.changes
}
