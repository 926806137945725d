package metrics

import (
	"cmp"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Queries counts requests and their outcomes.
type Queries struct {
	duration *prometheus.HistogramVec
	asked    *prometheus.CounterVec
	replied  *prometheus.HistogramVec
	withheld prometheus.Counter // denied under its old name
	denied   prometheus.Counter

	forwarded *prometheus.CounterVec
	missing   *prometheus.CounterVec
	selected  *prometheus.CounterVec
	texts     *prometheus.CounterVec
	textTime  *prometheus.HistogramVec
	checks    *prometheus.CounterVec
	reused    *prometheus.CounterVec
	moved     *prometheus.CounterVec

	disaggregated *prometheus.CounterVec
	prefills      *prometheus.CounterVec
	prefillTime   *prometheus.HistogramVec
	avoided       *prometheus.CounterVec
	avoidedTokens *prometheus.CounterVec
	avoidedTime   *prometheus.CounterVec

	estimated, actual, completion, estimates *prometheus.CounterVec

	fields   *prometheus.CounterVec
	routed   [4]*prometheus.CounterVec // tokens by step; the last two also by tier
	outcomes *prometheus.CounterVec

	tenantRequests, tenantTokens *prometheus.CounterVec // nil: no series of tenants

	ratio *prometheus.HistogramVec

	// Resolved once, because every choice uses all: under the present name, and under the name of v0.4.0 with its
	// stages.
	stages, selection map[string]prometheus.Observer

	models  bounded
	unknown bounded // names of fields that no table has
	tenants bounded
}

// maxModels bounds the models with separate series, because requests may name any model. Further models count as
// "other".
const maxModels = 1000

// maxUnknown bounds the unknown names of fields with separate series, because clients choose the names.
const maxUnknown = 64

// other is the label of values above a bound.
const other = "other"

// bounded accepts a bounded number of values of a label, in order of appearance.
type bounded struct {
	most  int64
	known sync.Map
	n     atomic.Int64
}

func (b *bounded) label(value string) string {
	if _, ok := b.known.Load(value); ok {
		return value
	}
	if b.n.Add(1) > b.most {
		b.n.Add(-1)
		return other
	}
	if _, was := b.known.LoadOrStore(value, true); was {
		b.n.Add(-1)
	}
	return value
}

// Observe counts a request by its outcome, see [api.OutcomeOf].
func (q *Queries) Observe(op, outcome string, took time.Duration) {
	q.duration.WithLabelValues(op, outcome).Observe(took.Seconds())
}

// Asked counts a request to another node by its kind: first, next (after a failure), hedge or forward.
func (q *Queries) Asked(kind string) { q.asked.WithLabelValues(kind).Inc() }

// Replied records the end of a request to another node: "ok", or an error's code.
func (q *Queries) Replied(outcome string, took time.Duration) {
	q.replied.WithLabelValues(outcome).Observe(took.Seconds())
}

// HedgesDenied counts hedges beyond the budget.
func (q *Queries) HedgesDenied(n int) {
	q.denied.Add(float64(n))
	q.withheld.Add(float64(n))
}

// Forwarded counts a forwarded query by its outcome.
func (q *Queries) Forwarded(outcome string) { q.forwarded.WithLabelValues(outcome).Inc() }

// Missing counts partitions without an answer.
func (q *Queries) Missing(op string, n int) { q.missing.WithLabelValues(op).Add(float64(n)) }

// Selected counts a choice of a worker by policy and outcome, see [api.OutcomeOf].
func (q *Queries) Selected(policy, outcome string) { q.selected.WithLabelValues(policy, outcome).Inc() }

// Reused counts prompt tokens that an engine reports as reused.
func (q *Queries) Reused(model string, tokens uint64) {
	q.reused.WithLabelValues(q.models.label(model)).Add(float64(tokens))
}

// Routed counts the tokens of a request's prompt by step of the funnel, and the outcome of its choice, if any. The
// tokens held and selected are counted by tier, from the device on.
func (q *Queries) Routed(model string, asked, seen uint64, held, selected [events.NumTiers]uint64, outcome string) {
	model = q.models.label(model)
	q.routed[0].WithLabelValues(model).Add(float64(asked))
	q.routed[1].WithLabelValues(model).Add(float64(seen))
	for i := range held {
		tier := (events.Device + events.Tier(i)).String()
		q.routed[2].WithLabelValues(model, tier).Add(float64(held[i]))
		q.routed[3].WithLabelValues(model, tier).Add(float64(selected[i]))
	}
	if outcome != "" {
		q.outcomes.WithLabelValues(model, outcome).Inc()
	}
}

// Attributed counts requests and tokens of a tenant; see [tenants.Use].
func (q *Queries) Attributed(tenant string, use *tenants.Use) {
	if tenant = q.tenants.label(tenant); use.Rejected > 0 {
		q.tenantRequests.WithLabelValues(tenant, "rejected").Add(float64(use.Rejected))
	}
	if use.Requests > 0 {
		q.tenantRequests.WithLabelValues(tenant, "recorded").Add(float64(use.Requests))
	}
	for _, n := range [...]struct {
		kind   string
		tokens uint64
	}{{"requested", use.Requested}, {"reused", use.Reused}, {"computed", use.Computed()}, {"unserved", use.Unserved},
		{"rejected", use.RejectedTokens}} {
		if n.tokens > 0 {
			q.tenantTokens.WithLabelValues(tenant, n.kind).Add(float64(n.tokens))
		}
	}
}

// Moved counts a request with an answer from another worker than the chosen one.
func (q *Queries) Moved(model string) { q.moved.WithLabelValues(q.models.label(model)).Inc() }

// Disaggregated counts a choice of a decode and a prefill worker by its outcome, see [api.Disaggregation].
func (q *Queries) Disaggregated(model, outcome string) {
	q.disaggregated.WithLabelValues(q.models.label(model), outcome).Inc()
}

// Prefilled counts a gateway's request to a prefill worker by its outcome, and records its time; 0: not sent.
func (q *Queries) Prefilled(model, outcome string, took time.Duration) {
	model = q.models.label(model)
	q.prefills.WithLabelValues(model, outcome).Inc()
	if took > 0 {
		q.prefillTime.WithLabelValues(model).Observe(took.Seconds())
	}
}

// TokenizationAvoided counts a completion that an engine received as token ids in place of a text. took is the time in
// which this node's tokenizer made the tokens.
func (q *Queries) TokenizationAvoided(model string, tokens int, took time.Duration) {
	model = q.models.label(model)
	q.avoided.WithLabelValues(model).Inc()
	q.avoidedTokens.WithLabelValues(model).Add(float64(tokens))
	q.avoidedTime.WithLabelValues(model).Add(took.Seconds())
}

// PromptCompared counts a request by the estimated and the actual tokens of its prompts, and the tokens of its answers.
// An estimate is off if it differs from the actual number by more than a tenth of that number.
func (q *Queries) PromptCompared(model string, estimated, actual, completion uint64) {
	model = q.models.label(model)
	q.estimated.WithLabelValues(model).Add(float64(estimated))
	q.actual.WithLabelValues(model).Add(float64(actual))
	q.completion.WithLabelValues(model).Add(float64(completion))
	outcome := "close"
	if 10*(max(estimated, actual)-min(estimated, actual)) > actual {
		outcome = "off"
	}
	q.estimates.WithLabelValues(model, outcome).Inc()
}

// Unsupported counts a request that was routed by load because of fields, by API and field.
func (q *Queries) Unsupported(of string, names []string) {
	for _, name := range names {
		if !fields.Known(name) {
			name = q.unknown.label(name)
		}
		q.fields.WithLabelValues(cmp.Or(of, other), name).Inc()
	}
}

// Stage records the duration of a part of a request: one of Stages.
func (q *Queries) Stage(stage string, took time.Duration) {
	if of := q.stages[stage]; of != nil {
		of.Observe(took.Seconds())
	}
}

// SelectionStage records the duration of a part of a choice: hash, match, load, choose or book.
func (q *Queries) SelectionStage(stage string, took time.Duration) {
	if of := q.selection[stage]; of != nil {
		of.Observe(took.Seconds())
	}
	if stage != "match" { // match consists of hash, index, peers and store
		q.Stage(stage, took)
	}
}

// Best records the largest share of a query's blocks that a worker holds.
func (q *Queries) Best(model string, ratio float64) {
	q.ratio.WithLabelValues(q.models.label(model)).Observe(ratio)
}

// Tokenized counts a text for tokenization, by source and outcome.
func (q *Queries) Tokenized(model, from, outcome string, took time.Duration) {
	model = q.models.label(model)
	q.texts.WithLabelValues(model, from, outcome).Inc()
	q.textTime.WithLabelValues(model, from).Observe(took.Seconds())
}

// TextChecked counts a comparison of a request's tokens with its engine's events.
func (q *Queries) TextChecked(model, outcome string) {
	q.checks.WithLabelValues(q.models.label(model), outcome).Inc()
}

// Stages are the measured parts of requests.
var Stages = []string{"tokenize", "hash", "index", "peers", "store", "load", "choose", "book"}

// New returns a handler of /metrics for a node, and the counters of its requests.
func New(cfg Config) (http.Handler, *Queries) {
	registry := prometheus.NewRegistry()
	q := &Queries{
		models: bounded{most: maxModels}, unknown: bounded{most: maxUnknown},
		stages: map[string]prometheus.Observer{}, selection: map[string]prometheus.Observer{},
	}
	m := maker{registry}
	m.peers(q)
	m.texts(q)
	m.choices(q)
	m.gateway(q)
	m.tenantUse(q, cfg.Tenants)
	m.durations(q)
	registry.MustRegister(append(ofProcess(), collector{cfg})...)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), q
}

