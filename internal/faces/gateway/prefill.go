package gateway

import (
	"context"
	"crypto/rand"
	"net/http"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// prefillForm is the way in which a prefill worker gets a request.
type prefillForm int

const (
	formAlone   prefillForm = iota + 1 // no prefill worker: the fleet or the request is not disaggregated
	formSidecar                        // llm-d's sidecar or Envoy's mirror sends the request
	formOwn                            // the gateway sends the request
	formRefused                        // as formAlone, because vLLM cannot transfer the blocks of the request
)

// pair reports whether a request needs two workers.
func (f prefillForm) pair() bool { return f == formSidecar || f == formOwn }

// direct reports whether the gateway sends requests to the prefill workers of the model.
func (f prefillForm) direct() bool { return f == formOwn || f == formRefused }

// form returns the form for a request to a model.
func (s *Service) form(model string, r *fields.Request, body []byte) prefillForm {
	at := s.places(model)
	switch {
	case !r.API.Generates() || !at.decode:
		return formAlone
	case s.transfer == nil || at.bootstrap:
		return formSidecar
	case !r.Transferable(body):
		return formRefused
	}
	return formOwn
}

// enginePaths are the paths of the generating APIs. A gateway's path may differ from the path at the engine.
var enginePaths = map[fields.API]string{fields.Completions: "/v1/completions", fields.Chat: "/v1/chat/completions",
	fields.Responses: "/v1/responses", fields.Messages: "/v1/messages"}

// prefill sends a booked request to its prefill worker, if there is one, and adds the description of the transfer to
// the body. It ends the prefill booking. If the prefill worker does not compute the prompt, the request is booked on
// the decode worker with all its tokens. The client's own description is removed in any case, because it names an
// address to the decode worker. After an error, the request is not booked.
func (s *Service) prefill(
	ctx context.Context, a *Ask, of fields.API, form prefillForm, chosen *api.Selection, c *Choice, b *booking,
) error {
	body := c.body(a)
	withoutTransfer := func() {
		if fields.Get(body, fields.KVTransfer) != nil {
			c.Body = fields.Replace(body, []fields.Member{{Name: fields.KVTransfer}})
		}
	}
	if chosen.Prefill == nil {
		withoutTransfer()
		if form == formRefused {
			s.cfg.Metrics.Prefilled(b.ref.Model, string(PrefillUnsupported), 0)
		}
		return nil
	}
	began := time.Now()
	p := s.transfer.send(ctx, prefillURL(chosen.Prefill.Endpoint, c.Prefiller, of), prefillHeader(a, c),
		fields.Prefill(of, body))
	if p.transfer != nil {
		with := fields.Replace(body, []fields.Member{{Name: fields.KVTransfer, Value: string(p.transfer)}})
		if len(with) > max(maxBody, len(body)) {
			p = part{outcome: PrefillTooLarge}
		} else {
			c.Body = with
		}
	}
	s.cfg.Metrics.Prefilled(b.ref.Model, string(p.outcome), time.Since(began))
	c.Prefiller, c.Source = "", "" // both are for the prefill worker
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), freeing)
	defer cancel()
	_ = s.cfg.Bookings.Free(ending, &api.RequestRef{Model: b.ref.Model, RequestID: api.PrefillID(b.ref.RequestID),
		Result: p.outcome.result()})
	switch {
	case p.outcome == PrefillCanceled:
		b.alive.stop()
		_ = s.cfg.Bookings.Free(ending, &b.ref)
		return context.Cause(ctx)
	case p.outcome.prefilled():
		if p.transfer == nil {
			withoutTransfer()
		}
		if p.reported { // the decode worker counts the transferred blocks too
			s.cfg.Metrics.ReportReused(b.report, p.cached, false)
		}
		b.report = ""
	default:
		withoutTransfer()
		b.alone, b.prefill = true, chosen.ISLTokens
		s.rebook(ctx, b, events.RankKey{Instance: chosen.Worker, Rank: chosen.Rank}, chosen.EffectivePrefillTokens)
	}
	return nil
}

// prefillURL returns the URL of an API at a prefill worker. at is the IP:PORT of the endpoint.
func prefillURL(endpoint, at string, of fields.API) string {
	scheme := "http"
	if strings.HasPrefix(endpoint, "https://") {
		scheme = "https"
	}
	return scheme + "://" + at + enginePaths[of]
}

// prefillHeader returns the headers of a request to a prefill worker. Both workers get one x-request-id: of the client
// or, without one, a new id.
func prefillHeader(a *Ask, c *Choice) http.Header {
	h := a.Header.Clone()
	if h.Get(requestIDHeader) == "" {
		c.RequestID = rand.Text()
		h.Set(requestIDHeader, c.RequestID)
	}
	h.Set(contentTypeHeader, api.JSON)
	for name, value := range map[string]string{dataParallelRank: c.prefillRank, kvCacheSource: c.Source} {
		if value != "" {
			h.Set(name, value)
		}
	}
	return h
}
