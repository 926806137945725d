package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Config is one machine's.
type Config struct {
	Node, Session string
	Build         string // of the program, for people
	Zone          string // see [CheckZone]; empty: a zone of its own
	Partitions    uint32
	Replication   int           // 0: all nodes up to three, then two
	Heartbeat     time.Duration // between two steps, about
	DeadAfter     time.Duration // of heard time without a heartbeat

	// Host says that the NATS server runs in this node's process. Other nodes connect to it later than this node, so it
	// has no start-up grace. It acquires what it owns even if nothing can be written, as on a full disk: all who read
	// the bucket ask this server.
	Host bool

	Finishes bool // the node answers queries that others forward
}

// A node that starts waits for others that start with it; otherwise each would restore what the next one takes over.
// The wait ends when no starting node has appeared for startupGrace, or after startupGraceMax in all. There is none if
// no other node is starting. Both are in heartbeats of heard time.
const (
	startupGrace       = 0.75
	startupGraceMax    = 10
	startingHeartbeats = 3 // a node that has written no more records is starting
)

// Actions is what a step asks for.
type Actions struct {
	Acquire []events.Partition // restore and serve
	Release []events.Partition // stop serving and forget
}

// Machine decides for one node. Invariants:
//  1. What is releasing is held.
//  2. A partition that was announced as served is released only after a look at the leader's records that began after
//     its releasing was acknowledged.
//  3. Nothing is acquired before the start-up grace is over.
type Machine struct {
	cfg         Config
	heartbeat   uint64
	held        Set
	served      Set                         // of what is held: was announced as served, so that others may count on it
	releasing   map[events.Partition]uint64 // the first heartbeat that announces it; 0: none yet
	peers       map[string]*peer
	unsupported map[string]string // nodes that are left out, and why
	leaving     bool
	announced   Record // as last announced

	clock        time.Duration // heard time
	acked        uint64        // the greatest heartbeat acknowledged
	ackedAt      time.Duration
	looked       bool          // others have been looked at after the first acknowledgement
	graceOver    bool          // the start-up grace is over
	begun        time.Duration // when others were first looked at
	lastStarting time.Duration // when a starting node last appeared

	nodes  []string          // for which owners were computed
	zones  map[string]string // theirs, as owners were computed with
	copies int               // how many owners each partition had then
	owners [][]string        // by partition
	orders orders            // of all that are alive
}

type peer struct {
	Seen
	lastHeard time.Duration // when its heartbeat was last seen to change
	renewed   bool          // it was seen to change
}

// New returns a machine that holds nothing.
func New(cfg Config) *Machine {
	return &Machine{cfg: cfg, releasing: map[events.Partition]uint64{}, peers: map[string]*peer{},
		unsupported: map[string]string{}}
}

// Announce returns the record to be written now. s is what the node serves, which does not change; leave says that it
// wants to release everything, and is never withdrawn.
func (m *Machine) Announce(s Advertisement, leave bool) Record {
	m.heartbeat++
	m.leaving = m.leaving || leave
	r := Record{
		Version: RecordVersion, Node: m.cfg.Node, Session: m.cfg.Session, Build: m.cfg.Build, Heartbeat: m.heartbeat,
		Zone: m.cfg.Zone, Placement: placementZones, Partitions: m.cfg.Partitions,
		Replication: m.cfg.Replication, Leaving: m.leaving, Finishes: m.cfg.Finishes,
		Advertisement: s,
	}
	for p, since := range m.releasing {
		if since == 0 {
			m.releasing[p] = m.heartbeat
		}
		r.Releasing.Add(p)
	}
	for _, p := range m.held.List() {
		if s.serves(p) {
			m.served.Add(p)
		}
	}
	m.announced = r
	return r
}

// Releasing reports whether the next look must come from the leader.
func (m *Machine) Releasing() bool { return len(m.releasing) > 0 }

// Held is what the node has acquired and not released.
func (m *Machine) Held() Set { return slices.Clone(m.held) }

// Step goes on to now, which is monotonic. acked is the greatest heartbeat whose write was acknowledged; look is nil if
// none succeeded.
func (m *Machine) Step(now time.Duration, acked uint64, look *Look) (a Actions) {
	if acked > m.acked {
		if m.acked > 0 {
			m.clock += min(now-m.ackedAt, 2*m.cfg.Heartbeat)
		}
		m.acked, m.ackedAt = acked, now
	}
	if look == nil || m.acked == 0 && !m.cfg.Host {
		return a
	}
	m.absorb(look)
	m.endGrace()
	m.assign()
	for p := range events.Partition(m.cfg.Partitions) {
		owners := m.owners[p]
		mine := slices.Contains(owners, m.cfg.Node)
		switch {
		case mine && !m.held.Has(p):
			if m.graceOver {
				m.held.Add(p)
				a.Acquire = append(a.Acquire, p)
			}
		case !mine && m.held.Has(p) && !m.served.Has(p): // no node can have counted on it
			m.held.Remove(p)
			a.Release = append(a.Release, p)
		case mine || !m.held.Has(p) || !m.allReady(owners, p):
			delete(m.releasing, p)
		default:
			since, announced := m.releasing[p]
			if !announced {
				m.releasing[p] = 0
			} else if since != 0 && look.After >= since {
				delete(m.releasing, p)
				m.held.Remove(p)
				m.served.Remove(p)
				a.Release = append(a.Release, p)
			}
		}
	}
	return a
}

