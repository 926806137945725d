package guess

import (
	"cmp"
	"container/heap"
	"math"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/choose/prompts"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Rule determines the lifetime of guesses about a rank. The zero Rule allows none.
type Rule struct {
	TTL      time.Duration // after the last request with the block
	Capacity int           // in blocks, in place of TTL; 0: unknown

	// Life identifies the rank's engine process by its start; 0: unknown. A new process holds no blocks of the old one.
	Life int64
}

func (r Rule) off() bool { return r.TTL <= 0 && r.Capacity <= 0 }

// Reason is the reason for dropping a guess.
type Reason int

// The reasons.
const (
	Expired Reason = iota // the TTL ended
	Evicted               // the rank is full
	Pruned                // the table is full
	Refuted               // the rank's events did not confirm the block
	Removed               // the rank's registration ended or excludes guesses, or the engine restarted
	reasons
)

func (r Reason) String() string {
	return [...]string{"expired", "evicted", "pruned", "refuted", "removed"}[r]
}

// Table has the guesses of one model. The package comment lists the invariants.
type Table struct {
	Dropped [reasons]uint64 // dropped blocks, counted per rank

	blocks     int     // the maximum of blocks; above, the table is pruned
	ratio      float64 // the remaining share of blocks after pruning
	defaultTTL time.Duration

	rules    map[events.RankKey]Rule
	ranks    []*rank // by id; nil for a free id
	free     []uint32
	byKey    map[events.RankKey]*rank
	changes  uint64 // counts changes of ids
	prompts  prompts.Trie[*slot]
	size     int // the sum over all ranks
	requests map[load.Key]*request
}

// rank is a rank with current or recent guesses.
type rank struct {
	key        events.RankKey
	id         uint32
	rule       Rule
	registered bool // rule comes from the registration
	size       int  // in blocks: see invariant 3
	queue      queue
	running    map[*request]bool // the requests with leases
}

// request is a request under way with leased blocks.
type request struct {
	key    load.Key
	rank   *rank
	tail   *node // the end of the prompt
	beside int   // blocks without hashes: the output, and the unshared part of the prompt
}

// NewTable returns an empty table for a maximum of blocks, counted per rank. A table with more blocks drops those that
// expire first, until the share ratio of the maximum is left. defaultTTL applies to unregistered ranks.
func NewTable(blocks int, ratio float64, defaultTTL time.Duration) *Table {
	return &Table{blocks: blocks, ratio: ratio, defaultTTL: defaultTTL, byKey: map[events.RankKey]*rank{},
		requests: map[load.Key]*request{}, prompts: prompts.Trie[*slot]{Copies: true, Halved: halved}}
}

// Size returns the number of predicted blocks and of blocks without hashes, counted per rank.
func (t *Table) Size() int { return t.size }

// SetRules sets the rules of all registered ranks. Guesses about formerly registered ranks are dropped.
func (t *Table) SetRules(now time.Duration, rules map[events.RankKey]Rule) {
	t.rules = rules
	for _, k := range slices.Clone(t.ranks) {
		if k == nil {
			continue
		}
		rule, registered := rules[k.key]
		restarted := rule.Life != 0 && k.rule.Life != 0 && rule.Life != k.rule.Life
		switch {
		case !registered && k.registered, registered && rule.off(), restarted:
			t.remove(k, Removed)
		case registered && (!k.registered || k.rule != rule):
			if rule.Life == 0 {
				rule.Life = k.rule.Life
			}
			k.registered, k.rule = true, rule
			t.changes++
			if rule.Capacity <= 0 {
				t.dropBeside(k)
			}
			t.evict(k)
		}
	}
	t.Expire(now)
}

// Observe applies a change of a request of any node.
func (t *Table) Observe(now time.Duration, r *load.Request) {
	q := t.requests[r.Key] // nil without leased blocks
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

// Recall applies a request from [Table.Past] of another node's table.
func (t *Table) Recall(now time.Duration, r *load.Request) {
	t.begin(now, r, true)
	if r.PrefillDone {
		t.arrived(now, r)
	}
}

// begin enters the prompt of a current or ended request to a rank.
func (t *Table) begin(now time.Duration, r *load.Request, ended bool) {
	if rule, registered := t.rules[r.Rank]; registered && rule.off() {
		return
	}
	k := t.rankOf(r.Rank)
	at, leased := now-r.Age, k.rule.Capacity > 0 && !ended
	if len(r.Hashes) > 0 && (leased || at+t.ttl(k) > now) {
		tail := t.prompts.Reach(r.Hashes)
		for n := tail; n.Parent != nil; n = n.Parent {
			t.use(k, n, at, leased, r.Key)
		}
		if leased {
			t.lease(k, r, tail)
		}
	} else if leased {
		t.lease(k, r, &t.prompts.Root)
	}
	if ended && k.rule.Capacity > 0 {
		t.leaveBehind(k, r.Private, at, r.Key)
	}
	t.evict(k)
	t.prune()
}

// leaveBehind adds the blocks without hashes of an ended request to a rank with a capacity.
func (t *Table) leaveBehind(k *rank, blocks int, used time.Duration, owner load.Key) {
	if blocks > 0 {
		heap.Push(&k.queue, &slot{rank: k, blocks: blocks, used: used, owner: owner})
		t.resize(k, blocks)
	}
}

// Past yields a minimum of requests with the same effect as all guesses without leases, the latest first.
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
			r.Hashes = s.node.Path()
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

// use records a request with the blocks of a node at a rank.
func (t *Table) use(k *rank, n *node, at time.Duration, leased bool, owner load.Key) {
	i, ok := n.Find(k.id)
	if !ok {
		n.Insert(i, prompts.Slot[*slot]{ID: k.id, Share: &slot{rank: k, node: n, used: at, at: -1, owner: owner}})
		t.resize(k, len(n.Edge))
	}
	s := n.Slots[i].Share
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

// end ends a request: its blocks may now be evicted.
func (t *Table) end(now time.Duration, q *request) {
	delete(t.requests, q.key)
	k := q.rank
	delete(k.running, q)
	for n := q.tail; n.Parent != nil; n = n.Parent {
		i, _ := n.Find(k.id)
		s := n.Slots[i].Share
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

// arrived records that the rank has computed the blocks of a request.
func (t *Table) arrived(now time.Duration, r *load.Request) {
	k := t.byKey[r.Rank]
	if k == nil {
		return
	}
	n := &t.prompts.Root
	for pos := 0; pos < len(r.Hashes); pos = n.End() {
		if n = n.Kid(r.Hashes[pos]); n == nil {
			return
		}
		i, ok := n.Find(k.id)
		if !ok {
			return
		}
		if s := n.Slots[i].Share; s.owner == r.Key && s.due == 0 {
			s.due = now
		}
	}
}

// Expire drops old guesses, and unregistered ranks without guesses.
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
		if !k.registered && k.size == 0 && len(k.running) == 0 {
			t.release(k)
		}
	}
}

const forever = time.Duration(math.MaxInt64 / 2)

// ttl returns the lifetime of a rank's guesses without leases.
func (t *Table) ttl(k *rank) time.Duration {
	switch {
	case k.rule.Capacity > 0:
		return forever
	case k.registered:
		return k.rule.TTL
	}
	return t.defaultTTL
}

// evict reduces a rank to its capacity, if the rule has one.
func (t *Table) evict(k *rank) {
	if k.rule.Capacity <= 0 {
		return
	}
	for k.size > k.rule.Capacity && len(k.queue) > 0 {
		t.shrink(k.queue[0], k.size-k.rule.Capacity, Evicted)
	}
}

// prune reduces a table above its maximum. The guesses that expire first are dropped first; among guesses without
// expiry, the least recently used. Leased blocks stay.
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

// dropBeside drops the blocks without hashes of a rank's ended requests.
func (t *Table) dropBeside(k *rank) {
	for _, s := range slices.Clone(k.queue) {
		if s.node == nil {
			t.shrink(s, s.blocks, Removed)
		}
	}
}

// shrink drops a number of blocks of a slot, at most all. The slot is in the queue of its rank, and the rank has no
// slot after the slot's node.
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
	if blocks < len(n.Edge) {
		t.prompts.Split(n, len(n.Edge)-blocks)
	}
	heap.Remove(&k.queue, s.at)
	t.removeSlot(k, n)
}

// removeSlot removes a rank's slot from a node.
func (t *Table) removeSlot(k *rank, n *node) {
	i, _ := n.Find(k.id)
	n.Remove(i)
	t.resize(k, -len(n.Edge))
}

func (t *Table) resize(k *rank, by int) {
	k.size += by
	t.size += by
}

// rankOf returns a rank, and creates it if necessary.
func (t *Table) rankOf(key events.RankKey) *rank {
	if k := t.byKey[key]; k != nil {
		return k
	}
	k := &rank{key: key, id: uint32(len(t.ranks)), running: map[*request]bool{}}
	k.rule, k.registered = t.rules[key]
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

// Refute drops the guess that a rank holds more of seq than the confirmed leading blocks, if the rank computed the
// blocks before the time passed. The index has all events of the rank up to that time. Refute reports whether it
// dropped blocks.
func (t *Table) Refute(key events.RankKey, seq []events.SeqHash, confirmed int, passed time.Duration) bool {
	k, n := t.byKey[key], &t.prompts.Root
	for pos := 0; pos <= confirmed; pos = n.End() {
		if pos == len(seq) {
			return false
		}
		if n = n.Kid(seq[pos]); n == nil {
			return false
		}
		if k := prompts.Common(n.Edge, seq[pos:]); k < len(n.Edge) && pos+k <= confirmed {
			return false
		}
	}
	if k == nil {
		return false
	}
	i, ok := n.Find(k.id)
	if !ok || n.Slots[i].Share.due == 0 || n.Slots[i].Share.due > passed || n.Slots[i].Share.leases > 0 {
		return false
	}
	if confirmed > n.Start {
		t.prompts.Split(n, confirmed-n.Start)
	}
	t.cut(k, n)
	return true
}

// cut drops a rank's guesses from a node on.
func (t *Table) cut(k *rank, n *node) {
	i, ok := n.Find(k.id)
	if !ok {
		return
	}
	s := n.Slots[i].Share
	for kid := range n.Kids {
		t.cut(k, kid)
	}
	t.shrink(s, math.MaxInt, Refuted)
}

// remove removes a rank with all guesses and requests.
func (t *Table) remove(k *rank, why Reason) {
	for q := range k.running {
		delete(t.requests, q.key)
		t.resize(k, -q.beside)
		for n := q.tail; n.Parent != nil; n = n.Parent {
			i, _ := n.Find(k.id)
			s := n.Slots[i].Share
			if s.leases--; s.leases == 0 {
				heap.Push(&k.queue, s)
			}
		}
	}
	for len(k.queue) > 0 {
		t.shrink(k.queue[0], math.MaxInt, why)
	}
	t.release(k)
}

// release removes an empty rank and frees its id.
func (t *Table) release(k *rank) {
	delete(t.byKey, k.key)
	t.ranks[k.id] = nil
	t.free = append(t.free, k.id)
	t.changes++
}

// Depths sets the predicted number of leading blocks of seq for each rank with a guess, at index place[id] of depths.
// place comes from [Table.Places]. Depths reports whether any rank has a guess.
func (t *Table) Depths(seq []events.SeqHash, place []int32, depths []uint32) (some bool) {
	return prompts.Depths(&t.prompts, seq, place, depths)
}

// Places returns the index in the list of each registered rank, by the table's ids, for [Table.Depths]; -1 for ranks
// outside the list. The result is valid until changes differs.
func (t *Table) Places(list map[events.RankKey]int32) (place []int32, changes uint64) {
	place = make([]int32, len(t.ranks))
	for id, k := range t.ranks {
		place[id] = -1
		if k == nil || !k.registered {
			continue
		}
		if at, ok := list[k.key]; ok {
			place[id] = at
		}
	}
	return place, t.changes
}
