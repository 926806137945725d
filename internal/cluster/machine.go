package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/zeebo/xxh3"
)

// Config is one machine's.
type Config struct {
	Node, Life  string
	Build       string // of the program, for people
	Partitions  uint32
	Replication int           // 0: all nodes up to three, then two
	Beat        time.Duration // between two steps, about
	DeadAfter   time.Duration // of heard time without a beat

	// Host says that the NATS server runs in this node's process. Others come to it later than the node does, so that
	// it waits for nobody who may start with it, and it takes what it owns even if nothing can be written, as when the
	// disk is full: whoever reads the bucket asks this server.
	Host bool
}

// A node that starts waits for others that start with it, lest each restore what the next one takes over. It waits no
// more when nobody young was seen for the first time for settle, or after settleMost in all; and not at all where the
// others have been there for long. Both are in beats of heard time.
const (
	settle     = 0.75
	settleMost = 10
	youngBeats = 3 // a node that has written so many times at most is young
)

// Actions are what a step asks for.
type Actions struct {
	Take    []events.Partition // restore and serve
	Release []events.Partition // stop serving and forget
}

// Machine decides for one node. Invariants:
//  1. What is releasing is held.
//  2. A partition that was announced as served is let go only after a look at the leader's records that began after its
//     releasing was acknowledged.
//  3. Nothing is taken before the node has settled.
type Machine struct {
	cfg       Config
	beat      uint64
	held      Set
	served    Set                         // of what is held: was announced as served, so that others may count on it
	releasing map[events.Partition]uint64 // the first beat that announces it; 0: none yet
	peers     map[string]*peer
	odd       map[string]string // nodes that are left out, and why
	leaving   bool
	said      Record // as last announced

	clock   time.Duration // heard time
	acked   uint64        // the greatest beat acknowledged
	ackedAt time.Duration
	looked  bool          // others have been looked at after the first acknowledgement
	settled bool          // others that start have been waited for
	begun   time.Duration // when others were first looked at
	stirred time.Duration // when a young one was last seen for the first time, or nobody but young ones was there

	nodes  []string   // of whom owners were reckoned
	copies int        // how many owners each partition had then
	owners [][]string // by partition
	orders orders     // of all that live
}

// peer is another node.
type peer struct {
	Seen
	heard time.Duration // when its beat was last seen to change
	beats bool          // it was seen to change
}

// New returns a machine that holds nothing.
func New(cfg Config) *Machine {
	return &Machine{cfg: cfg, releasing: map[events.Partition]uint64{}, peers: map[string]*peer{},
		odd: map[string]string{}}
}

// Announce returns the record to be written now. s is what the node serves, which does not change; leave says that it
// wants to let go of all, and is never taken back.
func (m *Machine) Announce(s Standing, leave bool) Record {
	m.beat++
	m.leaving = m.leaving || leave
	r := Record{
		Version: RecordVersion, Node: m.cfg.Node, Life: m.cfg.Life, Build: m.cfg.Build, Beat: m.beat,
		Partitions:  m.cfg.Partitions,
		Replication: m.cfg.Replication, Leaving: m.leaving, Standing: s,
	}
	for p, beat := range m.releasing {
		if beat == 0 {
			m.releasing[p] = m.beat
		}
		r.Releasing.Add(p)
	}
	for _, p := range m.held.List() {
		if s.serves(p) {
			m.served.Add(p)
		}
	}
	m.said = r
	return r
}

// Releasing reports whether the next look must come from the leader.
func (m *Machine) Releasing() bool { return len(m.releasing) > 0 }

// Held is what the node has taken and not let go.
func (m *Machine) Held() Set { return slices.Clone(m.held) }

// Step goes on to now, which is monotonic. acked is the greatest beat whose writing was acknowledged; look is nil if
// none succeeded.
func (m *Machine) Step(now time.Duration, acked uint64, look *Look) (a Actions) {
	if acked > m.acked {
		if m.acked > 0 {
			m.clock += min(now-m.ackedAt, 2*m.cfg.Beat)
		}
		m.acked, m.ackedAt = acked, now
	}
	if look == nil || m.acked == 0 && !m.cfg.Host {
		return a
	}
	m.absorb(look)
	m.settle()
	m.assign()
	for p := range events.Partition(m.cfg.Partitions) {
		owners := m.owners[p]
		mine := slices.Contains(owners, m.cfg.Node)
		switch {
		case mine && !m.held.Has(p):
			if m.settled {
				m.held.Add(p)
				a.Take = append(a.Take, p)
			}
		case !mine && m.held.Has(p) && !m.served.Has(p): // nobody can have counted on it
			m.held.Remove(p)
			a.Release = append(a.Release, p)
		case mine || !m.held.Has(p) || !m.allReady(owners, p):
			delete(m.releasing, p)
		default:
			beat, announced := m.releasing[p]
			if !announced {
				m.releasing[p] = 0
			} else if beat != 0 && look.After >= beat {
				delete(m.releasing, p)
				m.held.Remove(p)
				m.served.Remove(p)
				a.Release = append(a.Release, p)
			}
		}
	}
	return a
}

// News reports whether others would pass over something if they went by what was announced last: a partition that they
// know this node to serve has a model that they do not know of.
func (m *Machine) News(s Standing) bool {
	for model, of := range s.Models {
		for _, p := range of.List() {
			if m.said.serves(p) && !m.said.mayServe(p, model) {
				return true
			}
		}
	}
	for _, p := range s.Unlisted.List() {
		if m.said.serves(p) && !m.said.Unlisted.Has(p) {
			return true
		}
	}
	return false
}

