package guess

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// twin is the naive form of a table: a list of blocks.
type twin struct {
	blocks     int
	ratio      float64
	defaultTTL time.Duration
	rules      map[events.RankKey]Rule
	registered map[events.RankKey]Rule // the last rule of each registered rank
	held       map[events.RankKey]map[string]*held
	behind     map[events.RankKey][]*held // blocks of ended requests without hashes
	requests   map[load.Key]*load.Request
	dropped    [reasons]uint64
}

// held is one block, identified by its path.
type held struct {
	path   string
	depth  int
	used   time.Duration
	leases int
	owner  load.Key
	due    time.Duration
}

func newTwin(blocks int, ratio float64, defaultTTL time.Duration) *twin {
	return &twin{blocks: blocks, ratio: ratio, defaultTTL: defaultTTL, registered: map[events.RankKey]Rule{},
		held: map[events.RankKey]map[string]*held{}, behind: map[events.RankKey][]*held{},
		requests: map[load.Key]*load.Request{}}
}

func path(seq []events.SeqHash) string { return fmt.Sprint(seq) }

func (w *twin) ranks() []events.RankKey {
	keys := map[events.RankKey]bool{}
	for k := range w.held {
		keys[k] = true
	}
	for k := range w.behind {
		keys[k] = true
	}
	for _, q := range w.requests {
		keys[q.Rank] = true
	}
	return slices.SortedFunc(maps.Keys(keys), events.RankKey.Compare)
}

func (w *twin) size(k events.RankKey) int {
	n := len(w.held[k]) + len(w.behind[k])
	for _, q := range w.requests {
		if q.Rank == k {
			n += q.Private + q.Outputs
		}
	}
	return n
}

func (w *twin) total() (n int) {
	for _, k := range w.ranks() {
		n += w.size(k)
	}
	return n
}

func (w *twin) ttl(k events.RankKey) time.Duration {
	rule, known := w.registered[k]
	switch {
	case rule.Capacity > 0:
		return forever
	case known:
		return rule.TTL
	}
	return w.defaultTTL
}

// first returns the next block of a rank to evict.
func (w *twin) first(k events.RankKey) *held {
	list := slices.Clone(w.behind[k])
	for _, h := range w.held[k] {
		if h.leases == 0 {
			list = append(list, h)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return slices.MinFunc(list, func(a, b *held) int {
		return cmp.Or(cmp.Compare(a.used, b.used), cmp.Compare(b.depth, a.depth))
	})
}

func (w *twin) drop(k events.RankKey, h *held, why Reason) {
	w.dropped[why]++
	if h.path == "" {
		i := slices.Index(w.behind[k], h)
		w.behind[k] = slices.Delete(w.behind[k], i, i+1)
		return
	}
	delete(w.held[k], h.path)
}

func (w *twin) evict(k events.RankKey) {
	for rule := w.registered[k]; rule.Capacity > 0 && w.size(k) > rule.Capacity && w.first(k) != nil; {
		w.drop(k, w.first(k), Evicted)
	}
}

func (w *twin) prune() {
	if w.total() <= w.blocks {
		return
	}
	for target := int(w.ratio * float64(w.blocks)); w.total() > target; {
		var rank events.RankKey
		var best *held
		for _, k := range w.ranks() {
			h := w.first(k)
			if h != nil && (best == nil || w.ttl(k)+h.used < w.ttl(rank)+best.used) {
				rank, best = k, h
			}
		}
		if best == nil {
			return
		}
		w.drop(rank, best, Pruned)
	}
}

func (w *twin) setRules(now time.Duration, rules map[events.RankKey]Rule) {
	w.rules = rules
	for _, k := range w.ranks() {
		rule, known := rules[k]
		_, was := w.registered[k]
		switch {
		case !known && was, known && rule.off():
			for id, q := range w.requests {
				if q.Rank == k {
					delete(w.requests, id)
				}
			}
			w.dropped[Removed] += uint64(len(w.held[k]) + len(w.behind[k]))
			delete(w.held, k)
			delete(w.behind, k)
		case known:
			w.registered[k] = rule
			if rule.Capacity == 0 {
				w.dropped[Removed] += uint64(len(w.behind[k]))
				delete(w.behind, k)
			}
			w.evict(k)
		}
	}
	for k := range w.registered {
		if _, known := rules[k]; !known {
			delete(w.registered, k)
		}
	}
	w.expire(now)
}

func (w *twin) observe(now time.Duration, r *load.Request) {
	k := r.Rank
	q := w.requests[r.Key]
	rule, known := w.rules[k]
	switch {
	case r.New && !r.Ended && !(known && rule.off()):
		if known {
			w.registered[k] = rule
		}
		at, leased := now-r.Age, w.registered[k].Capacity > 0
		if leased || at+w.ttl(k) > now {
			for i := range r.Hashes {
				p := path(r.Hashes[:i+1])
				if w.held[k] == nil {
					w.held[k] = map[string]*held{}
				}
				h := w.held[k][p]
				if h == nil {
					h = &held{path: p, depth: i, used: at, owner: r.Key}
					w.held[k][p] = h
				}
				if at > h.used {
					h.used, h.owner, h.due = at, r.Key, 0
				}
				if leased {
					h.leases++
				}
			}
		}
		if leased {
			w.requests[r.Key] = r
		}
	case q != nil && r.Ended:
		delete(w.requests, r.Key)
		for i := range r.Hashes {
			h := w.held[k][path(r.Hashes[:i+1])]
			h.leases--
			h.used = max(h.used, now)
		}
		if w.registered[k].Capacity > 0 {
			for range q.Private + q.Outputs {
				w.behind[k] = append(w.behind[k], &held{used: now, depth: math.MaxInt})
			}
		}
	case q != nil:
		w.requests[r.Key] = r
	default:
		k = events.RankKey{}
	}
	w.evict(k)
	w.prune()
	if r.PrefillDone || r.Ended {
		for i := range r.Hashes {
			h := w.held[r.Rank][path(r.Hashes[:i+1])]
			if h != nil && h.owner == r.Key && h.due == 0 {
				h.due = now
			}
		}
	}
}

func (w *twin) expire(now time.Duration) {
	for _, k := range w.ranks() {
		for h := w.first(k); h != nil && h.used+w.ttl(k) <= now; h = w.first(k) {
			w.drop(k, h, Expired)
		}
	}
}

func (w *twin) refute(k events.RankKey, seq []events.SeqHash, confirmed int, passed time.Duration) bool {
	if confirmed >= len(seq) {
		return false
	}
	h := w.held[k][path(seq[:confirmed+1])]
	if h == nil || h.due == 0 || h.due > passed || h.leases > 0 {
		return false
	}
	longer := strings.TrimSuffix(h.path, "]") + " "
	for p, other := range w.held[k] {
		if other == h || strings.HasPrefix(p, longer) {
			w.drop(k, other, Refuted)
		}
	}
	return true
}

func (w *twin) depth(k events.RankKey, seq []events.SeqHash) (n int) {
	if _, known := w.registered[k]; !known {
		return 0
	}
	for n < len(seq) && w.held[k][path(seq[:n+1])] != nil {
		n++
	}
	return n
}