// usualTimes are the buckets of a request's duration.
var usualTimes = prometheus.ExponentialBuckets(10e-6, 2.5, 14)

// maker makes metrics and registers them.
type maker struct{ registry *prometheus.Registry }

func (m maker) counter(name, help string, labels ...string) *prometheus.CounterVec {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	m.registry.MustRegister(v)
	return v
}

func (m maker) histogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	m.registry.MustRegister(v)
	return v
}

// peers makes the metrics of requests, also those between nodes.
func (m maker) peers(q *Queries) {
	q.duration = m.histogram("kvatlas_request_duration_seconds", "Time from a request's arrival at the node's handler to "+
		"its answer. Operations with the prefix own_ are requests of other nodes.", usualTimes, "operation", "outcome")
	q.asked = m.counter("kvatlas_peer_requests_total", "Requests to other nodes for shares of a query: first, next "+
		"after a failure, hedge beside a slow one, or forward (the receiver finishes the query).", "kind")
	q.replied = m.histogram("kvatlas_peer_reply_duration_seconds", "Time from a request to another node to its reply, by "+
		"outcome. Requests without a reply are not counted.", usualTimes, "outcome")
	q.withheld = m.counter("kvatlas_peer_hedges_withheld_total",
		"Old name of kvatlas_peer_hedges_denied_total, for one release.").WithLabelValues()
	q.denied = m.counter("kvatlas_peer_hedges_denied_total",
		"Due hedged requests denied by the budget.").WithLabelValues()
	q.forwarded = m.counter("kvatlas_forwarded_queries_total", "Queries forwarded to another node, by outcome: "+
		"answered there, or answered here: declined, hedged (slow), given_up (no sign of the answer), unsent. "+
		"redelivered additionally counts answers relayed to the client by this node.", "outcome")
	q.missing = m.counter("kvatlas_answer_missing_partitions_total",
		"Partitions missing in answers because no node answered for them.", "operation")
}

