package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/internal/operate/funnel"
	"github.com/kvatlas/kvatlas/internal/operate/recording"
	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Attribution configures the sums and quotas of tenants; see package tenants.
type Attribution struct {
	Sources []string // empty: requests are not attributed
	Limit   int      // tenants with separate sums
	Hashed  bool     // all names are hashed
	Metrics int      // tenants with separate series in the metrics; 0: none

	Quotas map[string]*tenants.Quota // empty: no tenant has a quota
}

// openTenants creates the names and the quotas of tenants.
func (s *Server) openTenants(ctx context.Context) error {
	if len(s.Attribution.Sources) == 0 {
		return nil
	}
	fresh := make([]byte, recording.SecretBytes)
	_, _ = rand.Read(fresh) // never fails
	secret, err := s.ns.Secret(ctx, fresh)
	if err != nil {
		return err
	}
	if s.tenants, err = tenants.NewNames(s.Attribution.Sources, s.Attribution.Hashed, secret); err != nil {
		return err
	}
	if len(s.Attribution.Quotas) > 0 {
		s.quotas = newQuotas(s.Attribution.Quotas, s.Attribution.Limit)
	}
	return nil
}

// tenantLimit returns the bound of tenants with separate sums; 0 if requests are not attributed.
func (s *Server) tenantLimit() int {
	if s.tenants == nil {
		return 0
	}
	return s.Attribution.Limit
}

// attributedHook returns the function that counts the tokens of tenants for the metrics; nil without such metrics.
func (s *Server) attributedHook() func(string, *tenants.Use) {
	if s.tenants == nil || s.Attribution.Metrics == 0 {
		return nil
	}
	return s.queries.Attributed
}

// tenantHeader returns a function with the values of headers, by name in lower case.
func tenantHeader(headers map[string][]string) func(string) string {
	return func(name string) string {
		if value := http.Header(headers).Get(name); value != "" {
			return value
		}
		for key, values := range headers { // NATS keeps the letter case of the client
			if len(values) > 0 && strings.EqualFold(key, name) {
				return values[0]
			}
		}
		return ""
	}
}

// attributedNATS adds the tenant in the headers of a message to the context.
func (s *Server) attributedNATS(by api.Transport, next jetstream.Handler) jetstream.Handler {
	if s.tenants == nil || by == api.FromNodes {
		return next
	}
	return func(ctx context.Context, r jetstream.Request) jetstream.Response {
		return next(s.tenants.With(ctx, tenantHeader(r.Headers)), r)
	}
}

// tenantOf returns the tenant of a request; empty: none.
func (s *Server) tenantOf(ctx context.Context, q *api.Query) string {
	return cmp.Or(q.Tenant, s.tenants.Of(ctx, q.CacheSalt, q.LoRA))
}

// quotas is a state machine of quotas with a lock and a clock.
type quotas struct {
	mu    sync.Mutex
	of    *tenants.Quotas
	began time.Time
}

func newQuotas(list map[string]*tenants.Quota, most int) *quotas {
	var seed [8]byte
	_, _ = rand.Read(seed[:]) // never fails
	return &quotas{of: tenants.NewQuotas(list, most, binary.LittleEndian.Uint64(seed[:])), began: time.Now()}
}

// do calls a function with the state machine and the time.
func (q *quotas) do(do func(of *tenants.Quotas, now time.Duration)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	do(q.of, time.Since(q.began))
}

