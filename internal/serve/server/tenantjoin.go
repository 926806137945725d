package server

import (
	"cmp"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// joinTenants adds the parts of nodes to a list with at most limit tenants. The others are under Other.
func joinTenants(out *api.TenantList, parts []*peerapi.TenantsPart, limit int, held bool) {
	rows, floor := map[string]*api.TenantUse{}, uint64(0)
	present := map[string]uint64{} // floors of the nodes with a row
	out.Other.Tenant, out.Off = tenants.Other, true
	for _, part := range parts {
		out.Nodes = append(out.Nodes, part.Node)
		if part.Node.Off {
			continue
		}
		if out.Off || part.From.Before(out.From) {
			out.From = part.From
		}
		if part.To.After(out.To) {
			out.To = part.To
		}
		out.Off = false
		floor += part.Node.Floor
		addUse(&out.None, &part.None)
		addUse(&out.Other, &part.Other)
		for i := range part.Tenants {
			use := &part.Tenants[i]
			row := rows[use.Tenant]
			if row == nil {
				row = &api.TenantUse{Tenant: use.Tenant}
				rows[use.Tenant] = row
			}
			addUse(row, use)
			row.Missed += use.Missed
			present[use.Tenant] += part.Node.Floor
		}
	}
	for name, row := range rows {
		row.Missed += floor - present[name]
		out.Tenants = append(out.Tenants, *row)
	}
	slices.SortFunc(out.Nodes, func(a, b api.TenantNode) int { return strings.Compare(a.Node, b.Node) })
	slices.SortFunc(out.Tenants, func(a, b api.TenantUse) int {
		return cmp.Or(cmp.Compare(b.Requested+b.RejectedTokens, a.Requested+a.RejectedTokens),
			strings.Compare(a.Tenant, b.Tenant))
	})
	if held {
		addHeldBlocks(out, parts)
	}
	for _, row := range out.Tenants[min(limit, len(out.Tenants)):] {
		out.Folded++
		addUse(&out.Other, &row)
		addBlocks(&out.Other, &row)
	}
	out.Tenants = out.Tenants[:min(limit, len(out.Tenants))]
	for i := range out.Tenants {
		addUse(&out.Total, &out.Tenants[i])
	}
	addUse(&out.Total, &out.None)
	addUse(&out.Total, &out.Other)
}

// addUse adds tokens and requests.
func addUse(to, from *api.TenantUse) {
	to.Requests, to.Routed, to.Reported = to.Requests+from.Requests, to.Routed+from.Routed, to.Reported+from.Reported
	to.Requested, to.Reused, to.Expected = to.Requested+from.Requested, to.Reused+from.Reused, to.Expected+from.Expected
	to.Computed, to.Unserved = to.Computed+from.Computed, to.Unserved+from.Unserved
	to.Rejected, to.RejectedTokens = to.Rejected+from.Rejected, to.RejectedTokens+from.RejectedTokens
	to.Lowered += from.Lowered
}

func addBlocks(to, from *api.TenantUse) {
	if from.HeldBlocks != nil && to.HeldBlocks == nil {
		to.HeldBlocks = new(uint64)
	}
	if from.HeldBlocks != nil {
		*to.HeldBlocks += *from.HeldBlocks
	}
}

// addHeldBlocks gives the held blocks to the tenants of their first blocks.
func addHeldBlocks(out *api.TenantList, parts []*peerapi.TenantsPart) {
	tenantOf := map[uint64]string{}
	for _, part := range parts {
		if part.Shared {
			return // no tenant has blocks of its own
		}
		for _, r := range part.Roots {
			if int(r.Tenant) < len(part.Names) {
				tenantOf[r.First] = part.Names[r.Tenant]
			}
		}
	}
	blocks, unattributed := map[string]uint64{}, uint64(0)
	for _, part := range parts {
		unattributed += part.Rest
		for _, h := range part.Held {
			if name, known := tenantOf[h.First]; known {
				blocks[name] += h.Blocks
			} else {
				unattributed += h.Blocks
			}
		}
	}
	none := blocks[""]
	delete(blocks, "")
	out.None.HeldBlocks, out.UnattributedBlocks = &none, &unattributed
	for i := range out.Tenants {
		n := blocks[out.Tenants[i].Tenant]
		out.Tenants[i].HeldBlocks = &n
		delete(blocks, out.Tenants[i].Tenant)
	}
	for name, n := range blocks { // without a request in the window
		out.Tenants = append(out.Tenants, api.TenantUse{Tenant: name, HeldBlocks: &n})
	}
}
