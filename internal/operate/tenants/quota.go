package tenants

import (
	"fmt"
	"math"
	"time"
)

// Action is the effect of a quota on requests beyond it.
type Action string

// The actions.
const (
	Reject Action = "reject" // the request is rejected
	Lower  Action = "lower"  // the request loses its priorities, and waits in the class of the quota
)

// Count is the kind of tokens that a quota counts.
type Count string

// The kinds.
const (
	CountRequested Count = "requested" // all tokens of prompts
	CountComputed  Count = "computed"  // without the tokens that the chosen worker holds
)

// Quota limits the tokens of a tenant.
type Quota struct {
	TokensPerMinute uint64
	Count           Count
	Over            Action
	Class           string // with Lower: the policy class of requests beyond the quota; empty: unchanged
}

// Everyone is the name of the quota for each tenant without a quota of its own. Requests without a tenant have no quota
// unless the file names [Unnamed].
const Everyone = "*"

// Unnamed is the name in quotas of the requests without a tenant.
const Unnamed = "-"

// Usage is the sum of the tokens that a node has charged to a bucket since it made the bucket.
type Usage struct {
	Serial uint64 // of the bucket, unique with high probability
	Tokens int64
}

// Verdict is the result of [Quotas.Admit].
type Verdict struct {
	Quota *Quota        // nil: the tenant has no quota
	Over  bool          // the tenant is beyond the quota
	Retry time.Duration // until the tenant is within the quota
	share string        // the tenant of the bucket
}

// Quotas are token buckets: a bucket has room for the tokens of a minute and fills evenly. It may become negative,
// because the charge follows the decision. The zero time is the start.
type Quotas struct {
	quotas  map[string]*Quota
	most    int
	serial  uint64 // of the last bucket
	buckets map[string]*level
	peers   map[string]map[string]Usage // by node and tenant
	pooled  uint64
}

// level is the content of a bucket at a time.
type level struct {
	tokens float64
	at     time.Duration
	own    Usage
}

// NewQuotas returns quotas for at most most tenants beside the tenants in quotas. Further tenants share the bucket of
// [Other]. seed is a random number.
func NewQuotas(quotas map[string]*Quota, most int, seed uint64) *Quotas {
	return &Quotas{quotas: quotas, most: most + len(quotas), serial: seed, buckets: map[string]*level{},
		peers: map[string]map[string]Usage{}}
}

// Pooled returns the number of requests of tenants without a bucket of their own.
func (q *Quotas) Pooled() uint64 { return q.pooled }

// CheckQuota returns an error for an invalid quota.
func CheckQuota(q *Quota) error {
	switch {
	case q.TokensPerMinute == 0 || q.TokensPerMinute > 1<<50:
		return fmt.Errorf("tokens_per_minute is %d; use 1 to %d", q.TokensPerMinute, uint64(1)<<50)
	case q.Over != Reject && q.Over != Lower:
		return fmt.Errorf("over is %q; use %s or %s", q.Over, Reject, Lower)
	case q.Count != CountRequested && q.Count != CountComputed:
		return fmt.Errorf("count is %q; use %s or %s", q.Count, CountRequested, CountComputed)
	case q.Class != "" && q.Over != Lower:
		return fmt.Errorf("class is for over: %s", Lower)
	}
	return nil
}

// quotaOf returns the quota of a tenant; nil: none.
func (q *Quotas) quotaOf(tenant string) *Quota {
	if tenant == "" {
		return q.quotas[Unnamed]
	}
	if own := q.quotas[tenant]; own != nil {
		return own
	}
	return q.quotas[Everyone]
}

// Admit decides about a request, and charges a number of tokens, the best estimate. [Quotas.Charge] corrects it. A
// request beyond a rejecting quota is not charged.
func (q *Quotas) Admit(tenant string, tokens uint64, now time.Duration) (v Verdict) {
	if v.Quota = q.quotaOf(tenant); v.Quota == nil {
		return v
	}
	b, name := q.bucket(tenant, v.Quota, now)
	v.share = name
	if v.Over = b.tokens <= 0; v.Over {
		v.Retry = time.Duration(math.Ceil((1-b.tokens)/perSecond(v.Quota))) * time.Second
	}
	if !v.Over || v.Quota.Over == Lower {
		b.own.Tokens += int64(tokens)
		b.charge(v.Quota, int64(tokens))
	}
	return v
}

// Charge corrects the charge of an admitted request by a number of tokens.
func (q *Quotas) Charge(v *Verdict, more int64, now time.Duration) {
	if v.Quota == nil || more == 0 {
		return
	}
	b, _ := q.bucket(v.share, v.Quota, now)
	b.own.Tokens += more
	b.charge(v.Quota, more)
}

func (b *level) charge(of *Quota, tokens int64) {
	b.tokens = min(b.tokens-float64(tokens), float64(of.TokensPerMinute))
}

func perSecond(of *Quota) float64 { return float64(of.TokensPerMinute) / 60 }

// bucket returns the filled bucket of a tenant.
func (q *Quotas) bucket(tenant string, of *Quota, now time.Duration) (*level, string) {
	b := q.buckets[tenant]
	if b == nil {
		if len(q.buckets) >= q.most {
			q.removeFull(now)
		}
		if len(q.buckets) >= q.most && q.quotas[tenant] == nil && tenant != "" && tenant != Other {
			q.pooled++
			return q.bucket(Other, of, now)
		}
		q.serial++
		b = &level{tokens: float64(of.TokensPerMinute), at: now, own: Usage{Serial: q.serial}}
		q.buckets[tenant] = b
	}
	b.fill(of, now)
	return b, tenant
}

func (b *level) fill(of *Quota, now time.Duration) {
	if now > b.at {
		b.tokens = min(b.tokens+perSecond(of)*(now-b.at).Seconds(), float64(of.TokensPerMinute))
		b.at = now
	}
}

// removeFull removes the full buckets. A new bucket is full too.
func (q *Quotas) removeFull(now time.Duration) {
	for name, b := range q.buckets {
		of := q.quotaOf(name)
		if of == nil { // of Other
			of = q.quotas[Everyone]
		}
		if of == nil {
			continue
		}
		if b.fill(of, now); b.tokens >= float64(of.TokensPerMinute) {
			delete(q.buckets, name)
		}
	}
}

// Usage returns the charged tokens of this node by tenant.
func (q *Quotas) Usage() map[string]Usage {
	list := make(map[string]Usage, len(q.buckets))
	for name, b := range q.buckets {
		list[name] = b.own
	}
	return list
}

// Learn charges the tokens of another node since its last usage. The first usage of a node charges nothing, because its
// tokens may be old.
func (q *Quotas) Learn(node string, usage map[string]Usage, now time.Duration) {
	before, known := q.peers[node]
	q.peers[node] = usage
	if !known {
		return
	}
	for name, u := range usage {
		of := q.quotaOf(name)
		if name == Other {
			of = q.quotas[Everyone]
		}
		was := before[name]
		if was.Serial != u.Serial {
			was = Usage{}
		}
		if of != nil && u.Tokens != was.Tokens {
			b, _ := q.bucket(name, of, now)
			b.charge(of, u.Tokens-was.Tokens)
		}
	}
}

// Forget removes the usage of nodes that are gone.
func (q *Quotas) Forget(gone func(node string) bool) {
	for node := range q.peers {
		if gone(node) {
			delete(q.peers, node)
		}
	}
}
