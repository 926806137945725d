package tenants

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

var seed = flag.Uint64("seed", 1, "of the random tests")

// naive is the twin of Table: a list, with the least weight found by looking at all entries.
type naive struct {
	most  int
	list  []*Slot
	floor uint64
}

func (n *naive) find(name string, tokens uint64, now int64) *Slot {
	least := -1
	for i, s := range n.list {
		if s.Name == name {
			s.weight, s.last = s.weight+tokens, max(s.last, now)
			return s
		}
		if least < 0 || slots(n.list).Less(i, least) {
			least = i
		}
	}
	if len(n.list) == n.most {
		n.list[least].Replaced = true
		n.floor = max(n.floor, n.list[least].weight)
		n.list = append(n.list[:least], n.list[least+1:]...)
	}
	s := &Slot{Name: name, weight: n.floor + tokens, missed: n.floor, last: now}
	n.list = append(n.list, s)
	return s
}

// TestTable compares the table with its twin, and with the true counts of all tenants: sums are exact, a tenant's true
// count is within its bound, and each tenant above the average of all slots has a slot.
func TestTable(t *testing.T) {
	t.Logf("-seed=%d", *seed)
	for round := range uint64(40) {
		r := rand.New(rand.NewPCG(*seed, round))
		most := 1 + r.IntN(20)
		table, twin := NewTable(most), &naive{most: most}
		truth, counted := map[string]uint64{}, map[*Slot]uint64{}
		total := uint64(0)
		skew := rand.NewZipf(r, 1.1+r.Float64(), 1, 200)
		for step := range int64(3000) {
			name, tokens := fmt.Sprint("t:", skew.Uint64()), uint64(r.IntN(1000))
			s, w := table.Find(name, tokens, step), twin.find(name, tokens, step)
			if s.Name != w.Name || s.weight != w.weight || s.missed != w.missed {
				t.Fatalf("round %d, step %d: %+v, the twin has %+v", round, step, s, w)
			}
			truth[name], total, counted[s] = truth[name]+tokens, total+tokens, counted[s]+tokens
		}
		sum, live := uint64(0), map[string]*Slot{}
		for s, n := range counted {
			sum += n
			if !s.Replaced {
				live[s.Name] = s
			}
		}
		if sum != total || len(live) > most || len(live) != table.Len() {
			t.Fatalf("round %d: %d of %d tokens, %d slots of %d, Len %d", round, sum, total, len(live), most, table.Len())
		}
		for name, n := range truth {
			s := live[name]
			if s == nil && (n > total/uint64(most) || n > table.Floor(3000)) {
				t.Errorf("round %d: %s with %d of %d tokens has no slot of %d; floor %d", round, name, n, total, most,
					table.Floor(3000))
			}
			if s != nil && (counted[s] > n || n > counted[s]+s.Missed()) {
				t.Errorf("round %d: %s has %d tokens, counted %d and at most %d more", round, name, n, counted[s], s.Missed())
			}
		}
	}
}

// TestIdleTenantsLeave fills a table with tenants that send no requests any more. New tenants replace them without a
// bound of missed tokens.
func TestIdleTenantsLeave(t *testing.T) {
	table := NewTable(3)
	for i := range 5 {
		table.Find(fmt.Sprint("old:", i), 1000, 1)
	}
	if table.Count() != 2 || table.Floor(1) != 1000 {
		t.Fatalf("%d replaced, floor %d", table.Count(), table.Floor(1))
	}
	later := int64(2*Keep + 10)
	for i := range 3 {
		if s := table.Find(fmt.Sprint("new:", i), 1, later); s.Missed() != 0 || s.weight != 1 {
			t.Errorf("%+v", s)
		}
	}
	if table.Count() != 2 || table.Len() != 3 {
		t.Errorf("%d replaced, %d slots", table.Count(), table.Len())
	}
}

// TestNames makes names from all sources. No name has the value of an API key.
func TestNames(t *testing.T) {
	secret := []byte(strings.Repeat("s", 32))
	for _, x := range []struct {
		sources, headers string
		salt, adapter    string
		hashed           bool
		want             string // with # in place of a hash
	}{
		{"salt,adapter", "", "s1", "l1", false, "salt:s1"},
		{"adapter,salt", "", "s1", "l1", false, "adapter:l1"},
		{"salt,adapter", "", "", "", false, ""},
		{"salt", "", "s1", "", true, "salt:#"},
		{"salt", "", "#abc", "", false, "salt:#"},
		{"salt", "", "a\nb", "", false, "salt:#"},
		{"salt", "", strings.Repeat("a", 65), "", false, "salt:#"},
		{"header=x-team,salt", "x-team=red", "s1", "", false, "x-team:red"},
		{"header=x-team,salt", "", "s1", "", false, "salt:s1"},
		{"api-key,salt,header=x-team", "x-team=red", "s1", "", false, "salt:s1"},
		{"api-key,salt,header=x-team", "x-team=red", "", "", false, "x-team:red"},
		{"api-key,salt", "authorization=Bearer secret-key", "s1", "", false, "api-key:#"},
		{"api-key,salt", "authorization=Basic secret-key", "s1", "", false, "salt:s1"},
		{"api-key", "x-api-key=secret-key", "", "", false, "api-key:#"},
		{"", "x-api-key=secret-key", "s1", "", false, ""},
	} {
		var sources []string
		if x.sources != "" {
			sources = strings.Split(x.sources, ",")
		}
		n, err := NewNames(sources, x.hashed, secret)
		if err != nil {
			t.Fatal(err)
		}
		name, value, _ := strings.Cut(x.headers, "=")
		ctx := n.With(context.Background(), func(header string) string {
			if header == name {
				return value
			}
			return ""
		})
		got := n.Of(ctx, x.salt, x.adapter)
		if before, hash, hashed := strings.Cut(got, "#"); hashed && len(hash) == 16 {
			got = before + "#"
		}
		if got != x.want {
			t.Errorf("%+v: %s", x, got)
		}
	}
	a, _ := NewNames([]string{APIKey, Salt}, true, secret)
	b, _ := NewNames([]string{Salt}, true, []byte(strings.Repeat("t", 32)))
	if x, y := a.Of(context.Background(), "s", ""), b.Of(context.Background(), "s", ""); x == y {
		t.Errorf("two secrets make the name %s", x)
	}
	x, y := a.name(Salt, "s"), a.name(APIKey, "s")
	if strings.TrimPrefix(x, "salt:") == strings.TrimPrefix(y, "api-key:") {
		t.Errorf("two sources make the same hash: %s, %s", x, y)
	}
	for _, bad := range []string{"salt,salt", "key", "header=", "header=X-Team", "header=authorization", "header=salt",
		"header=x-api-key"} {
		if _, err := NewNames(strings.Split(bad, ","), false, secret); err == nil {
			t.Errorf("the sources %s are valid", bad)
		}
	}
}
