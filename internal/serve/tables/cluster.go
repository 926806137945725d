package tables

import (
	"io"
	"strings"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Cluster prints a line per node with its partitions.
func Cluster(w io.Writer, c *api.ClusterStatus) {
	rows := make([][]any, len(c.Nodes))
	for i, n := range c.Nodes {
		var state []string
		if n.Answers {
			state = append(state, "answers")
		}
		if n.Leaving {
			state = append(state, "leaving")
		}
		rows[i] = []any{n.Node, n.Zone, n.Build, len(n.Ready), ranges(n.Ready), ranges(n.Behind), ranges(n.Releasing),
			strings.Join(state, ", ")}
	}
	for _, name := range c.Gone {
		rows = append(rows, []any{name, "", "", "", "", "", "", "gone"})
	}
	ClusterColumns.Table(w, rows)
	cli.Fprintf(w, "\neach partition is to be kept by %d\n", c.Copies)
	if len(c.Short) > 0 {
		cli.Fprintf(w, "fewer are ready for %s\n", ranges(c.Short))
	}
}

// ranges formats partitions as "0-5,9".
func ranges(list []events.Partition) string { return cluster.SetOf(list...).String() }