// Hear takes what a node that is known has told of its record since the last look, and reports whether it is later than
// what was known.
func (m *Machine) Hear(s Seen) bool {
	p := m.peers[s.Node]
	if p == nil || s.Version != RecordVersion || s.Partitions != m.cfg.Partitions || s.Life != p.Life ||
		s.Beat <= p.Beat || s.Revision <= p.Revision {
		return false
	}
	p.Seen, p.heard, p.beats = s, m.clock, true
	return true
}

// settle decides whether others that start are still waited for.
func (m *Machine) settle() {
	if !m.looked {
		m.looked, m.begun = true, m.clock
		young := true
		for _, p := range m.peers {
			young = young && p.young()
		}
		m.settled = m.cfg.Host || !young
	}
	beats := func(since time.Duration) float64 { return float64(m.clock-since) / float64(m.cfg.Beat) }
	m.settled = m.settled || beats(m.stirred) >= settle || beats(m.begun) >= settleMost
}

// young reports whether a node has begun to live a moment ago.
func (s *Seen) young() bool { return s.Beat <= youngBeats }

// absorb takes a look at the records.
func (m *Machine) absorb(look *Look) {
	there := map[string]bool{}
	clear(m.odd)
	for i := range look.Records {
		s := &look.Records[i]
		if s.Node == m.cfg.Node {
			continue
		}
		if s.Version != RecordVersion || s.Partitions != m.cfg.Partitions {
			m.odd[s.Node] = fmt.Sprintf(
				"node %s writes records of version %d for %d partitions; this one of version %d for %d: they do not work together",
				s.Node, s.Version, s.Partitions, RecordVersion, m.cfg.Partitions)
			continue
		}
		there[s.Node] = true
		p := m.peers[s.Node]
		switch {
		case p == nil:
			m.peers[s.Node] = &peer{Seen: *s, heard: m.clock}
			if s.young() {
				m.stirred = m.clock
			}
		case s.Revision > p.Revision, // else it is of a replica that is behind what was seen before,
			// or of a bucket that was made anew
			s.Life == p.Life && s.Beat > p.Beat, !m.alive(p) && s.Revision != p.Revision:
			if s.Beat != p.Beat || s.Life != p.Life {
				p.heard, p.beats = m.clock, true
			}
			p.Seen = *s
		}
	}
	for name, p := range m.peers {
		if !there[name] && (p.Leaving || !m.alive(p)) {
			delete(m.peers, name)
		}
	}
}

func (m *Machine) alive(p *peer) bool { return m.clock-p.heard <= m.cfg.DeadAfter }

// assign reckons the owners of all partitions, if the nodes are others than last time.
func (m *Machine) assign() {
	var nodes []string
	most := 0
	if !m.leaving {
		nodes, most = append(nodes, m.cfg.Node), m.cfg.Replication
	}
	for name, p := range m.peers {
		if m.alive(p) && !p.Leaving {
			nodes = append(nodes, name)
			most = max(most, p.Replication)
		}
	}
	slices.Sort(nodes)
	copies := Replication(len(nodes), most)
	if m.owners != nil && copies == m.copies && slices.Equal(nodes, m.nodes) {
		return
	}
	m.nodes, m.copies, m.owners = nodes, copies, make([][]string, m.cfg.Partitions)
	for p := range m.owners {
		m.owners[p] = Order(nodes, events.Partition(p))[:copies]
	}
}

// allReady reports whether a partition has owners and all of them have it, mean to keep it, and have been heard.
func (m *Machine) allReady(owners []string, p events.Partition) bool {
	for _, name := range owners {
		if o := m.peers[name]; o == nil || !o.beats || !m.alive(o) || !o.counts(p) {
			return false
		}
	}
	return len(owners) > 0
}

// Alone reports whether no other node lives that could take what this one lets go.
func (m *Machine) Alone() bool {
	for _, p := range m.peers {
		if m.alive(p) && !p.Leaving {
			return false
		}
	}
	return true
}

// Left reports whether a node that leaves has nothing left, or nobody to leave it to.
func (m *Machine) Left() bool { return m.leaving && m.looked && (m.held.Len() == 0 || m.Alone()) }

// Peers lists the other nodes that are believed to live, by name.
func (m *Machine) Peers() (list []Record) {
	for _, p := range m.peers {
		if m.alive(p) {
			list = append(list, p.Record)
		}
	}
	slices.SortFunc(list, func(a, b Record) int { return cmp.Compare(a.Node, b.Node) })
	return list
}

// Gone lists the nodes that are believed dead and whose records are there still, by name. One that has said that it
// leaves is not missed.
func (m *Machine) Gone() (list []string) {
	for name, p := range m.peers {
		if !m.alive(p) && !p.Leaving {
			list = append(list, name)
		}
	}
	slices.Sort(list)
	return list
}

// Problems says which nodes are left out, and why.
func (m *Machine) Problems() (list []string) {
	for _, why := range m.odd {
		list = append(list, why)
	}
	slices.Sort(list)
	return list
}

// Replication is how many owners a partition has among n nodes, if the most that any asks for is asked.
func Replication(n, asked int) int {
	switch {
	case asked > 0:
		return min(n, asked)
	case n <= 3:
		return n
	}
	return 2
}

// Order returns nodes in a partition's order of preference: by a hash of both.
func Order(nodes []string, p events.Partition) []string {
	type scored struct {
		name  string
		score uint64
	}
	list := make([]scored, len(nodes))
	for i, name := range nodes {
		list[i] = scored{name, xxh3.HashStringSeed(name, (uint64(p)+1)*0x9E3779B97F4A7C15)}
	}
	slices.SortFunc(list, func(a, b scored) int {
		return cmp.Or(cmp.Compare(b.score, a.score),
			cmp.Compare(a.name, b.name))
	})
	out := make([]string, len(nodes))
	for i := range list {
		out[i] = list[i].name
	}
	return out
}