// texts makes the metrics of tokenization.
func (m maker) texts(q *Queries) {
	q.texts = m.counter("kvatlas_tokenize_total", "Prompts and messages for tokenization, by source "+
		"(render, tokenize, engines, local) and outcome: ok, cached, busy, timeout, unavailable, refused, malformed, "+
		"no_source.", "model", "from", "outcome")
	q.textTime = m.histogram("kvatlas_tokenize_seconds", "Time to tokenize a prompt or messages.", usualTimes,
		"model", "from")
	q.checks = m.counter("kvatlas_tokenize_check_total", "Text requests compared with their workers' "+
		"events, by result: match (the same blocks), partial (only the first blocks), mismatch (other blocks), "+
		"unknown (not in the events).", "model", "outcome")
	q.avoided = m.counter("kvatlas_tokenize_avoided_total",
		"Completions through a gateway that the engine received as token ids, without a tokenization in the engine.", "model")
	q.avoidedTokens = m.counter("kvatlas_tokenize_avoided_tokens_total",
		"Prompt tokens of these completions.", "model")
	q.avoidedTime = m.counter("kvatlas_tokenize_avoided_seconds_total",
		"Time in which the tokenizers of --tokenizers made "+
			"the tokens of these completions: an estimate of the time that the engines saved.", "model")
}

