package regions

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Limits of the digests of other regions on a node. Further ones are refused and counted.
const (
	maxRegions = 64
	maxNodes   = 256       // of a region
	maxBytes   = 256 << 20 // of all digests, with incomplete ones
)

// Config configures a [Machine].
type Config struct {
	Region string             // own
	Prices map[string]float64 // configured prices by region, in milliseconds; these regions are always listed
	MaxAge time.Duration      // age after which a digest counts as unknown
}

// Counts counts received messages and digests since the start.
type Counts struct {
	Messages  uint64 // of other regions
	Digests   uint64 // complete, and newer than the one before
	Malformed uint64 // messages and digests, also of other versions
	Late      uint64 // messages of a digest or an incarnation before the present one
	Broken    uint64 // digests without some of their messages
	Refused   uint64 // messages beyond a limit
}

// Machine has the digests of other regions. Its arguments have the time since any moment. A single goroutine calls its
// methods. The returned views may be read by any goroutine.
type Machine struct {
	cfg     Config
	regions map[string]*region
	bytes   int
	counts  Counts
}

type region struct {
	nodes map[string]*source
	heard time.Duration // last complete digest
	once  bool          // a digest has arrived before
}

// source is a node of another region.
type source struct {
	incarnation, number uint64 // of the digest
	digest              *Digest
	bytes               int
	at                  time.Duration // for which the digest is right
	seen                time.Duration // last message

	next chunk  // the awaited part of an incomplete digest; part 0: none
	body []byte // its parts so far
}

// New returns a machine without digests.
func New(cfg Config) *Machine {
	m := &Machine{cfg: cfg, regions: map[string]*region{}}
	for name := range cfg.Prices {
		if name != cfg.Region {
			m.regions[name] = &region{nodes: map[string]*source{}}
		}
	}
	return m
}

// Receive applies a message of a node of another region. It returns whether the view has changed. An error means a
// malformed message or digest.
func (m *Machine) Receive(now time.Duration, name, node string, data []byte) (changed bool, err error) {
	if name == m.cfg.Region {
		return false, nil
	}
	m.counts.Messages++
	c, err := decodeChunk(data)
	if err != nil {
		m.counts.Malformed++
		return false, err
	}
	s := m.source(name, node)
	if s == nil {
		m.counts.Refused++
		return false, nil
	}
	s.seen = now
	if cmp.Or(cmp.Compare(c.incarnation, s.incarnation), cmp.Compare(c.number, s.number)) <= 0 && s.digest != nil {
		m.counts.Late++
		return false, nil
	}
	body, whole := m.join(s, &c)
	if !whole {
		return false, nil
	}
	d, err := (*Digest)(nil), errMalformed
	if xxh3.Hash(body) == c.sum {
		d, err = decode(body)
	}
	if err != nil {
		m.counts.Malformed++
		return false, err
	}
	m.bytes += len(body) - s.bytes
	s.digest, s.bytes, s.incarnation, s.number = d, len(body), c.incarnation, c.number
	s.at = now - time.Duration(c.ageMS)*time.Millisecond
	r := m.regions[name]
	r.heard, r.once = max(r.heard, s.at), true
	m.counts.Digests++
	return true, nil
}

// source returns a node of a region, a new one if there is room; otherwise nil.
func (m *Machine) source(name, node string) *source {
	r := m.regions[name]
	if r == nil {
		if len(m.regions) >= maxRegions {
			return nil
		}
		r = &region{nodes: map[string]*source{}}
		m.regions[name] = r
	}
	s := r.nodes[node]
	if s == nil && len(r.nodes) < maxNodes {
		s = &source{}
		r.nodes[node] = s
	}
	return s
}

// join adds a part to an incomplete digest. It returns the digest after the last part.
func (m *Machine) join(s *source, c *chunk) (body []byte, whole bool) {
	n := &s.next
	follows := c.part == n.part && c.incarnation == n.incarnation && c.number == n.number && c.sum == n.sum &&
		c.total == n.total
	if c.part == 0 || !follows {
		if len(s.body) > 0 || c.part > 0 {
			m.counts.Broken++
		}
		m.drop(s)
		if c.part > 0 {
			return nil, false
		}
	}
	if m.bytes+len(c.data) > maxBytes {
		m.counts.Refused++
		m.drop(s)
		return nil, false
	}
	s.body, m.bytes = append(s.body, c.data...), m.bytes+len(c.data)
	s.next = *c
	s.next.data = nil
	if s.next.part++; s.next.part < c.parts {
		return nil, false
	}
	body = s.body
	m.drop(s)
	return body, true
}

// drop forgets an incomplete digest.
func (m *Machine) drop(s *source) {
	m.bytes -= len(s.body)
	s.body, s.next = nil, chunk{}
}

// keptAges is the number of maximum ages after which a silent region without a configured price is no longer listed.
const keptAges = 10

// Tick forgets digests beyond the maximum age, silent nodes, and silent regions without a configured price. It returns
// whether the view has changed.
func (m *Machine) Tick(now time.Duration) (changed bool) {
	for name, r := range m.regions {
		for node, s := range r.nodes {
			if s.digest != nil && now-s.at > m.cfg.MaxAge {
				m.bytes -= s.bytes
				s.digest, s.bytes, changed = nil, 0, true
			}
			if s.digest == nil && now-s.seen > m.cfg.MaxAge {
				m.drop(s)
				delete(r.nodes, node)
			}
		}
		_, configured := m.cfg.Prices[name]
		if len(r.nodes) == 0 && !configured && now-r.heard > keptAges*m.cfg.MaxAge {
			delete(m.regions, name)
			changed = true
		}
	}
	return changed
}

// Counts returns the counts.
func (m *Machine) Counts() Counts { return m.counts }

// View is the state of a [Machine] for queries. It is immutable. A nil view has no region.
type View struct {
	maxAge  time.Duration
	regions []regionView // by name
}

type regionView struct {
	name    string
	price   *float64
	heard   time.Duration
	once    bool
	digests []nodeDigest
}

type nodeDigest struct {
	*Digest
	at    time.Duration
	bytes int
}

// View returns the present state.
func (m *Machine) View() *View {
	v := &View{maxAge: m.cfg.MaxAge}
	for _, name := range slices.Sorted(maps.Keys(m.regions)) {
		r := m.regions[name]
		if _, configured := m.cfg.Prices[name]; !configured && !r.once {
			continue // no digest has arrived completely
		}
		x := regionView{name: name, heard: r.heard, once: r.once}
		if price, ok := m.cfg.Prices[name]; ok {
			x.price = &price
		}
		for _, node := range slices.Sorted(maps.Keys(r.nodes)) {
			if s := r.nodes[node]; s.digest != nil {
				x.digests = append(x.digests, nodeDigest{s.digest, s.at, s.bytes})
			}
		}
		v.regions = append(v.regions, x)
	}
	return v
}

// live returns the digests of a region within the maximum age, the age of the oldest, and the number of partitions that
// no digest covers. The number is -1 without a digest.
func (r *regionView) live(now, maxAge time.Duration) (list []nodeDigest, age time.Duration, lacking int) {
	lacking = -1
	covered := map[events.Partition]bool{}
	for _, d := range r.digests {
		if now-d.at > maxAge {
			continue
		}
		list, age = append(list, d), max(age, now-d.at)
		for _, p := range d.Covered {
			covered[p] = true
		}
		lacking = max(lacking, int(d.Partitions))
	}
	if lacking >= 0 {
		lacking = max(0, lacking-len(covered))
	}
	return list, age, lacking
}
