package funnel

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// wholeFunnel are the sums of a funnel that tenants have too.
func wholeFunnel(f *api.Funnel) tenants.Use {
	u := tenants.Use{Requests: f.Requests, Routed: f.Routed, Reported: f.Reported, Requested: f.Steps[0].Tokens,
		Selected: f.Steps[3].Tokens, Reused: f.Steps[4].Tokens, Confirmed: f.Steps[3].Tokens}
	for _, l := range f.Steps[4].Lost {
		if l.Cause == api.CauseNotReported {
			u.Confirmed -= l.Tokens
		}
	}
	return u
}

// TestTenantsAddUp records random requests and reports of more tenants than the bound on three nodes, one of which
// restarts. In each window, the sums over the tenants of a node are the node's funnel, and each tenant's tokens are
// within its bound of the true tokens.
func TestTenantsAddUp(t *testing.T) {
	synctest.Test(t, testTenantsAddUp) // otherwise a window may move by a bucket between two answers
}

func testTenantsAddUp(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 7))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	start := func(i int) *Tracker {
		x := New(Config{Node: fmt.Sprint("n", i), Tenants: 4, TenantRoots: true, MaxRate: 1 << 30})
		go x.Run(ctx)
		return x
	}
	nodes := []*Tracker{start(0), start(1), start(2)}
	truth := []map[string]uint64{{}, {}, {}}
	skew := rand.NewZipf(r, 1.5, 1, 20)
	var ids []string
	for step := range 3000 {
		i := r.IntN(3)
		if step == 1500 {
			nodes[2], truth[2] = start(2), map[string]uint64{}
		}
		tokens := make([]uint32, 1+r.IntN(200))
		for j := range tokens {
			tokens[j] = uint32(r.IntN(3))
		}
		q := &Request{At: time.Now().Add(-time.Duration(r.IntN(1200)) * time.Second), Model: fmt.Sprint("m", r.IntN(2)),
			BlockSize: 16, Tokens: tokens, Held: uint32(r.IntN(4)), Routed: r.IntN(3) > 0}
		if n := skew.Uint64(); n > 0 {
			q.Tenant = fmt.Sprint("salt:", n)
			q.Space.Salt = q.Tenant
		}
		if q.Routed && r.IntN(4) > 0 {
			q.ID, q.Worker, q.Selected = fmt.Sprint("r", step), "w", min(q.Held, uint32(r.IntN(4)))
			ids = append(ids, q.ID)
		}
		if r.IntN(10) == 0 {
			nodes[i].Reject(&Request{At: q.At, Model: q.Model, Tenant: q.Tenant, ISL: 10})
			truth[i][q.Tenant] += 10
		}
		nodes[i].Record(q)
		truth[i][q.Tenant] += uint64(len(tokens))
		if len(ids) > 0 && r.IntN(2) == 0 {
			nodes[i].ReportLater(api.Report{RequestID: ids[r.IntN(len(ids))], CachedTokens: uint64(r.IntN(100))}, r.IntN(8) == 0)
		}
	}
	for i, node := range nodes {
		for _, since := range []time.Duration{time.Minute, 10 * time.Minute, time.Hour} {
			node.began = time.Now().Add(-2 * time.Hour) // the requests are older than the node
			var want, got tenants.Use
			for _, model := range []string{"m0", "m1"} {
				f, err := node.Funnel(ctx, model, since)
				if err != nil {
					t.Fatal(err)
				}
				part := wholeFunnel(f)
				want.Add(&part)
			}
			sums, err := node.Tenants(ctx, "", since)
			if err != nil {
				t.Fatal(err)
			}
			for name, use := range sums.Uses {
				if use.Requested != use.Reused+use.Expected()+use.Computed()+use.Unserved || use.Computed() > use.Requested {
					t.Errorf("node %d, %v, %q: %+v", i, since, name, use)
				}
				got.Add(&use.Use)
				most, counted := truth[i][name], use.Requested+use.RejectedTokens
				if name != tenants.Other && counted > most ||
					name != tenants.Other && name != "" && since == time.Hour && most > counted+use.Missed {
					t.Errorf("node %d, %v: %q has %d tokens, counted %d, missed at most %d", i, since, name, most, counted, use.Missed)
				}
			}
			got.Rejected, got.RejectedTokens, got.Lowered, got.Unserved = 0, 0, 0, 0
			if got != want || len(sums.Uses) > 6 || sums.Len > 4 || since == time.Hour && sums.Replaced == 0 {
				t.Errorf("node %d, %v: %+v, want %+v; %d of %d, %d replaced", i, since, got, want, sums.Len, len(sums.Uses),
					sums.Replaced)
			}
			if since == time.Hour && sums.Uses[tenants.Other].Requested == 0 {
				t.Errorf("node %d: no tokens under %s", i, tenants.Other)
			}
		}
	}
	roots, err := nodes[0].Roots(ctx, "m0")
	if err != nil || len(roots) == 0 {
		t.Fatalf("%d first blocks, %v", len(roots), err)
	}
	for _, name := range roots {
		if name == tenants.Other {
			t.Error("a first block belongs to replaced tenants")
		}
	}
}

// TestEntriesOfTenants fills the buckets with sums of tenants beyond their bound. The further sums belong to other, and
// the tenant's bound of missed tokens covers them.
func TestEntriesOfTenants(t *testing.T) {
	var sums Buckets
	a := newAttribution(1, false)
	now := time.Now()
	total := uint64(0)
	for i := range 3 * entriesPerTenant {
		r := &Request{At: now.Add(time.Duration(i%50) * -10 * time.Second), Model: fmt.Sprint("m", i/50)}
		b := sums.bucketAt(r.Model, r.At)
		a.add(&sums, b, "salt:a", &tenants.Use{Requests: 1, Requested: 100}, now)
		total += 100
	}
	counted, others := uint64(0), uint64(0)
	for _, list := range sums.models {
		for _, b := range list {
			for slot, use := range b.tenants {
				if slot == otherSlot {
					others += use.Requested
				} else {
					counted += use.Requested
				}
			}
		}
	}
	slot := a.table.Find("salt:a", 0, now.Unix())
	if counted+others != total || others == 0 || slot.Missed() != others || counted != 100*2*entriesPerTenant {
		t.Errorf("%d and %d of %d tokens, %d missed", counted, others, total, slot.Missed())
	}
}

// BenchmarkRecordTenants records a request of 512 blocks, with and without sums by tenant.
func BenchmarkRecordTenants(b *testing.B) {
	for _, most := range []int{0, 1000} {
		b.Run(fmt.Sprint("tenants=", most), func(b *testing.B) {
			x := New(Config{Node: "n", Tenants: most, TenantRoots: true})
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			hashes := make([]uint64, 512)
			for i := range hashes {
				hashes[i] = uint64(i + 1)
			}
			batch := make([]*Request, 1)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				batch[0] = &Request{At: time.Now(), Model: "m", BlockSize: 16, Hashes: hashes, Held: 64, Routed: true,
					Worker: "w", Selected: 64, Tenant: tenantNames[i%len(tenantNames)]}
				x.divide(ctx, batch)
			}
		})
	}
}

var tenantNames = func() (list [2000]string) {
	for i := range list {
		list[i] = fmt.Sprint("salt:", i)
	}
	return list
}()
