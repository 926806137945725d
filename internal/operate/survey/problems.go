package survey

import (
	"strings"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
)

// RemedyMark separates a problem from its remedy, in the problems of statuses.
const RemedyMark = "; what to do: "

// Problem is a problem in the statuses of nodes.
type Problem struct {
	Nodes      []string
	Partitions cluster.Set // empty for a problem of a whole node
	What       string
	Evidence   string // from the first node and partition
	Remedy     string // empty in the statuses of older nodes
}

// Problems collects problems. Several nodes with the same cause share one problem. The zero value is empty.
type Problems []*Problem

// Add adds a problem from a node's status.
func (l *Problems) Add(node, text string) {
	p := parse(text)
	for _, known := range *l {
		same := known.What == p.What && known.Remedy == p.Remedy
		if p.Partitions.Len() == 0 {
			same = same && known.Partitions.Len() == 0 && known.Evidence == p.Evidence
		}
		if same {
			known.Nodes = append(known.Nodes, node)
			for _, partition := range p.Partitions.List() {
				known.Partitions.Add(partition)
			}
			return
		}
	}
	p.Nodes = []string{node}
	*l = append(*l, p)
}

// parse splits the text of a problem into partitions, event, evidence and remedy. Only the event is required:
//
//	partitions 0-7: EVENT: EVIDENCE[RemedyMark]REMEDY
func parse(text string) *Problem {
	p := &Problem{}
	text, p.Remedy, _ = strings.Cut(text, RemedyMark)
	if name, rest, ok := strings.Cut(text, ": "); ok && strings.HasPrefix(name, "partition") {
		_, ranges, _ := strings.Cut(name, " ")
		if p.Partitions.UnmarshalText([]byte(ranges)) == nil {
			text = rest
		}
	}
	p.What, p.Evidence, _ = strings.Cut(text, ": ")
	return p
}

// Where returns the names of the nodes.
func (p *Problem) Where() string {
	if len(p.Nodes) == 1 {
		return "node " + p.Nodes[0]
	}
	return "nodes " + strings.Join(p.Nodes, ", ")
}

// Summary returns the problem without its remedy.
func (p *Problem) Summary() string {
	text := p.What
	if n := p.Partitions.Len(); n > 0 {
		text = p.Partitions.Phrase() + ": " + text
	}
	if p.Evidence != "" {
		text += ": " + p.Evidence
	}
	return text
}

// String returns the problem in the form of a status.
func (p *Problem) String() string {
	if p.Remedy == "" {
		return p.Summary()
	}
	return p.Summary() + RemedyMark + p.Remedy
}
