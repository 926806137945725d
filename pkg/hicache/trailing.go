package hicache

// trailing computes the prefixes that an engine can load if it needs only the last pages of some pools, such as the
// window of sliding attention or the state of a Mamba layer (MooncakeStore.batch_exists_v2 of SGLang). An engine looks
// up only the pages after its own, so a window is cut off at the end of the own pages. trailing is immutable.
type trailing struct {
	free  bool // no pool needs every page
	pools []window
	whole []uint32 // for each length: the longest shorter prefix with a whole window in each pool; 0: none
	most  uint32   // pages of the longest window
}

// window has the pages of a pool.
type window struct {
	pages uint32   // required last pages of a prefix
	run   []uint32 // for each page: the number of consecutive present pages up to it
	known Bitmap
}

// newTrailing computes the windows of the pools for a prompt with the given number of pages.
func newTrailing(pages int, pools []Pool, found []Found, free bool) *trailing {
	t := &trailing{free: free, whole: make([]uint32, pages+1)}
	for i, p := range pools {
		w := window{pages: uint32(p.TrailingPages), run: make([]uint32, pages), known: found[i].Known}
		for at, n := 0, uint32(0); at < pages; at++ {
			if n++; !found[i].Present.Get(at) || !w.known.Get(at) {
				n = 0
			}
			w.run[at] = n
		}
		t.pools, t.most = append(t.pools, w), max(t.most, w.pages)
	}
	for n := 1; n <= pages; n++ {
		if t.whole[n] = t.whole[n-1]; t.lacking(0, uint32(n)) == nil {
			t.whole[n] = uint32(n)
		}
	}
	return t
}

// lacking returns a pool that lacks a page of the prefix of n pages after the own pages, or nil.
func (t *trailing) lacking(own, n uint32) *window {
	for i := range t.pools {
		if w := &t.pools[i]; w.run[n-1] < min(w.pages, n-own) {
			return w
		}
	}
	return nil
}

// longest returns the longest prefix of at most n pages that the pools have after the own pages, or own.
func (t *trailing) longest(own, n uint32) uint32 {
	whole := max(own, t.whole[n]) // a whole window includes a cut-off window
	for at := min(n, own+t.most); at > whole; {
		w := t.lacking(own, at)
		if w == nil {
			return at
		}
		at -= w.run[at-1] + 1 // all prefixes up to there need the missing page
	}
	return whole
}

// loadTrailing is [Map.Load] for such an engine. The pages up to end have all other objects.
func (m *Map) loadTrailing(own, end uint32, rule Rule, why Beyond) (blocks uint32, _ Beyond) {
	if rule.most < end-own {
		end, why = own+rule.most, beyondCapacity
	}
	if end == own {
		return 0, why
	}
	to := m.trailing.longest(own, end)
	if to < end {
		w := m.trailing.lacking(own, end)
		if why = BeyondGroups; !w.known.Get(int(end - 1 - w.run[end-1])) {
			why = beyondUnknown
		}
	}
	if to > own && to-own < rule.least {
		return 0, beyondThreshold
	}
	return to - own, why
}

// pageMap converts answers for SGLang's pages.
func (p *Prompt) pageMap(found []Found) *Map {
	n := p.Lanes[0].Pages
	pools := found[len(found)-len(p.trailing):]
	if !p.free {
		m := NewMap(n, found[0].Present, found[0].Known)
		if len(pools) > 0 {
			m.trailing = newTrailing(n, p.trailing, pools, false)
		}
		return m
	}
	present, known := NewBitmap(n), NewBitmap(n) // a page is present if all pools have the page
	for i := range n {
		there, all, gone := true, true, false
		for _, f := range pools {
			is := f.Known.Get(i)
			there, all, gone = there && is && f.Present.Get(i), all && is, gone || is && !f.Present.Get(i)
		}
		if there {
			present.Set(i)
		}
		if all || gone {
			known.Set(i)
		}
	}
	m := NewMap(n, present, known)
	m.trailing = newTrailing(n, p.trailing, pools, true)
	return m
}
