package tenants

import (
	"container/heap"
	"slices"
)

// Table bounds the tenants with separate counts.
type Table struct {
	most     int
	byName   map[string]*Slot
	lightest slots
	none     Slot

	floor   uint64 // largest weight of a replaced tenant
	floorAt int64  // the last replacement
	swept   int64  // the last removal of idle tenants

	replaced uint64
}

// Slot stands for the counts of a tenant. The counts of a replaced slot belong to [Other].
type Slot struct {
	Name     string
	Replaced bool

	weight, missed uint64 // tokens; missed of them are a bound of the tokens under Other
	last           int64
	at             int // in lightest
}

// Keep is the time in seconds for which an idle tenant keeps its slot, and for which a replacement matters. It is
// longer than any window of counts.
const Keep = 2 * 60 * 60

// NewTable returns a table of at most most tenants.
func NewTable(most int) *Table { return &Table{most: most, byName: map[string]*Slot{}} }

// Find returns the slot of a tenant for a request with a number of tokens, at a time in Unix seconds. The empty name
// has a slot of its own, which does not count.
func (t *Table) Find(name string, tokens uint64, now int64) *Slot {
	if name == "" {
		return &t.none
	}
	if s := t.byName[name]; s != nil {
		s.weight, s.last = s.weight+tokens, max(s.last, now)
		heap.Fix(&t.lightest, s.at)
		return s
	}
	if len(t.byName) >= t.most && now >= t.swept+Keep/4 {
		t.swept = now
		t.removeIdle(now)
	}
	if len(t.byName) >= t.most {
		lightest := heap.Pop(&t.lightest).(*Slot)
		lightest.Replaced = true
		delete(t.byName, lightest.Name)
		t.floor = max(t.floor, lightest.weight)
		t.floorAt = now
		t.replaced++
	}
	s := &Slot{Name: name, weight: t.Floor(now) + tokens, missed: t.Floor(now), last: now}
	t.byName[name] = s
	heap.Push(&t.lightest, s)
	return s
}

// Floor returns a bound of the tokens under [Other] of any tenant without a slot.
func (t *Table) Floor(now int64) uint64 {
	if now > t.floorAt+Keep {
		t.floor = 0
	}
	return t.floor
}

// Missed returns a bound of the tokens under [Other] of the slot's tenant.
func (s *Slot) Missed() uint64 { return s.missed }

// Miss adds tokens that are counted for [Other] in place of the slot.
func (s *Slot) Miss(tokens uint64) { s.missed += tokens }

func (t *Table) removeIdle(now int64) {
	t.lightest = slices.DeleteFunc(t.lightest, func(s *Slot) bool {
		idle := now > s.last+Keep
		if idle {
			delete(t.byName, s.Name)
			s.Replaced = true // its counts are too old for any window
		}
		return idle
	})
	for i, s := range t.lightest {
		s.at = i
	}
	heap.Init(&t.lightest)
}

// Len returns the number of tenants with a slot, and Count the number of replaced ones.
func (t *Table) Len() int      { return len(t.byName) }
func (t *Table) Count() uint64 { return t.replaced }

// Most returns the bound.
func (t *Table) Most() int { return t.most }

// slots is a heap with the least weight on top. Among equals, the least recently used one is on top.
type slots []*Slot

func (h slots) Len() int { return len(h) }
func (h slots) Less(i, j int) bool {
	if h[i].weight != h[j].weight {
		return h[i].weight < h[j].weight
	}
	return h[i].last < h[j].last || h[i].last == h[j].last && h[i].Name < h[j].Name
}
func (h slots) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}
func (h *slots) Push(s any) {
	s.(*Slot).at = len(*h)
	*h = append(*h, s.(*Slot))
}
func (h *slots) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}
