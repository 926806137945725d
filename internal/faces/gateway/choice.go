package gateway

import (
	"cmp"
	"context"
	"crypto/rand"
	mathrand "math/rand/v2"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// choose chooses a worker, and books the request there if the model is known.
func (s *Service) choose(ctx context.Context, a *Ask) (*Choice, booking, error) {
	if len(a.Body) == 0 {
		c, err := s.anyWorker(a)
		return c, booking{}, err
	}
	r, err := fields.Read(a.API, a.Body)
	if err != nil {
		return nil, booking{}, err
	}
	q, forward, err := s.question(ctx, a, r)
	if err != nil {
		return nil, booking{}, err
	}
	form := s.form(q.Model, r, a.Body)
	q.Disaggregated, q.PrefillOptional = form.pair(), form.pair()
	chosen, err := s.cfg.Select(ctx, q)
	if err != nil {
		return nil, booking{}, err
	}
	b := booking{ref: api.RequestRef{Model: q.Model, RequestID: q.RequestID}, chosen: q.RequestID, report: q.RequestID,
		prompt: q.Prompt(), rank: events.RankKey{Instance: chosen.Worker, Rank: chosen.Rank}}
	b.prompt.ISLTokens = chosen.ISLTokens
	if chosen.Prefill == nil {
		b.prefill = chosen.ISLTokens
	}
	if !r.Partial {
		b.estimated, b.length = chosen.ISLTokens, r.Length
	}
	if t := chosen.Tokenization; t != nil {
		r.Unsupported = t.UnsupportedFields
	}
	c := s.choice(chosen, a.Subset, form)
	if c == nil {
		_ = s.cfg.Bookings.Free(ctx, &b.ref)
		return nil, booking{}, api.Errorf(api.CodeNoWorkers,
			"the chosen worker of %q has left its permitted address", q.Model)
	}
	c.Unsupported = r.Unsupported
	if forward {
		c.Body = s.forward(a.Body, chosen)
	}
	b.alive = s.renew(ctx, b.ref)
	if form.direct() {
		if err := s.prefill(ctx, a, r.API, form, chosen, c, &b); err != nil {
			return nil, booking{}, err
		}
	} else if met := s.bootstrapped(c, chosen.Prefill, c.body(a), r.Prompts); met != nil {
		c.Body = met
	}
	return c, b, nil
}

// question returns the request to the selector, and adds to r the fields that the gateway does not support. The result
// forward reports whether the worker receives token ids in place of the text.
func (s *Service) question(ctx context.Context, a *Ask, r *fields.Request) (_ *api.SelectRequest, forward bool,
	err error,
) {
	q := &api.SelectRequest{RequestID: rand.Text(), Book: true}
	q.Model, q.Explain = r.Model, true
	known, err := s.serving(q)
	if err != nil {
		return nil, false, err
	}
	if !known {
		r.Unsupported = append(r.Unsupported, "model")
	}
	q.LoRA = cmp.Or(q.LoRA, r.LoRA)
	q.Tenant = s.cfg.Tenants.Of(ctx, r.Salt, q.LoRA)
	if s.cfg.Bind != nil && len(r.Previous) <= api.MaxSessionID {
		q.SessionID = r.Previous
	}
	if r.Text.HasTemplate() && !s.cfg.Templates {
		r.Unsupported = append(r.Unsupported, "chat_template")
	}
	switch {
	case !r.Prompted() || r.Tokens == nil && !s.cfg.Text:
		q.Unsupported = len(r.Unsupported) > 0
		// A salt requires tokens. The adapter restricts the candidates.
		q.ISLTokens = max(1, s.cfg.Estimates.Tokens(q.Model, &r.Length))
		if r.Prompted() && s.cfg.ByLoad != nil {
			s.cfg.ByLoad(q.Model)
		}
		s.cfg.Metrics.Unsupported(string(r.API), r.Unsupported)
	case r.Tokens != nil:
		q.Tokens, q.CacheSalt = r.Tokens, r.Salt
		if further := s.cfg.Estimates.Tokens(q.Model, &r.Further); further > 0 {
			q.ISLTokens = uint64(len(r.Tokens)) + further
		}
	default:
		q.Text, q.CacheSalt, q.ISLTokens = &r.Text, r.Salt, s.cfg.Estimates.Tokens(q.Model, &r.Further)
	}
	forward = s.cfg.ForwardTokens && q.Text == &r.Text && a.API == fields.Completions && q.LoRA == ""
	r.Text.ReturnTokenIDs = forward
	if q.Endpoints, err = s.allowed(q.Model, a.Subset); err != nil {
		return nil, false, err
	}
	return q, forward, nil
}

// serving replaces the model name in the request by the model, and the adapter, behind the name. A request without a
// model name means the only registered model. An unknown name means it too, because engines accept names that are not
// registered. serving then returns false: the name may be an adapter's, so the blocks are unknown.
func (s *Service) serving(q *api.SelectRequest) (known bool, err error) {
	if q.Model != "" {
		t, err := s.cfg.Resolve(q.Model)
		if err != nil || len(s.cfg.Pool(t.Model).Ranks) > 0 {
			q.Model, q.LoRA = t.Model, t.LoRA
			return true, err
		}
		if base, lora, is := strings.Cut(q.Model, ":"); is && len(s.cfg.Pool(base).Ranks) > 0 {
			q.Model, q.LoRA = base, strings.TrimSpace(lora) // SGLang's form of a model with an adapter
			return true, nil
		}
	}
	only := ""
	for _, r := range s.cfg.All() {
		if only != "" && only != r.Model {
			if q.Model != "" {
				return true, nil // select refuses the name
			}
			return false, api.Errorf(api.CodeMissingModel, "the request names no model, and there are several")
		}
		only = r.Model
	}
	if only == "" && q.Model == "" {
		return false, api.Errorf(api.CodeNoWorkers, "no worker is registered")
	}
	known = q.Model == "" || only == ""
	q.Model = cmp.Or(only, q.Model)
	return known, nil
}

// places are the addresses of a pool's ranks. It is immutable.
type places struct {
	pool      *registry.Pool
	endpoints []string // serving addresses that proxies can reach, in their registered form, without duplicates
	addresses []string // the IP:PORT of each endpoint
	all       bool     // the pool has no other addresses
	decode    bool     // the pool has decode workers, so requests may have a prefill worker
	bootstrap bool     // a prefill worker has a bootstrap port, so the engines are SGLang's
}

// places returns the addresses of a model. A change of the pool recomputes the addresses.
func (s *Service) places(model string) *places {
	pool := s.cfg.Pool(model)
	known, _ := s.known.Load(model)
	if at, _ := known.(*places); at != nil && at.pool == pool {
		return at
	}
	at := &places{pool: pool, all: true}
	seen := map[string]bool{}
	for i := range pool.Ranks {
		record := pool.Ranks[i].Record
		endpoint := record.Endpoint
		at.decode = at.decode || record.Role == api.RoleDecode
		at.bootstrap = at.bootstrap || record.Role == api.RolePrefill && record.BootstrapPort != 0
		if seen[endpoint] {
			continue
		}
		seen[endpoint] = true
		if a := address(endpoint); a == "" {
			at.all = false
		} else {
			at.endpoints, at.addresses = append(at.endpoints, endpoint), append(at.addresses, a)
		}
	}
	if len(pool.Ranks) > 0 { // unknown names must not fill the map
		s.known.Store(model, at)
	} else {
		s.known.Delete(model)
	}
	return at
}

// allowed returns the registered serving addresses of the permitted ranks of a model: addresses in the subset that
// proxies can reach. nil permits all.
func (s *Service) allowed(model string, subset []string) (list []string, err error) {
	at := s.places(model)
	switch {
	case len(at.pool.Ranks) == 0:
		return nil, nil // select reports the unknown model
	case len(at.endpoints) == 0:
		return nil, api.Errorf(api.CodeNoWorkers, "no worker of %q is registered with a serving address IP:PORT", model)
	case subset == nil && at.all:
		return nil, nil
	case subset == nil:
		return at.endpoints, nil
	}
	for i, a := range at.addresses {
		if slices.Contains(subset, a) {
			list = append(list, at.endpoints[i])
		}
	}
	if list == nil {
		return nil, api.Errorf(api.CodeNoWorkers, "no worker of %q has an address of the proxy's subset: %.200s", model,
			strings.Join(subset, ","))
	}
	return list, nil
}

// choice returns the destination of a booked request: the chosen worker, and the next best workers of the subset. It
// returns nil if a chosen worker has left its permitted address by a new registration.
func (s *Service) choice(of *api.Selection, subset []string, form prefillForm) *Choice {
	usable := func(endpoint string) string {
		at := address(endpoint)
		if subset != nil && !slices.Contains(subset, at) {
			return ""
		}
		return at
	}
	chosen := usable(of.Endpoint)
	if chosen == "" {
		return nil
	}
	pool := s.cfg.Pool(of.Model)
	c := &Choice{Addresses: []string{chosen}}
	rank, ranks := serverRank(pool.Worker(of.Worker), of.Rank, chosen)
	if ranks > 1 {
		c.Rank = strconv.FormatUint(uint64(rank), 10)
	}
	source := of.KVSource
	if p := of.Prefill; p != nil {
		if c.Prefiller = usable(p.Endpoint); c.Prefiller == "" {
			return nil
		}
		r, n := serverRank(pool.Worker(p.Worker), p.Rank, c.Prefiller)
		if form.direct() && n > 1 {
			c.prefillRank = strconv.FormatUint(uint64(r), 10)
		} else if !form.direct() && r != rank {
			c.Rank = "" // sidecars send the header to both servers
		}
		source = p.KVSource // the prefill worker fetches the blocks
	}
	if source != nil {
		c.Source = soleAddress(pool.Worker(source.Worker), source.Endpoint)
	}
	if of.Explanation == nil {
		return c
	}
	others := of.Explanation.Candidates
	slices.SortStableFunc(others, func(a, b routing.Considered) int { return cmp.Compare(a.Cost, b.Cost) })
	for i := range others {
		if len(c.Addresses) > s.cfg.Fallbacks {
			break
		}
		r := pool.Rank(events.RankKey{Instance: others[i].Worker, Rank: others[i].Rank})
		if r == nil {
			continue // the registration has ended
		}
		if at := usable(r.Record.Endpoint); at != "" && !slices.Contains(c.Addresses, at) {
			c.Addresses = append(c.Addresses, at)
		}
	}
	return c
}

// serverRank returns the rank as the server at its address counts, and the number of the server's ranks. Each of
// several servers of a worker counts its own ranks (vllm-project/vllm › vllm/v1/engine/input_processor.py: with hybrid
// and external load balancing a rank must be less than data_parallel_size_local).
func serverRank(worker []registry.PoolRank, rank events.Rank, at string) (of events.Rank, here int) {
	first := rank
	for i := range worker {
		if address(worker[i].Record.Endpoint) == at {
			first = min(first, worker[i].Rank)
			here++
		}
	}
	if here < len(worker) {
		rank -= first
	}
	return rank, here
}

// soleAddress returns the IP:PORT of a serving address with a single rank behind it; empty for other addresses. The
// header of a KV source has no rank.
func soleAddress(worker []registry.PoolRank, endpoint string) string {
	here := 0
	for i := range worker {
		if worker[i].Record.Endpoint == endpoint {
			here++
		}
	}
	if here != 1 {
		return ""
	}
	return address(endpoint)
}

// anyWorker chooses for a request without a model: any permitted worker, with fallbacks.
func (s *Service) anyWorker(a *Ask) (*Choice, error) {
	c := &Choice{}
	for _, r := range s.cfg.All() {
		at := address(r.Record.Endpoint)
		if at != "" && r.Record.State == api.WorkerSchedulable && routing.Role(r.Record.Role).Answers() &&
			(a.Subset == nil || slices.Contains(a.Subset, at)) &&
			!slices.Contains(c.Addresses, at) {
			c.Addresses = append(c.Addresses, at)
		}
	}
	if len(c.Addresses) == 0 {
		return nil, api.Errorf(api.CodeNoWorkers, "no worker may be chosen: see `indexer workers`")
	}
	mathrand.Shuffle(len(c.Addresses), func(i, j int) {
		c.Addresses[i], c.Addresses[j] = c.Addresses[j], c.Addresses[i]
	})
	c.Addresses = c.Addresses[:min(len(c.Addresses), 1+s.cfg.Fallbacks)]
	return c, nil
}

// address returns the IP:PORT of a serving address. The result is empty without an IP:PORT, and for an address that a
// proxy must not use, such as a cloud's metadata service.
func address(endpoint string) string {
	host := endpoint
	port := "80"
	if scheme, _, isURL := strings.Cut(endpoint, "://"); isURL {
		u, err := url.Parse(endpoint)
		if err != nil {
			return ""
		}
		host = u.Host
		if scheme == "https" {
			port = "443"
		}
	}
	if at, err := netip.ParseAddrPort(host); err == nil && !dial.Never(at.Addr()) {
		return at.String()
	}
	if at, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil && !dial.Never(at) {
		return net.JoinHostPort(at.String(), port)
	}
	return ""
}