// chooseInQuota chooses a worker for a request within the quota of its tenant. A request beyond the quota is rejected,
// or loses its priority.
func (s *Server) chooseInQuota(ctx context.Context, r *api.SelectRequest) (*api.Selection, error) {
	if s.quotas == nil || r.Advisory || r.Diagnostic {
		return s.selection.Select(ctx, r)
	}
	tenant, tokens := s.tenantOf(ctx, &r.Query), s.promptTokens(r)
	var v tenants.Verdict
	s.quotas.do(func(of *tenants.Quotas, now time.Duration) { v = of.Admit(tenant, tokens, now) })
	if v.Quota == nil {
		return s.selection.Select(ctx, r)
	}
	state := &api.QuotaState{Tenant: tenant, TokensPerMinute: v.Quota.TokensPerMinute, Action: "lowered",
		RetryAfterMS: uint64(v.Retry.Milliseconds())}
	if v.Over && v.Quota.Over == tenants.Reject {
		s.funnel.Reject(&funnel.Request{At: time.Now(), Model: r.Model, Tenant: tenant, ISL: tokens})
		state.Action = "rejected"
		failure := api.Errorf(api.CodeQuota, "the tenant has used its quota of %d %s tokens a minute; retry after %v",
			v.Quota.TokensPerMinute, v.Quota.Count, v.Retry)
		failure.Quota = state
		return nil, failure
	}
	if v.Over {
		lowered := *r
		lowered.StrictPriority, lowered.PriorityJump = 0, 0
		lowered.PolicyClass = cmp.Or(v.Quota.Class, r.PolicyClass)
		r = &lowered
	}
	out, err := s.selection.Select(ctx, r)
	charge := -int64(tokens)
	if err == nil {
		charge += charged(v.Quota, out)
		if v.Over {
			out.Quota = state
		}
	}
	s.quotas.do(func(of *tenants.Quotas, now time.Duration) { of.Charge(&v, charge, now) })
	return out, err
}

// charged returns the tokens of a choice that a quota counts.
func charged(q *tenants.Quota, out *api.Selection) int64 {
	if out.Prefill != nil {
		out = out.Prefill
	}
	if q.Count == tenants.CountComputed {
		return int64(out.EffectivePrefillTokens)
	}
	return int64(out.ISLTokens)
}

// promptTokens returns the length of a prompt before the choice, as far as it is known.
func (s *Server) promptTokens(r *api.SelectRequest) uint64 {
	size := uint64(r.BlockSize)
	if blocks := max(len(r.Hashes), len(r.EngineHashes)); size == 0 && blocks > 0 {
		if pool := s.registry.Pool(r.Model); len(pool.Ranks) > 0 {
			size = uint64(pool.Ranks[0].BlockSize)
		}
	}
	return max(r.ISLTokens, uint64(len(r.Tokens)), size*uint64(max(len(r.Hashes), len(r.EngineHashes))))
}

// chargesPeriod is the time between requests for the charges of other nodes.
const chargesPeriod = time.Second

// exchangeCharges learns the charges of the other nodes until ctx ends.
func (s *Server) exchangeCharges(ctx context.Context) {
	for loop.Wait(ctx, chargesPeriod) {
		names := s.otherNodes()
		asking, cancel := context.WithTimeout(ctx, chargesPeriod)
		parts, failed := onAll(names, func(name string) (*peerapi.TenantCharges, error) {
			return onNode(s, name, func(n oneNode) (*peerapi.TenantCharges, error) { return n.TenantCharges(asking) })
		})
		cancel()
		s.quotas.do(func(of *tenants.Quotas, now time.Duration) {
			for i, part := range parts {
				if failed[i] == nil {
					of.Learn(names[i], usageOf(part), now)
				}
			}
			of.Forget(func(node string) bool { return !slices.Contains(names, node) })
		})
	}
}

func usageOf(part *peerapi.TenantCharges) map[string]tenants.Usage {
	usage := make(map[string]tenants.Usage, len(part.Tenants))
	for _, c := range part.Tenants {
		usage[c.Tenant] = tenants.Usage{Serial: c.Serial, Tokens: c.Tokens}
	}
	return usage
}

// TenantCharges returns the tokens that this node has charged to quotas.
func (s *Server) TenantCharges(context.Context) (*peerapi.TenantCharges, error) {
	out := &peerapi.TenantCharges{Tenants: []peerapi.TenantCharge{}}
	if s.quotas == nil {
		return out, nil
	}
	s.quotas.do(func(of *tenants.Quotas, _ time.Duration) {
		for name, u := range of.Usage() {
			out.Tenants = append(out.Tenants, peerapi.TenantCharge{Tenant: name, Serial: u.Serial, Tokens: u.Tokens})
		}
	})
	return out, nil
}

