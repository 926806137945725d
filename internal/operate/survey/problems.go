package survey

import (
	"strings"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
)

// Problem is a cause that nodes report in their statuses.
type Problem struct {
	Nodes      []string
	Partitions cluster.Set // empty: the problem is not one of partitions
	What       string
	Evidence   string // of the first node and partition
	Remedy     string // empty in the statuses of older nodes
}

// Problems collects problems. A cause that several nodes report is one problem. The zero value is empty.
type Problems []*Problem

// Add adds a problem of a node, as its status has it.
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

// parse reads "partitions 0-7: WHAT: EVIDENCE; what to do: REMEDY". Only WHAT is always there.
func parse(text string) *Problem {
	p := &Problem{}
	text, p.Remedy, _ = strings.Cut(text, "; what to do: ")
	if name, rest, ok := strings.Cut(text, ": "); ok && strings.HasPrefix(name, "partition") {
		_, ranges, _ := strings.Cut(name, " ")
		if p.Partitions.UnmarshalText([]byte(ranges)) == nil {
			text = rest
		}
	}
	p.What, p.Evidence, _ = strings.Cut(text, ": ")
	return p
}

// Where names the nodes.
func (p *Problem) Where() string {
	if len(p.Nodes) == 1 {
		return "node " + p.Nodes[0]
	}
	return "nodes " + strings.Join(p.Nodes, ", ")
}

// Said writes the problem without what to do.
func (p *Problem) Said() string {
	text := p.What
	if n := p.Partitions.Len(); n > 0 {
		text = p.Partitions.Phrase() + ": " + text
	}
	if p.Evidence != "" {
		text += ": " + p.Evidence
	}
	return text
}

// String writes the problem as a status has it.
func (p *Problem) String() string {
	if p.Remedy == "" {
		return p.Said()
	}
	return p.Said() + "; what to do: " + p.Remedy
}