// MustAnnounce reports whether other nodes, by what was announced last, would not ask this node about a model in a
// partition that they know it to serve.
func (m *Machine) MustAnnounce(s Advertisement) bool {
	for model, of := range s.Models {
		for _, p := range of.List() {
			if m.announced.serves(p) && !m.announced.mayServe(p, model) {
				return true
			}
		}
	}
	for _, p := range s.Unlisted.List() {
		if m.announced.serves(p) && !m.announced.Unlisted.Has(p) {
			return true
		}
	}
	return false
}

// Receive updates a known node from a copy of its record that it has sent since the last look, and reports whether the
// copy is later than what was known.
func (m *Machine) Receive(s Seen) bool {
	p := m.peers[s.Node]
	if p == nil || s.Version != RecordVersion || s.Partitions != m.cfg.Partitions || s.Session != p.Session ||
		s.Heartbeat <= p.Heartbeat || s.Revision <= p.Revision {
		return false
	}
	p.Seen, p.lastHeard, p.renewed = s, m.clock, true
	return true
}

func (m *Machine) endGrace() {
	if !m.looked {
		m.looked, m.begun = true, m.clock
		starting := true
		for _, p := range m.peers {
			starting = starting && p.starting()
		}
		m.graceOver = m.cfg.Host || !starting
	}
	beats := func(since time.Duration) float64 { return float64(m.clock-since) / float64(m.cfg.Heartbeat) }
	m.graceOver = m.graceOver || beats(m.lastStarting) >= startupGrace || beats(m.begun) >= startupGraceMax
}

// starting reports whether a node has started a moment ago.
func (s *Seen) starting() bool { return s.Heartbeat <= startingHeartbeats }

// absorb updates what is known from a look at the records.
func (m *Machine) absorb(look *Look) {
	there := map[string]bool{}
	clear(m.unsupported)
	for _, key := range look.Unreadable {
		m.unsupported[key] = fmt.Sprintf(
			"the record of node %s cannot be read and is skipped; the node writes it again if it lives", key)
	}
	for i := range look.Records {
		s := &look.Records[i]
		if s.Node == m.cfg.Node {
			continue
		}
		if s.Version != RecordVersion || s.Partitions != m.cfg.Partitions {
			m.unsupported[s.Node] = fmt.Sprintf(
				"node %s writes records of version %d for %d partitions; this one of version %d for %d: they do not work together",
				s.Node, s.Version, s.Partitions, RecordVersion, m.cfg.Partitions)
			continue
		}
		there[s.Node] = true
		p := m.peers[s.Node]
		switch {
		case p == nil:
			m.peers[s.Node] = &peer{Seen: *s, lastHeard: m.clock}
			if s.starting() {
				m.lastStarting = m.clock
			}
		case s.Revision > p.Revision, // else the replica that answered is behind what was seen before,
			// or the bucket was recreated
			s.Session == p.Session && s.Heartbeat > p.Heartbeat, !m.alive(p) && s.Revision != p.Revision:
			if s.Heartbeat != p.Heartbeat || s.Session != p.Session {
				p.lastHeard, p.renewed = m.clock, true
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

func (m *Machine) alive(p *peer) bool { return m.clock-p.lastHeard <= m.cfg.DeadAfter }

// assign computes the owners of all partitions if the nodes have changed.
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
	copies, zones := Replication(len(nodes), most), m.knownZones()
	if m.owners != nil && copies == m.copies && slices.Equal(nodes, m.nodes) && maps.Equal(zones, m.zones) {
		return
	}
	m.nodes, m.zones, m.copies, m.owners = nodes, zones, copies, make([][]string, m.cfg.Partitions)
	for p := range m.owners {
		m.owners[p] = Order(nodes, zones, events.Partition(p))[:copies]
	}
}

// knownZones returns the zones of the nodes that are alive; none while one of them, which may be leaving, places
// without zones.
func (m *Machine) knownZones() map[string]string {
	zones := map[string]string{m.cfg.Node: m.cfg.Zone}
	for name, p := range m.peers {
		if m.alive(p) {
			if p.Placement < placementZones {
				return nil
			}
			zones[name] = p.Zone
		}
	}
	return zones
}

// allReady reports whether a partition has owners and all of them are ready, are not releasing it, and have been heard.
func (m *Machine) allReady(owners []string, p events.Partition) bool {
	for _, name := range owners {
		if o := m.peers[name]; o == nil || !o.renewed || !m.alive(o) || !o.counts(p) {
			return false
		}
	}
	return len(owners) > 0
}

// Alone reports whether no other node is alive that could acquire what this one releases.
func (m *Machine) Alone() bool {
	for _, p := range m.peers {
		if m.alive(p) && !p.Leaving {
			return false
		}
	}
	return true
}

// Left reports whether a node that leaves has released everything, or no node can acquire it.
func (m *Machine) Drained() bool { return m.leaving && m.looked && (m.held.Len() == 0 || m.Alone()) }

// Peers lists the other nodes that are believed alive, by name.
func (m *Machine) Peers() (list []Record) {
	for _, p := range m.peers {
		if m.alive(p) {
			list = append(list, p.Record)
		}
	}
	slices.SortFunc(list, func(a, b Record) int { return cmp.Compare(a.Node, b.Node) })
	return list
}

// Dead lists the nodes that are believed dead and whose records still exist, by name. Nodes that announced that they
// leave are not listed.
func (m *Machine) Dead() (list []string) {
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
	for _, why := range m.unsupported {
		list = append(list, why)
	}
	slices.Sort(list)
	return list
}
