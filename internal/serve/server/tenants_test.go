package server

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestTenantsJoin joins random parts of nodes. The sums over all rows are the sums of the parts for each limit, and the
// bound of missed tokens of a row is the sum of the nodes' bounds.
func TestTenantsJoin(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 5))
		var parts []*peerapi.TenantsPart
		var total uint64
		held, owner := map[string]uint64{}, map[uint64]string{}
		missed := map[string]uint64{}
		for n := range 1 + r.IntN(4) {
			part := &peerapi.TenantsPart{Node: api.TenantNode{Node: fmt.Sprint("n", n), Floor: uint64(r.IntN(2) * r.IntN(50))}}
			use := func(name string) api.TenantUse {
				n := uint64(1 + r.IntN(100))
				total += n
				return api.TenantUse{Tenant: name, Requested: n, Computed: n}
			}
			part.None, part.Other = use(""), use(tenants.Other)
			for i := range 10 {
				name := fmt.Sprint("salt:", i)
				if r.IntN(3) == 0 {
					missed[name] += part.Node.Floor
					continue
				}
				u := use(name)
				u.Missed = uint64(r.IntN(2)) * (part.Node.Floor + uint64(r.IntN(5)))
				missed[name] += u.Missed
				part.Tenants = append(part.Tenants, u)
				part.Roots = append(part.Roots, peerapi.TenantRoot{First: uint64(i), Tenant: uint32(len(part.Names))})
				part.Names, owner[uint64(i)] = append(part.Names, name), name
			}
			parts = append(parts, part)
		}
		unattributed := uint64(0)
		for _, part := range parts {
			for range 5 {
				h := peerapi.HeldRoot{First: uint64(r.IntN(12)), Blocks: uint64(r.IntN(100))}
				part.Held = append(part.Held, h)
				if name, known := owner[h.First]; known {
					held[name] += h.Blocks
				} else {
					unattributed += h.Blocks
				}
			}
			part.Rest = uint64(r.IntN(3))
			unattributed += part.Rest
		}
		for _, limit := range []int{1, 5, 100} {
			out := &api.TenantList{}
			joinTenants(out, parts, limit, true)
			sum := out.None.Requested + out.Other.Requested
			for _, u := range out.Tenants {
				if sum += u.Requested; u.Missed != missed[u.Tenant] || *u.HeldBlocks != held[u.Tenant] {
					t.Errorf("seed %d: %+v, want %d missed, %d held", seed, u, missed[u.Tenant], held[u.Tenant])
				}
			}
			if sum != total || out.Total.Requested != total || out.Total.Computed != total || len(out.Tenants) > limit ||
				*out.UnattributedBlocks != unattributed || out.Off {
				t.Errorf("seed %d, limit %d: %+v, want %d tokens, %d blocks", seed, limit, out, total, unattributed)
			}
		}
	}
	out := &api.TenantList{}
	joinTenants(out, []*peerapi.TenantsPart{{Node: api.TenantNode{Node: "n", Off: true}}}, 10, false)
	if !out.Off || len(out.Nodes) != 1 {
		t.Errorf("%+v", out)
	}
}
