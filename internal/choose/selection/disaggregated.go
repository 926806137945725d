package selection

import (
	"context"
	"fmt"
	"slices"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// A disaggregated request has a decode worker and a prefill worker. The decode worker is chosen first, by its load
// alone. The prefill worker is chosen by the cost of the whole request, near the decode worker if a topology domain is
// configured. The decode part is booked under the request's id, the prefill part under [api.PrefillID].

// chooseBoth chooses the workers of a disaggregated request. Without an eligible worker in one of the pools, it chooses
// one worker that answers alone, if the request permits this.
func (s *Service) chooseBoth(ctx context.Context, a *asked, x *scratch) (chosen, error) {
	c, missing, err := s.choosePair(ctx, a, x)
	if err == nil || !a.r.PrefillOptional || api.AsError(err).Code != api.CodeNoWorkers {
		return c, err
	}
	reason := api.AsError(err).Message
	if c, err = s.choose(ctx, a, x); err != nil {
		return c, err
	}
	c.out.Disaggregation = &api.Disaggregation{Outcome: missing, Bypass: true, Reason: reason,
		NetNewTokens: c.out.EffectivePrefillTokens}
	return c, nil
}

// choosePair chooses a decode worker and a prefill worker, or returns the reason that the decode worker computes the
// prompt. With an error, missing is the outcome without a worker of that pool.
func (s *Service) choosePair(ctx context.Context, a *asked, x *scratch) (c chosen, missing string, err error) {
	d := a.selector.Config().Disaggregation
	own, isl, credit, no := x.request, x.request.ISL, 0.0, false
	defer func() { x.request = own }() // for a repeated choice
	track := a.selector.Config().With(&own.Overrides).RouterTrackPrefillTokens
	x.request.Role = routing.Decode
	o := &x.request.Overrides
	o.OverlapScoreCredit, o.AssumeKVReuse, o.TrackPrefillTokens = &credit, &no, &no
	if d.NearRequired() {
		x.request.Near = nearPrefill(d, a.of, &own)
	}
	if c, err = s.choose(ctx, a, x); err != nil {
		return c, api.NoDecodeWorker, pool("decode", err)
	}
	decode := a.of.candidate(&c)
	net := c.out.EffectivePrefillTokens
	why := &api.Disaggregation{Outcome: api.WithPrefill, NetNewTokens: net, Reason: "no bypass is set"}
	c.out.Disaggregation = why
	busy := d.DecodeBusy(decode.Worker, c.out.PotentialDecodeBlocks)
	// bypassed records the reason to use no prefill worker. It returns false if the decode worker is too busy.
	bypassed := func(outcome, reason string) bool {
		why.Reason, why.Bypass = reason, !busy
		if busy {
			why.Reason += fmt.Sprintf("; but the decode worker would have %d of %d blocks, above %v of them",
				c.out.PotentialDecodeBlocks, decode.Worker.TotalKVBlocks, *d.DecodeBusyThreshold)
			return false
		}
		if why.Outcome = outcome; track {
			c.out.TrackPrefillTokens, c.booking.PrefillTokens = true, int64(net)
		}
		return true
	}
	if d.Short(net, isl) && bypassed(api.ShortPrompt, d.WhyShort(net, isl)) {
		return c, "", nil
	}
	x.request = own
	x.request.Role, x.request.Pin, x.request.Affinity, x.request.AffinityBy = routing.Prefill, nil, nil, ""
	if near := d.Near(decode); near != "" && d.NearRequired() {
		x.request.RequiredTaints = append(slices.Clip(own.RequiredTaints), near)
	} else if near != "" {
		x.request.PreferredTaints = append(slices.Clip(own.PreferredTaints),
			routing.TaintWeight{Taint: near, Weight: d.NearWeight()})
	}
	p, err := s.choose(ctx, a, x)
	if err != nil {
		full := d.ByLoad() && api.AsError(err).Code == api.CodeOverloaded
		if full && bypassed(api.PrefillBusy, "all eligible prefill workers are overloaded") {
			return c, "", nil
		}
		return p, api.NoPrefillWorker, pool("prefill", err)
	}
	prefill := a.of.candidate(&p)
	if active := x.list[a.of.at[p.booking.Rank]].ActivePrefillTokens; d.ByLoad() {
		if d.PrefillBusy(prefill.Worker, active) {
			if bypassed(api.PrefillBusy, fmt.Sprintf("the prefill worker %s has %d tokens to compute, above %v of %d",
				p.out.Worker, active, *d.PrefillBusyThreshold, prefill.Worker.PrefillCapacity())) {
				return c, "", nil
			}
		} else if why.Reason = fmt.Sprintf("the prefill worker is not busy, with %d tokens", active); !d.Short(net, isl) &&
			d.Bypass == routing.BypassISLOrLoad {
			why.Reason += "; " + d.WhyShort(net, isl)
		}
	} else if d != nil && d.Bypass != routing.BypassNever && !d.Short(net, isl) {
		why.Reason = d.WhyShort(net, isl)
	}
	c.out.Prefill, c.prefill = p.out, p.booking
	c.out.KVSource = nil // the prefill worker computes the prompt
	c.prefill.ID = api.PrefillID(a.r.RequestID)
	return c, "", nil
}

// candidate returns the chosen rank, independent of the request.
func (of *candidates) candidate(c *chosen) *routing.Candidate { return &of.list[of.at[c.booking.Rank]] }

// pool adds the name of the pool to the error of a choice.
func pool(name string, err error) error {
	e := *api.AsError(err)
	e.Message = name + " worker: " + e.Message
	return &e
}

// nearPrefill returns the taints of eligible prefill workers.
func nearPrefill(d *routing.Disaggregation, of *candidates, r *routing.Request) []string {
	near := []string{}
	for i := range of.list {
		c := &of.list[i]
		w := c.Worker
		if w.Role != routing.Prefill || w.State != routing.Schedulable || r.Allowed != nil &&
			!slices.Contains(r.Allowed, w.ID) || slices.Contains(r.Excluded, w.ID) ||
			r.Endpoints != nil && !slices.Contains(r.Endpoints, w.Endpoint) {
			continue
		}
		lacks := func(taint string) bool { return !slices.Contains(w.Taints, taint) }
		if t := d.Near(c); t != "" && !slices.Contains(near, t) && !slices.ContainsFunc(r.RequiredTaints, lacks) {
			near = append(near, t)
		}
	}
	return near
}

// busyOrNot sets the results of the thresholds for the chosen worker, and its load in an advisory choice.
func busyOrNot(a *asked, c *routing.Candidate, out *api.Selection) {
	d := a.selector.Config().Disaggregation
	if d != nil && d.DecodeBusyThreshold != nil {
		busy := d.DecodeBusy(c.Worker, out.PotentialDecodeBlocks)
		out.DecodeBusy = &busy
	}
	if !a.r.Advisory {
		return
	}
	out.WorkerLoad = &api.WorkerLoad{ActivePrefillTokens: c.ActivePrefillTokens,
		PrefillTokenCapacity: c.Worker.PrefillCapacity(), TotalKVBlocks: c.Worker.TotalKVBlocks}
	if d != nil && d.PrefillBusyThreshold != nil {
		busy := d.PrefillBusy(c.Worker, c.ActivePrefillTokens)
		out.WorkerLoad.PrefillBusy = &busy
	}
}

// book books both parts of a choice and binds the session, or changes nothing. The prefill part is booked first, so
// that a node with the other part has it too.
func (s *Service) book(ctx context.Context, model string, c *chosen) error {
	if c.prefill.ID != "" {
		if err := s.cfg.Loads.Book(ctx, table(model), c.prefill); err != nil {
			return notBooked(err)
		}
	}
	err := notBooked(s.cfg.Loads.Book(ctx, table(model), c.booking))
	if err == nil && c.session != "" && s.cfg.Sessions != nil {
		if err = s.bind(model, c); err != nil {
			_ = s.cfg.Loads.Free(context.WithoutCancel(ctx), table(model), c.booking.ID)
		}
	} else if err == nil && s.byPrompt(c.session) {
		s.bindPrompt(model, c)
	}
	if err != nil && c.prefill.ID != "" {
		_ = s.cfg.Loads.Free(context.WithoutCancel(ctx), table(model), c.prefill.ID)
	}
	return err
}

// freePrefill ends the part of a request on a prefill worker, if there is one.
func (s *Service) freePrefill(ctx context.Context, r *api.RequestRef) {
	if id := api.PrefillID(r.RequestID); s.has(r.Model, id) {
		_ = s.cfg.Loads.Free(context.WithoutCancel(ctx), table(r.Model), id)
	}
}

// has reports whether an id of a model is taken.
func (s *Service) has(model, id string) (has bool) {
	s.cfg.Loads.Read(table(model), func(t *load.Table) { has = t.Has(id) })
	return has
}
