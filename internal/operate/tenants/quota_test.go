package tenants

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

func quotas(list map[string]*Quota, most int) *Quotas {
	for _, q := range list {
		if q.Count == "" {
			q.Count = CountRequested
		}
		if q.Over == "" {
			q.Over = Reject
		}
		if err := CheckQuota(q); err != nil {
			panic(err)
		}
	}
	return NewQuotas(list, most, 1)
}

// TestQuota sends requests of 100 tokens each second in virtual time. The quota permits 60 tokens a second, and a
// minute's tokens at once.
func TestQuota(t *testing.T) {
	q := quotas(map[string]*Quota{"t:a": {TokensPerMinute: 3600}}, 10)
	admitted := 0
	for s := range 600 {
		now := time.Duration(s) * time.Second
		v := q.Admit("t:a", 100, now)
		if !v.Over {
			admitted++
			continue
		}
		if v.Retry < time.Second || v.Retry > 3*time.Second {
			t.Fatalf("at %v: %+v", now, v)
		}
		early, late := *q.buckets["t:a"], *q.buckets["t:a"]
		early.fill(v.Quota, now+v.Retry-time.Second)
		if late.fill(v.Quota, now+v.Retry); early.tokens > 0 && v.Retry > time.Second || late.tokens <= 0 {
			t.Fatalf("at %v: retry after %v has %v tokens, a second before %v", now, v.Retry, late.tokens, early.tokens)
		}
	}
	if most, least := 36+360+1, 36+360-2; admitted > most || admitted < least {
		t.Errorf("%d requests of 600 are admitted, want %d to %d", admitted, least, most)
	}
	if v := q.Admit("t:b", 1<<40, 0); v.Quota != nil || v.Over {
		t.Errorf("a tenant without a quota: %+v", v)
	}
	if v := q.Admit("", 1<<40, 0); v.Quota != nil {
		t.Errorf("a request without a tenant: %+v", v)
	}
}

// TestQuotaCharges corrects estimates, and lowers in place of rejecting.
func TestQuotaCharges(t *testing.T) {
	q := quotas(map[string]*Quota{Everyone: {TokensPerMinute: 600, Over: Lower, Class: "batch"},
		Unnamed: {TokensPerMinute: 60}}, 10)
	v := q.Admit("t:a", 500, 0)
	q.Charge(&v, -400, 0)
	if v.Over || q.buckets["t:a"].tokens != 500 || q.Usage()["t:a"].Tokens != 100 {
		t.Fatalf("%+v, %+v", v, q.buckets["t:a"])
	}
	v = q.Admit("t:a", 500, 0)
	if v.Over {
		t.Fatalf("%+v", v)
	}
	if v = q.Admit("t:a", 300, 0); !v.Over || v.Quota.Class != "batch" || q.buckets["t:a"].tokens != -300 {
		t.Errorf("a lowered request is charged: %+v, %+v", v, q.buckets["t:a"])
	}
	if v = q.Admit("", 61, 0); v.Over || !q.Admit("", 1, 0).Over {
		t.Errorf("requests without a tenant have a quota: %+v", v)
	}
}

