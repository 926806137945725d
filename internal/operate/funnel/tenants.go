package funnel

import (
	"context"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// entriesPerTenant bounds the sums of tenants in all buckets: 128 for each tenant, of about 150 bytes. A tenant with
// requests for one model all the time has 110 in an hour.
const entriesPerTenant = 128

// attribution divides the buckets among tenants. A nil attribution divides nothing.
type attribution struct {
	table   *tenants.Table
	entries int // in all buckets
	folded  int64
	roots   map[rootKey]*tenants.Slot // the first blocks of prompts; nil: tenants share blocks
	unknown uint64                    // first blocks beyond maxTenantRoots
}

// rootKey is the first block of prompts of a model, by its local hash. The hash covers the salt and the adapter.
type rootKey struct {
	model string
	first events.LocalHash
}

// rootsPerTenant bounds the first blocks of prompts, on average.
const rootsPerTenant = 16

// otherSlot has the sums of all replaced tenants.
var otherSlot = &tenants.Slot{Name: tenants.Other}

func newAttribution(most int, roots bool) *attribution {
	if most == 0 {
		return nil
	}
	a := &attribution{table: tenants.NewTable(most)}
	if roots {
		a.roots = map[rootKey]*tenants.Slot{}
	}
	return a
}

// add adds sums of a tenant to a bucket. all are the buckets, for the removal of replaced tenants.
func (a *attribution) add(all *Buckets, b *bucket, tenant string, use *tenants.Use, now time.Time) {
	slot := a.table.Find(tenant, use.Requested+use.RejectedTokens, now.Unix())
	sums := b.tenants[slot]
	if sums == nil && a.entries >= entriesPerTenant*(a.table.Most()+1) {
		if moment := now.Unix() / int64(span/time.Second); moment != a.folded {
			a.folded = moment
			all.fold()
		}
		a.entries = all.entries()
		if a.entries >= entriesPerTenant*(a.table.Most()+1) {
			slot.Miss(use.Requested + use.RejectedTokens)
			slot = otherSlot
			sums = b.tenants[slot]
		}
	}
	if sums == nil {
		if b.tenants == nil {
			b.tenants = map[*tenants.Slot]*tenants.Use{}
		}
		sums = &tenants.Use{}
		b.tenants[slot] = sums
		a.entries++
	}
	sums.Add(use)
}

// learnRoot records the tenant of a prompt's first block.
func (a *attribution) learnRoot(model string, first events.LocalHash, tenant string, now time.Time) {
	if a.roots == nil {
		return
	}
	k := rootKey{model, first}
	if was := a.roots[k]; was != nil && !was.Replaced && was.Name == tenant {
		return
	}
	if len(a.roots) >= rootsPerTenant*(a.table.Most()+1) {
		for k, slot := range a.roots {
			if slot.Replaced {
				delete(a.roots, k)
			}
		}
	}
	if len(a.roots) >= rootsPerTenant*(a.table.Most()+1) {
		a.unknown++
		return
	}
	a.roots[k] = a.table.Find(tenant, 0, now.Unix())
}

// fold adds the sums of replaced tenants to the sums of otherSlot.
func (s *Buckets) fold() {
	for _, list := range s.models {
		for _, b := range list {
			b.fold()
		}
	}
}

func (b *bucket) fold() {
	for slot, use := range b.tenants {
		if slot.Replaced {
			delete(b.tenants, slot)
			b.useOf(otherSlot).Add(use)
		}
	}
}

// useOf returns the sums of a tenant, which may be new.
func (b *bucket) useOf(slot *tenants.Slot) *tenants.Use {
	use := b.tenants[slot]
	if use == nil {
		if b.tenants == nil {
			b.tenants = map[*tenants.Slot]*tenants.Use{}
		}
		use = &tenants.Use{}
		b.tenants[slot] = use
	}
	return use
}

func (s *Buckets) entries() (n int) {
	for _, list := range s.models {
		for _, b := range list {
			n += len(b.tenants)
		}
	}
	return n
}

// useOf returns the sums of a request, whose part in the funnel is given.
func useOf(r *Request, part *share) *tenants.Use {
	u := &tenants.Use{Requests: 1, Requested: part.asked, Selected: part.selected}
	if r.Routed {
		u.Routed = 1
	}
	if r.Worker == "" {
		u.Unserved = part.asked
	}
	if r.Lowered {
		u.Lowered = 1
	}
	return u
}

// Tenants are the sums of a node's requests by tenant.
type Tenants struct {
	From, To time.Time
	Uses     map[string]*TenantUse // by name; empty: requests without a tenant
	Most     int
	Len      int
	Replaced uint64 // since the start
	Floor    uint64 // bound of the tokens in Other of any tenant without an entry
	Unknown  uint64 // first blocks of prompts without room
	Dropped  uint64 // requests that the funnel did not record
}

// TenantUse are the sums of a tenant. Missed bounds its tokens under [tenants.Other].
type TenantUse struct {
	tenants.Use
	Missed uint64
}

// Tenants returns this node's sums by tenant, of one model, or of all models with the empty name. The window is the
// window of [Tracker.Funnel]. It returns nil if requests are not attributed.
func (t *Tracker) Tenants(ctx context.Context, model string, since time.Duration) (*Tenants, error) {
	if t.tenants == nil {
		return nil, nil
	}
	if err := t.Flush(ctx); err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	first := t.first(since, now)
	a := t.tenants
	out := &Tenants{From: time.Unix(0, first*int64(span)), To: now, Uses: map[string]*TenantUse{}, Most: a.table.Most(),
		Len: a.table.Len(), Replaced: a.table.Count(), Floor: a.table.Floor(now.Unix()), Unknown: a.unknown,
		Dropped: t.dropped.Load()}
	for name, list := range t.sums.models {
		if model != "" && name != model {
			continue
		}
		for _, b := range list {
			if b.from < first {
				continue
			}
			for slot, use := range b.tenants {
				key := slot.Name
				if slot.Replaced || slot == otherSlot {
					key = otherKey
				}
				of := out.Uses[key]
				if of == nil {
					of = &TenantUse{Missed: slot.Missed()}
					out.Uses[key] = of
				}
				of.Add(use)
			}
		}
	}
	return out, nil
}

// otherKey is the key of [tenants.Other] in Uses. No tenant has the name, because names of tenants have a colon.
const otherKey = tenants.Other

// Reject counts a request that a quota has rejected. Requests must be attributed.
func (t *Tracker) Reject(r *Request) {
	r.rejected = true
	t.Record(r)
}

// reject counts a rejected request, which is not in the funnel.
func (t *Tracker) reject(r *Request) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if b := t.sums.bucketAt(r.Model, r.At); b != nil {
		use := &tenants.Use{Rejected: 1, RejectedTokens: r.ISL}
		t.tenants.add(&t.sums, b, r.Tenant, use, r.At)
		t.cfg.Attributed(r.Tenant, use)
	}
}

// Roots returns the tenants of the first blocks of a model's prompts, with all earlier records; nil if tenants share
// blocks.
func (t *Tracker) Roots(ctx context.Context, model string) (map[events.LocalHash]string, error) {
	if t.tenants == nil || t.tenants.roots == nil {
		return nil, nil
	}
	if err := t.Flush(ctx); err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	roots := map[events.LocalHash]string{}
	for k, slot := range t.tenants.roots {
		if k.model == model && !slot.Replaced {
			roots[k.first] = slot.Name
		}
	}
	return roots, nil
}

// attribute adds a request to the sums of its tenant. t.mu is held.
func (t *Tracker) attribute(r *Request, p *prompt, part *share) {
	use := useOf(r, part)
	t.tenants.add(&t.sums, t.sums.bucketAt(r.Model, r.At), r.Tenant, use, r.At)
	if len(p.own) > 0 {
		t.tenants.learnRoot(r.Model, p.own[0], r.Tenant, r.At)
	}
	t.cfg.Attributed(r.Tenant, use)
}
