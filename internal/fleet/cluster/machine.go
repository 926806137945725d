package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Config configures a [Machine].
type Config struct {
	Node, Session string
	Build         string // version of the program, for operators
	Zone          string // see [CheckZone]; empty: a zone of its own
	Partitions    uint32
	Replication   int           // requested number of owners; 0: all nodes up to three, then two
	Heartbeat     time.Duration // approximate time between two steps
	DeadAfter     time.Duration // observed time without a heartbeat until a node is dead

	// Host means that the NATS server runs in this node's process. Other nodes connect to the server later, so this
	// node has no start-up grace. The node acquires partitions even if no write succeeds, as on a full disk, because all
	// readers of the bucket use this server.
	Host bool

	Finishes bool // the node answers forwarded queries
}

// A starting node waits for other starting nodes. Otherwise each would restore partitions that the next node acquires.
// The wait ends if no starting node has appeared for startupGrace, and at the latest after startupGraceMax. It is zero
// without another starting node. The constants are in heartbeats of observed time.
const (
	startupGrace       = 0.75
	startupGraceMax    = 10
	startingHeartbeats = 3 // a node with at most this many records is starting
)

// Actions are the results of a step.
type Actions struct {
	Acquire []events.Partition // restore and serve
	Release []events.Partition // stop serving and drop
}

// Machine decides for a node. Invariants:
//  1. A releasing partition is held.
//  2. A partition that was announced as served is released only after a look at the leader's records that began after
//     the acknowledgement of its release announcement.
//  3. Nothing is acquired before the end of the start-up grace.
type Machine struct {
	cfg         Config
	heartbeat   uint64
	held        Set
	served      Set                         // held and announced as served: other nodes may rely on the service
	releasing   map[events.Partition]uint64 // by partition: the first heartbeat with the announcement; 0: none yet
	peers       map[string]*peer
	unsupported map[string]string // ignored nodes, with the reasons
	leaving     bool
	announced   Record // the last announcement

	clock        time.Duration // observed time
	acked        uint64        // the greatest acknowledged heartbeat
	ackedAt      time.Duration
	looked       bool          // the others were read after the first acknowledgement
	graceOver    bool          // the start-up grace is over
	begun        time.Duration // time of the first look at the others
	lastStarting time.Duration // last appearance of a starting node

	nodes  []string          // nodes at the computation of owners
	zones  map[string]string // their zones
	copies int               // number of owners per partition
	owners [][]string        // by partition
	orders orders            // of all live nodes
}

type peer struct {
	Seen
	lastHeard time.Duration // last observed change of the heartbeat
	renewed   bool          // a change of the heartbeat was observed
}

// New returns a machine without partitions.
func New(cfg Config) *Machine {
	return &Machine{cfg: cfg, releasing: map[events.Partition]uint64{}, peers: map[string]*peer{},
		unsupported: map[string]string{}}
}

// Announce returns the record to write now. s is the node's current service and must not change afterwards. leave
// starts the release of all partitions, and is permanent.
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

// Held returns the acquired partitions.
func (m *Machine) Held() Set { return slices.Clone(m.held) }

// Step advances the machine to now, a monotonic time. acked is the greatest acknowledged heartbeat. look is nil if no
// look succeeded.
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
		case !mine && m.held.Has(p) && !m.served.Has(p): // no node can rely on it
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

// MustAnnounce reports whether the last announcement keeps other nodes from sending this node queries for a model, in
// an announced partition.
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

// Receive updates a known node from a copy of its record. The result reports whether the copy is newer than the known
// record.
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

// starting reports whether a node has just started.
func (s *Seen) starting() bool { return s.Heartbeat <= startingHeartbeats }

// absorb updates the known nodes from a look at the records.
func (m *Machine) absorb(look *Look) {
	there := map[string]bool{}
	clear(m.unsupported)
	for _, key := range look.Unreadable {
		m.unsupported[key] = fmt.Sprintf(
			"the record of node %s is unreadable and is ignored; a live node writes it again", key)
	}
	for i := range look.Records {
		s := &look.Records[i]
		if s.Node == m.cfg.Node {
			continue
		}
		if s.Version != RecordVersion || s.Partitions != m.cfg.Partitions {
			m.unsupported[s.Node] = fmt.Sprintf(
				"node %s writes records of version %d for %d partitions; this node writes version %d for %d: they do not work together",
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
		case s.Revision > p.Revision, // otherwise a replica with an older state has answered,
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

// assign computes the owners of all partitions after a change of the nodes.
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

// knownZones returns the zones of the live nodes. It returns nil if a live node, even a leaving node, does not support
// zones.
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

// allReady reports whether a partition has owners, and all owners are ready, alive and not releasing the partition.
func (m *Machine) allReady(owners []string, p events.Partition) bool {
	for _, name := range owners {
		if o := m.peers[name]; o == nil || !o.renewed || !m.alive(o) || !o.counts(p) {
			return false
		}
	}
	return len(owners) > 0
}

// Alone reports whether no other live node could acquire the partitions of this node.
func (m *Machine) Alone() bool {
	for _, p := range m.peers {
		if m.alive(p) && !p.Leaving {
			return false
		}
	}
	return true
}

// Drained reports whether a leaving node has released all partitions, or no other node can acquire them.
func (m *Machine) Drained() bool { return m.leaving && m.looked && (m.held.Len() == 0 || m.Alone()) }

// Peers returns the other live nodes, by name.
func (m *Machine) Peers() (list []Record) {
	for _, p := range m.peers {
		if m.alive(p) {
			list = append(list, p.Record)
		}
	}
	slices.SortFunc(list, func(a, b Record) int { return cmp.Compare(a.Node, b.Node) })
	return list
}

// Dead returns the dead nodes with an existing record, by name. Nodes with an announced leave are not included.
func (m *Machine) Dead() (list []string) {
	for name, p := range m.peers {
		if !m.alive(p) && !p.Leaving {
			list = append(list, name)
		}
	}
	slices.Sort(list)
	return list
}

// Problems returns the ignored nodes, with the reasons.
func (m *Machine) Problems() (list []string) {
	for _, why := range m.unsupported {
		list = append(list, why)
	}
	slices.Sort(list)
	return list
}