// choices makes the metrics of choices.
func (m maker) choices(q *Queries) {
	q.selected = m.counter("kvatlas_selections_total", "Choices of a worker on this node, by policy (other: "+
		"unknown) and outcome: ok, canceled, or an error's code.", "policy", "outcome")
	q.reused = m.counter("kvatlas_route_reused_tokens_total", "Prompt tokens reused according to engines "+
		"(cached_tokens, through a gateway or in a report).", "model")
	q.moved = m.counter("kvatlas_route_moved_total",
		"Requests through a gateway with an answer from another worker than the chosen one.", "model")
	q.disaggregated = m.counter("kvatlas_route_disaggregated_total",
		"Choices of a decode and a prefill worker by outcome: "+
			"prefill (both), short_prompt or prefill_busy (bypass: the decode worker computes the prompt), "+
			"no_prefill_worker or no_decode_worker (one worker answers alone).", "model", "outcome")
	q.routed = [4]*prometheus.CounterVec{
		m.counter("kvatlas_route_asked_tokens_total", "Tokens of queried or routed prompts.", "model"),
		m.counter("kvatlas_route_seen_prefix_tokens_total", "Thereof tokens of prefixes queried or stored "+
			"before, as in an unbounded cache.", "model"),
		m.counter("kvatlas_route_best_cached_tokens_total", "Thereof tokens of the longest prefix held by a worker, "+
			"by tier.", "model", "tier"),
		m.counter("kvatlas_route_selected_cached_tokens_total", "Thereof tokens of the prefix that the chosen worker "+
			"held, by tier.", "model", "tier"),
	}
	q.outcomes = m.counter("kvatlas_route_decisions_total", "Choices of a worker by their use of the index: best (no "+
		"candidate held more), lost_to_load, bypass (a prefill worker held more), "+
		"cold (no worker held blocks), pinned, "+
		"no_index (the answer lacked partitions), "+
		"no_worker.", "model", "outcome")
	q.ratio = m.histogram("kvatlas_find_best_ratio", "Largest share of a query's blocks held by a worker, "+
		"by model. Without choices of workers.", prometheus.LinearBuckets(0, 0.1, 11), "model")
}

// gateway makes the metrics of requests through a gateway.
func (m maker) gateway(q *Queries) {
	q.prefills = m.counter("kvatlas_gateway_prefills_total", "Requests to prefill workers by --gateway-prefill vllm, by "+
		"outcome: transfer or no_transfer (the worker has computed the prompt, and describes a transfer of blocks or not); "+
		"refused, broken, status (5xx) or timeout (failures of the worker); rejected (another status), malformed, "+
		"too_large, busy (no place on this node), denied (--dial-allow), canceled; unsupported (not sent).",
		"model", "outcome")
	q.prefillTime = m.histogram("kvatlas_gateway_prefill_seconds", "Time of these requests, with the wait for a place.",
		prometheus.ExponentialBuckets(1e-3, 2.5, 13), "model")
	q.estimated = m.counter("kvatlas_prompt_tokens_estimated_total", "Prompt tokens counted or estimated before the "+
		"choice, of requests through a gateway whose answer has the engine's number (usage).", "model")
	q.actual = m.counter("kvatlas_prompt_tokens_actual_total", "Prompt tokens according to the engines (usage), of the "+
		"requests in kvatlas_prompt_tokens_estimated_total.", "model")
	q.completion = m.counter("kvatlas_completion_tokens_actual_total",
		"Tokens of answers according to the engines (usage), "+
			"of the requests in kvatlas_prompt_tokens_estimated_total.", "model")
	q.estimates = m.counter("kvatlas_prompt_estimates_total",
		"Requests in kvatlas_prompt_tokens_estimated_total by outcome: "+
			"close (the estimate differs from the actual number by at most 10 %), off.", "model", "outcome")
	q.fields = m.counter("kvatlas_unsupported_fields_total", "Requests routed by load because of a field that determines "+
		"tokens or tenant and is not supported, or is unknown; by API and field. At most 64 unknown names have series.",
		"api", "field")
}

// tenantUse makes the metrics of at most the given number of tenants; 0: none.
func (m maker) tenantUse(q *Queries, most int) {
	if q.tenants.most = int64(most); most > 0 {
		q.tenantRequests = m.counter("kvatlas_tenant_requests_total", "Requests by tenant (empty: none; other: beyond the "+
			"bound) and result: recorded, or rejected by a quota. Only with --metrics-tenants.", "tenant", "result")
		q.tenantTokens = m.counter("kvatlas_tenant_tokens_total", "Prompt tokens by tenant and kind: requested, reused (by "+
			"reports), computed, unserved, rejected. Only with --metrics-tenants.", "tenant", "kind")
	}
}

// durations makes the metrics of the parts of requests.
func (m maker) durations(q *Queries) {
	parts := prometheus.ExponentialBuckets(1e-6, 4, 12)
	stages := m.histogram("kvatlas_request_stage_seconds", "Time of each part of queries and choices on this node: "+
		"tokenize (a text), hash (a prompt's tokens), index (the look-up in this node's index), peers (wait for other "+
		"nodes), store (wait for a shared store), load, choose, book.", parts, "stage")
	for _, stage := range Stages {
		q.stages[stage] = stages.WithLabelValues(stage)
	}
	selection := m.histogram("kvatlas_selection_stage_seconds", "Old form of kvatlas_request_stage_seconds, for one "+
		"release: time of each part of a choice, hash, match (the look-up of all holdings), load, choose, book.",
		prometheus.ExponentialBuckets(1e-6, 4, 10), "stage")
	for _, stage := range []string{"hash", "match", "load", "choose", "book"} {
		q.selection[stage] = selection.WithLabelValues(stage)
	}
}
