package tables

import (
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Tenants prints a line for each tenant, and the sums.
func Tenants(w io.Writer, list *api.TenantList) {
	if list.Off {
		cli.Fprintln(w, "requests are not attributed to tenants; start the nodes with --tenants")
		return
	}
	cli.Fprintf(w, "%s, %s, in %v until %s\n\n", cli.Count(list.Total.Requests, "request"),
		cli.Count(uint64(len(list.Tenants)+list.Folded), "tenant"), list.To.Sub(list.From).Round(time.Second),
		list.To.Local().Format(time.TimeOnly))
	var rows [][]any
	add := func(name string, u *api.TenantUse) {
		held := "-"
		if u.HeldBlocks != nil {
			held = strconv.FormatUint(*u.HeldBlocks, 10)
		}
		rows = append(rows, []any{name, u.Requests, u.Requested, u.Reused, u.Expected, u.Computed, u.Unserved, u.Rejected,
			u.Missed, held})
	}
	for i := range list.Tenants {
		add(list.Tenants[i].Tenant, &list.Tenants[i])
	}
	add("(none)", &list.None)
	add("(other)", &list.Other)
	add("(all)", &list.Total)
	TenantsColumns.Table(w, rows)
	if list.UnattributedBlocks != nil {
		cli.Fprintf(w, "%s of unknown tenants\n", cli.Count(*list.UnattributedBlocks, "held block"))
	}
	for _, n := range list.Nodes {
		switch {
		case n.Off:
			cli.Fprintf(w, "node %s does not attribute requests; start it with --tenants\n", n.Node)
		case n.Replaced > 0:
			cli.Fprintf(w, "node %s has replaced %s beyond its bound of %d; see --tenant-limit\n", n.Node,
				cli.Count(n.Replaced, "tenant"), n.Limit)
		}
		if n.Dropped > 0 {
			cli.Fprintf(w, "node %s did not record %s\n", n.Node, cli.Count(n.Dropped, "request"))
		}
	}
	if len(list.Missing) > 0 {
		cli.Fprintf(w, "no answer from %s\n", strings.Join(list.Missing, ", "))
	}
}
