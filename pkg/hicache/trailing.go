package hicache

// trailing decides which prefixes an engine can load where it needs only the last pages of some pools, such as the
// window of sliding attention or the state of a Mamba layer (MooncakeStore.batch_exists_v2 of SGLang). An engine asks
// for the pages behind its own: a window is cut off where its own pages end. It does not change.
type trailing struct {
	free  bool // no pool needs each page
	pools []window
	whole []uint32 // for each length of a prefix, the longest up to it of which each pool has a whole window; 0: none
	most  uint32   // pages of the longest window
}

// window is what is there of one pool.
type window struct {
	pages uint32   // of a prefix's last pages
	run   []uint32 // for each page, how many in a row are there up to it
	known Bitmap
}

// newTrailing computes what pools have of a prompt of so many pages.
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

// lacking is a pool that lacks a page that a prefix of n pages needs behind the first own ones; nil if none does.
func (t *trailing) lacking(own, n uint32) *window {
	for i := range t.pools {
		if w := &t.pools[i]; w.run[n-1] < min(w.pages, n-own) {
			return w
		}
	}
	return nil
}

// longest is the longest prefix of at most n pages that the pools serve behind the first own ones; own if none is
// longer.
func (t *trailing) longest(own, n uint32) uint32 {
	whole := max(own, t.whole[n]) // it has all that a window that is cut off needs
	for at := min(n, own+t.most); at > whole; {
		w := t.lacking(own, at)
		if w == nil {
			return at
		}
		at -= w.run[at-1] + 1 // each prefix up to there needs the page that is missing
	}
	return whole
}

// loadTrailing is [Map.Load] for such an engine, of which the pages up to end have all other objects.
func (m *Map) loadTrailing(own, end uint32, rule Rule, why Beyond) (blocks uint32, _ Beyond) {
	if rule.most < end-own {
		end, why = own+rule.most, BeyondCapacity
	}
	if end == own {
		return 0, why
	}
	to := m.trailing.longest(own, end)
	if to < end {
		w := m.trailing.lacking(own, end)
		if why = BeyondGroups; !w.known.Get(int(end - 1 - w.run[end-1])) {
			why = BeyondUnknown
		}
	}
	if to > own && to-own < rule.least {
		return 0, BeyondThreshold
	}
	return to - own, why
}

// pageMap says what answers mean for SGLang's pages.
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
	present, known := NewBitmap(n), NewBitmap(n) // a page is there if each pool has it
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
