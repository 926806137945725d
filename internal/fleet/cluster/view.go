package cluster

import (
	"maps"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// View is what a member knew after its last step. It does not change.
type View struct {
	Self      Record   // as it was announced; zero before the first time
	Owned     Set      // what this node is to keep
	GraceOver bool     // the start-up grace is over: Owned is known
	Copies    int      // how many nodes are to keep each partition
	Peers     []Record // the others that are alive, by name
	Dead      []string // those that are believed dead and whose records still exist, by name
	Problems  []string // which nodes are ignored, and why

	// Writer is, by partition, the node that writes its snapshots and ends its workers' leases: the first that is
	// ready, of those that can write snapshots if any can; empty: none is known.
	Writer []string

	node    string     // this one
	order   [][]string // by partition: all that are alive
	serving [][]string // by partition
	fit     []int      // by partition: how many of them are ready and stay
}

// Serving lists the nodes that can be asked about a partition, this one too, best first: those that are ready, in the
// partition's own order, then those that are releasing it or leaving, then those that are far behind the log. The
// caller must not change it.
func (v *View) Serving(p events.Partition) []string {
	if int(p) >= len(v.serving) {
		return nil
	}
	return v.serving[p]
}

// Order lists the nodes that are alive in a partition's order of preference. The caller must not change it.
func (v *View) Order(p events.Partition) []string {
	if int(p) >= len(v.order) {
		return nil
	}
	return v.order[p]
}

// Fit is how many of [View.Serving] are ready, and neither releasing nor leaving: they are equally good.
func (v *View) Fit(p events.Partition) int {
	if int(p) >= len(v.fit) {
		return 0
	}
	return v.fit[p]
}

// Writes reports whether this node is the one to write a partition's snapshots and to end its workers' leases. If none
// is known to be, each node is. Two may be for a moment; what they do is fenced.
func (v *View) Writes(p events.Partition) bool { return v.Writer[p] == "" || v.Writer[p] == v.node }

// MayServe reports whether a partition may have workers of a model: a node that serves it says so, or cannot list all
// models, or no node is known to serve the partition.
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

// Finishes reports whether another node answers queries that are forwarded to it.
func (v *View) Finishes(node string) bool {
	i := slices.IndexFunc(v.Peers, func(r Record) bool { return r.Node == node })
	return i >= 0 && v.Peers[i].Finishes
}

// orders caches the order of nodes in each partition for as long as the nodes and their zones are the same.
type orders struct {
	nodes []string
	zones map[string]string
	list  [][]string
}

func (o *orders) of(nodes []string, zones map[string]string, partitions uint32) [][]string {
	if o.list == nil || !slices.Equal(nodes, o.nodes) || !maps.Equal(zones, o.zones) {
		o.nodes, o.zones, o.list = nodes, zones, make([][]string, partitions)
		for p := range o.list {
			o.list[p] = Order(nodes, zones, events.Partition(p))
		}
	}
	return o.list
}

// View says what the machine knows now.
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
	v.order = m.orders.of(nodes, m.knownZones(), m.cfg.Partitions)
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