// TenantsPart returns this node's part of the tokens and held blocks of tenants.
func (s *Server) TenantsPart(ctx context.Context, q *peerapi.TenantsPartRequest) (*peerapi.TenantsPart, error) {
	window, err := (&api.FunnelRequest{Since: q.Since}).Window()
	if err != nil {
		return nil, err
	}
	out := &peerapi.TenantsPart{Node: api.TenantNode{Node: s.ID, Off: s.tenants == nil}, Tenants: []api.TenantUse{}}
	sums, err := s.funnel.Tenants(ctx, q.Model, window)
	if err != nil {
		return nil, api.AsError(err)
	}
	if sums != nil {
		out.From, out.To = sums.From, sums.To
		out.Node.Limit, out.Node.Tenants, out.Node.Replaced = sums.Most, sums.Len, sums.Replaced
		out.Node.Floor, out.Node.Dropped, out.Node.Unknown = sums.Floor, sums.Dropped, sums.Unknown
		for name, use := range sums.Uses {
			row := tenantRow(name, use)
			switch name {
			case "":
				out.None = row
			case tenants.Other:
				out.Other = row
			default:
				out.Tenants = append(out.Tenants, row)
			}
		}
	}
	if s.quotas != nil {
		s.quotas.do(func(of *tenants.Quotas, _ time.Duration) { out.Node.Pooled = of.Pooled() })
	}
	if q.Held {
		err = s.addHeldRoots(ctx, out, q)
	}
	return out, err
}

func tenantRow(name string, u *funnel.TenantUse) api.TenantUse {
	return api.TenantUse{Tenant: name, Requests: u.Requests, Routed: u.Routed, Reported: u.Reported,
		Requested: u.Requested, Reused: u.Reused, Expected: u.Expected(), Computed: u.Computed(), Unserved: u.Unserved,
		Rejected: u.Rejected, RejectedTokens: u.RejectedTokens, Lowered: u.Lowered, Missed: u.Missed}
}

// addHeldRoots adds the first blocks of prompts with their tenants, and the held blocks of the requested partitions.
func (s *Server) addHeldRoots(ctx context.Context, out *peerapi.TenantsPart, q *peerapi.TenantsPartRequest) error {
	roots, err := s.funnel.Roots(ctx, q.Model)
	if err != nil {
		return api.AsError(err)
	}
	out.Shared = s.tenants != nil && roots == nil
	at := map[string]uint32{}
	for first, name := range roots {
		if len(out.Roots) == peerapi.MaxTenantRoots {
			out.Node.Unknown++
			continue
		}
		if _, known := at[name]; !known {
			at[name] = uint32(len(out.Names))
			out.Names = append(out.Names, name)
		}
		out.Roots = append(out.Roots, peerapi.TenantRoot{First: uint64(first), Tenant: at[name]})
	}
	held, absent, err := s.node.HeldByRoot(q.Model, q.Partitions)
	if err != nil {
		return err
	}
	out.Absent = absent
	for first, blocks := range held {
		out.Held = append(out.Held, peerapi.HeldRoot{First: uint64(first), Blocks: blocks})
	}
	slices.SortFunc(out.Held, func(a, b peerapi.HeldRoot) int {
		return cmp.Or(cmp.Compare(b.Blocks, a.Blocks), cmp.Compare(a.First, b.First))
	})
	for len(out.Held) > peerapi.MaxTenantRoots {
		last := len(out.Held) - 1
		out.Rest += out.Held[last].Blocks
		out.Held = out.Held[:last]
	}
	return nil
}

// Tenants joins the parts of all nodes.
func (s *Server) Tenants(ctx context.Context, q *api.TenantsRequest) (*api.TenantList, error) {
	if err := s.named(&q.Model); err != nil {
		return nil, err
	}
	if err := s.admit(); err != nil {
		return nil, err
	}
	out := &api.TenantList{Tenants: []api.TenantUse{}}
	var share map[string][]events.Partition
	if q.Held {
		share, out.Absent = s.sharePartitions()
	}
	parts, missing, err := fromNodes(ctx, s, s.nodes(),
		func(ctx context.Context, n oneNode, name string) (*peerapi.TenantsPart, error) {
			return n.TenantsPart(ctx,
				&peerapi.TenantsPartRequest{Model: q.Model, Since: q.Since, Held: q.Held, Partitions: share[name]})
		})
	if err != nil {
		return nil, err
	}
	out.Missing = missing
	for _, name := range missing {
		out.Absent = append(out.Absent, share[name]...)
	}
	var answered []*peerapi.TenantsPart
	for _, part := range parts {
		answered = append(answered, part.answer)
		out.Absent = append(out.Absent, part.answer.Absent...)
	}
	slices.Sort(out.Absent)
	joinTenants(out, answered, int(cmp.Or(q.Limit, api.UsualTenants)), q.Held)
	return out, nil
}