// TestQuotaOfNodes runs three nodes that exchange the charged tokens each second, with restarts and lost exchanges, and
// compares the admitted tokens of each tenant with the quota. A node admits too much only by the tokens of other nodes
// since the last exchange, and by a minute's tokens after its restart.
func TestQuotaOfNodes(t *testing.T) {
	t.Logf("-seed=%d", *seed)
	for round := range uint64(20) {
		r := rand.New(rand.NewPCG(*seed, round))
		list := map[string]*Quota{Everyone: {TokensPerMinute: 60_000}, "t:0": {TokensPerMinute: 6_000}}
		nodes := []*Quotas{quotas(list, 5), quotas(list, 5), quotas(list, 5)}
		for i := range nodes {
			nodes[i].serial = r.Uint64()
		}
		admitted, restarts, perSecondMost := map[string]uint64{}, 0, map[string]uint64{}
		const seconds = 600
		for s := range seconds {
			now := time.Duration(s) * time.Second
			thisSecond := map[string]uint64{}
			for range 60 {
				name, tokens := fmt.Sprint("t:", r.IntN(3)), uint64(r.IntN(200))
				if v := nodes[r.IntN(3)].Admit(name, tokens, now); !v.Over {
					admitted[name] += tokens
					thisSecond[name] += tokens
				}
			}
			for name, n := range thisSecond {
				perSecondMost[name] = max(perSecondMost[name], n)
			}
			if r.IntN(200) == 0 {
				i := r.IntN(3)
				nodes[i] = quotas(list, 5)
				nodes[i].serial = r.Uint64()
				restarts++
			}
			for i := range nodes {
				for j := range nodes {
					if i != j {
						nodes[i].Learn(fmt.Sprint(j), nodes[j].Usage(), now)
					}
				}
			}
		}
		for name, n := range admitted {
			of := nodes[0].quotaOf(name)
			bound := float64(of.TokensPerMinute)*(1+seconds/60.0+3*float64(restarts)) + 2*float64(perSecondMost[name]) + 200
			if float64(n) > bound {
				t.Errorf("round %d: %s has %d tokens with %d restarts, more than %v", round, name, n, restarts, bound)
			}
			if least := math.Min(float64(of.TokensPerMinute)*(seconds/60.0), 1_900*seconds); float64(n) < least-600 {
				t.Errorf("round %d: %s has %d tokens, less than %v", round, name, n, least)
			}
		}
	}
}

// TestQuotaBound sends requests of more tenants than there are buckets. Further tenants share a bucket, and a full
// bucket makes room.
func TestQuotaBound(t *testing.T) {
	q := quotas(map[string]*Quota{Everyone: {TokensPerMinute: 60}, "t:own": {TokensPerMinute: 60}}, 3)
	for i := range 100 {
		q.Admit(fmt.Sprint("junk:", i), 10, 0)
	}
	if len(q.buckets) > q.most+1 || q.Pooled() != 95 || q.buckets[Other] == nil {
		t.Errorf("%d buckets, %d requests in the bucket of other", len(q.buckets), q.Pooled())
	}
	if v := q.Admit("junk:99", 10, 0); !v.Over {
		t.Errorf("the bucket of other is empty: %+v", v)
	}
	if v := q.Admit("t:own", 10, 0); v.Over || v.share != "t:own" {
		t.Errorf("a tenant with a quota has a bucket: %+v", v)
	}
	if v := q.Admit("late:1", 10, 11*time.Second); v.Over || v.share != "late:1" {
		t.Errorf("full buckets make room: %+v", v)
	}
}

// BenchmarkAttribution measures the work in the path of a request: the name of the tenant, and a quota.
func BenchmarkAttribution(b *testing.B) {
	for _, x := range []struct {
		name, source string
		hashed       bool
		quota        bool
	}{{"salt", Salt, false, false}, {"hashed salt", Salt, true, false}, {"api-key", APIKey, true, false},
		{"api-key and quota", APIKey, true, true}} {
		b.Run(x.name, func(b *testing.B) {
			n, err := NewNames([]string{x.source}, x.hashed, make([]byte, 32))
			if err != nil {
				b.Fatal(err)
			}
			q := quotas(map[string]*Quota{Everyone: {TokensPerMinute: 1 << 40}}, 1000)
			header := func(name string) string {
				if name == "x-api-key" {
					return "sk-0123456789abcdef0123456789abcdef"
				}
				return ""
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				name := n.Of(n.With(b.Context(), header), "a-cache-salt", "")
				if x.quota {
					now := time.Duration(i) * time.Microsecond
					v := q.Admit(name, 8192, now)
					q.Charge(&v, 1, now)
				}
			}
		})
	}
}
