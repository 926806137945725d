package cluster

import (
	"maps"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// View is the state of a member after a step. It is immutable.
type View struct {
	Self      Record   // the last announcement; zero before the first
	Owned     Set      // partitions that this node has to keep
	GraceOver bool     // the start-up grace is over: Owned is valid
	Copies    int      // number of owners per partition
	Peers     []Record // the other live nodes, by name
	Dead      []string // dead nodes with an existing record, by name
	Problems  []string // ignored nodes, with the reasons

	// Writer is, by partition, the node that writes snapshots and ends leases of workers: the first ready node, among
	// the nodes that can write snapshots if any can. Empty means unknown.
	Writer []string

	node    string     // this node
	order   [][]string // by partition: all live nodes
	serving [][]string // by partition
	fit     []int      // by partition: number of nodes that are ready and stay
}

// Serving returns the nodes that accept queries for a partition, including this node, best first: ready nodes in the
// partition's order, then releasing and leaving nodes, then nodes far behind the log. The caller must not change the
// result.
func (v *View) Serving(p events.Partition) []string {
	if int(p) >= len(v.serving) {
		return nil
	}
	return v.serving[p]
}

// Order returns the live nodes in a partition's order of preference. The caller must not change the result.
func (v *View) Order(p events.Partition) []string {
	if int(p) >= len(v.order) {
		return nil
	}
	return v.order[p]
}

// Fit returns the number of nodes at the start of [View.Serving] that are ready, not releasing and not leaving. They
// are equally good.
func (v *View) Fit(p events.Partition) int {
	if int(p) >= len(v.fit) {
		return 0
	}
	return v.fit[p]
}

// Writes reports whether this node writes a partition's snapshots and ends its workers' leases. Without a known writer,
// each node does. For a moment two nodes may write; the writes are fenced.
func (v *View) Writes(p events.Partition) bool { return v.Writer[p] == "" || v.Writer[p] == v.node }

// MayServe reports whether a partition may have workers of a model: a serving node has announced the model or
// cannot list all models, or the partition has no known serving node.
func (v *View) MayServe(p events.Partition, model string) bool {
	served := false
	for i := -1; i < len(v.Peers); i++ {
		r := &v.Self
		if i >= 0 {
			r = &v.Peers[i]
		}
		if r.serves(p) {
			if served = true; r.mayServe(p, model) {
				return true
			}
		}
	}
	return !served
}

// Finishes reports whether another node answers forwarded queries.
func (v *View) Finishes(node string) bool {
	i := slices.IndexFunc(v.Peers, func(r Record) bool { return r.Node == node })
	return i >= 0 && v.Peers[i].Finishes
}

// orders caches the order of nodes in each partition while the nodes and zones are unchanged.
type orders struct {
	nodes []string
	zones map[string]string
	list  [][]string
}

func (o *orders) orderOf(nodes []string, zones map[string]string, partitions uint32) [][]string {
	if o.list == nil || !slices.Equal(nodes, o.nodes) || !maps.Equal(zones, o.zones) {
		o.nodes, o.zones, o.list = nodes, zones, make([][]string, partitions)
		for p := range o.list {
			o.list[p] = Order(nodes, zones, events.Partition(p))
		}
	}
	return o.list
}

// View returns the current state of the machine.
func (m *Machine) View() *View {
	v := &View{
		node: m.cfg.Node, Self: m.announced, Owned: m.Held(), GraceOver: m.graceOver, Copies: m.copies,
		Peers: m.Peers(),
		Dead:  m.Dead(), Problems: m.Problems(),
		Writer: make([]string, m.cfg.Partitions), serving: make([][]string, m.cfg.Partitions),
		fit: make([]int, m.cfg.Partitions),
	}
	nodes, records := []string{m.cfg.Node}, map[string]*Record{m.cfg.Node: &v.Self}
	for i := range v.Peers {
		nodes = append(nodes, v.Peers[i].Node)
		records[v.Peers[i].Node] = &v.Peers[i]
	}
	slices.Sort(nodes)
	v.order = m.orders.orderOf(nodes, m.knownZones(), m.cfg.Partitions)
	for p, order := range v.order {
		p := events.Partition(p)
		var going, behind []string
		for _, name := range order {
			switch r := records[name]; {
			case r.Behind.Has(p):
				behind = append(behind, name)
			case r.Ready.Has(p) && (r.Releasing.Has(p) || r.Leaving):
				going = append(going, name)
			case r.Ready.Has(p):
				v.serving[p] = append(v.serving[p], name)
			}
		}
		for _, name := range order {
			switch r := records[name]; {
			case !r.counts(p):
				continue
			case v.Writer[p] == "": // the first, if all fail
				v.Writer[p] = name
			}
			if !records[name].Failing.Has(p) {
				v.Writer[p] = name
				break
			}
		}
		v.fit[p] = len(v.serving[p])
		v.serving[p] = append(append(v.serving[p], going...), behind...)
	}
	return v
}
