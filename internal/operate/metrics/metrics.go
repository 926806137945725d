// Package metrics shows a node's status to Prometheus. Names follow its conventions: base units, _total for what only
// grows, and labels of bounded number (partitions, models, outcomes), never hashes, and workers only if that was asked
// for, and as many as were asked for.
//
// A scrape reads what others have published; it makes nobody wait who applies events or answers queries.
package metrics

//go:generate go test . -run TestPage -update

import (
	"cmp"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Figures are what a scrape shows of a node. Where two entries of a list have the same names they are added up.
type Figures struct {
	Status *api.Status

	Events []EventCount // applied to the index
	Ages   Histogram    // of messages when they were applied, in seconds
	Loads  []WorkerLoad // of each rank that has requests, and one without a worker for each model

	Spans map[string]uint64 // of traces, by what became of them; nil: none are sent
}

// EventCount counts events of one class.
type EventCount struct {
	Source, Event, Tier string
	Count               uint64
}

// WorkerLoad is a rank's load for one model.
type WorkerLoad struct {
	Model, Worker         string
	Requests              int
	PrefillTokens, Blocks int64
}

// Histogram is a count of values by their upper bounds.
type Histogram struct {
	Buckets map[float64]uint64 // by upper bound, smaller ones included
	Count   uint64
	Sum     float64
}

// Config says what is shown.
type Config struct {
	Figures func() *Figures // any goroutine calls it, at each scrape

	// Workers is how many workers have series of their own, the first by name; the others are added up under the name
	// "other". 0: no worker has.
	Workers int
}

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
	routed    [4]*prometheus.CounterVec // tokens by step; of the last two by tier too
	outcomes  *prometheus.CounterVec

	ratio *prometheus.HistogramVec

	// looked up once, since each choice has them all: under today's name, and under that of v0.4.0 with its stages
	stages, selection map[string]prometheus.Observer

	models bounded
}

// maxModels bounds the models that have series of their own: requests may name any. Others count as "other".
const maxModels = 1000

// other is the label of what is beyond a bound.
const other = "other"

// bounded lets so many values of a label through, the first that come.
type bounded struct {
	known sync.Map
	n     atomic.Int64
}

func (b *bounded) label(value string) string {
	if _, ok := b.known.Load(value); ok {
		return value
	}
	if b.n.Add(1) > maxModels {
		b.n.Add(-1)
		return other
	}
	if _, was := b.known.LoadOrStore(value, true); was {
		b.n.Add(-1)
	}
	return value
}

// Observe counts one request by its outcome, as [api.OutcomeOf] has it.
func (q *Queries) Observe(op, outcome string, took time.Duration) {
	q.duration.WithLabelValues(op, outcome).Observe(took.Seconds())
}

// Asked counts a request to another node by its kind: first, next (after a failure), hedge or forward.
func (q *Queries) Asked(kind string) { q.asked.WithLabelValues(kind).Inc() }

// Replied counts the end of a request to another node: "ok", or an error's code.
func (q *Queries) Replied(outcome string, took time.Duration) {
	q.replied.WithLabelValues(outcome).Observe(took.Seconds())
}

// HedgesDenied counts hedges that were beyond the budget.
func (q *Queries) HedgesDenied(n int) {
	q.denied.Add(float64(n))
	q.withheld.Add(float64(n))
}

// Forwarded counts a query that was forwarded by what became of it.
func (q *Queries) Forwarded(outcome string) { q.forwarded.WithLabelValues(outcome).Inc() }

// Missing counts partitions that an answer lacks.
func (q *Queries) Missing(op string, n int) { q.missing.WithLabelValues(op).Add(float64(n)) }

// Selected counts a choice of a worker by its policy and outcome, as [api.OutcomeOf] has it.
func (q *Queries) Selected(policy, outcome string) { q.selected.WithLabelValues(policy, outcome).Inc() }

// Reused counts tokens of prompts that an engine says it has reused.
func (q *Queries) Reused(model string, tokens uint64) {
	q.reused.WithLabelValues(q.models.label(model)).Add(float64(tokens))
}

// Routed counts the tokens of a request's prompt by step of the funnel, those held and selected by tier from the device
// on, and the outcome of its choice, if it had one.
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

// Moved counts a request that another worker than the chosen one has answered.
func (q *Queries) Moved(model string) { q.moved.WithLabelValues(q.models.label(model)).Inc() }

// Stage observes how long a part of a request took: one of Stages.
func (q *Queries) Stage(stage string, took time.Duration) {
	if of := q.stages[stage]; of != nil {
		of.Observe(took.Seconds())
	}
}

// SelectionStage observes how long a part of a choice took: hash, match, load, choose or book.
func (q *Queries) SelectionStage(stage string, took time.Duration) {
	if of := q.selection[stage]; of != nil {
		of.Observe(took.Seconds())
	}
	if stage != "match" { // which has hash, index, peers and store
		q.Stage(stage, took)
	}
}

// Best observes which share of a query's blocks the worker holds that holds most.
func (q *Queries) Best(model string, ratio float64) {
	q.ratio.WithLabelValues(q.models.label(model)).Observe(ratio)
}

// Tokenized counts a text of which tokens were to be made, by its source and outcome.
func (q *Queries) Tokenized(model, from, outcome string, took time.Duration) {
	model = q.models.label(model)
	q.texts.WithLabelValues(model, from, outcome).Inc()
	q.textTime.WithLabelValues(model, from).Observe(took.Seconds())
}

// TextChecked counts a request whose tokens were compared with what its engine has announced.
func (q *Queries) TextChecked(model, outcome string) {
	q.checks.WithLabelValues(q.models.label(model), outcome).Inc()
}

// Stages are the parts of requests of which the time is measured.
var Stages = []string{"tokenize", "hash", "index", "peers", "store", "load", "choose", "book"}

// New returns a handler of /metrics for a node, and what counts its requests.
func New(cfg Config) (http.Handler, *Queries) {
	registry := prometheus.NewRegistry()
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		registry.MustRegister(v)
		return v
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
		registry.MustRegister(v)
		return v
	}
	usual := prometheus.ExponentialBuckets(10e-6, 2.5, 14)
	q := &Queries{
		duration: histogram("kvatlas_request_duration_seconds", "Time from a request's arrival at the node's handler to "+
			"its answer. Operations with the prefix own_ are requests of other nodes.", usual, "operation", "outcome"),
		asked: counter("kvatlas_peer_requests_total", "Requests to other nodes for their shares of a query: first, next "+
			"after a failure, hedge beside a slow one, or forward, with which the other node finishes the query.", "kind"),
		replied: histogram("kvatlas_peer_reply_duration_seconds", "Time from a request to another node to its reply, by "+
			"what it is. Requests without a reply are not counted.", usual, "outcome"),
		withheld: counter("kvatlas_peer_hedges_withheld_total",
			"Old name of kvatlas_peer_hedges_denied_total, for one release.").WithLabelValues(),
		denied: counter("kvatlas_peer_hedges_denied_total",
			"Hedged requests that were due and denied by the budget.").WithLabelValues(),
		forwarded: counter("kvatlas_forwarded_queries_total", "Queries that were forwarded to another node, by what became "+
			"of them: answered by it, or by this node as it declined, was hedged, given up, or not reached (unsent). "+
			"redelivered counts, beside these, answers that reached their client through this node only.", "outcome"),
		missing: counter("kvatlas_answer_missing_partitions_total",
			"Partitions that answers lack, as no node answered for them.", "operation"),
		selected: counter("kvatlas_selections_total", "Choices of a worker on this node, by policy (other: it is not "+
			"known) and outcome: ok, canceled, or an error's code.", "policy", "outcome"),
		texts: counter("kvatlas_tokenize_total", "Prompts and messages of which tokens were to be made, by source "+
			"(render, tokenize, engines, local) and outcome: ok, cached, busy, timeout, unavailable, refused, malformed, "+
			"no_source.", "model", "from", "outcome"),
		textTime: histogram("kvatlas_tokenize_seconds", "Time to make tokens of a prompt or of messages.", usual,
			"model", "from"),
		checks: counter("kvatlas_tokenize_check_total", "Requests that came as text and were followed, by what their "+
			"workers announced: match (the blocks of their tokens), partial (the first of them only), mismatch (others), "+
			"unknown (their events do not say).", "model", "outcome"),
		reused: counter("kvatlas_route_reused_tokens_total", "Tokens of prompts that engines say they have reused "+
			"(cached_tokens, through a gateway or in a report).", "model"),
		moved: counter("kvatlas_route_moved_total",
			"Requests through a gateway that another worker than the chosen one has answered.", "model"),
		routed: [4]*prometheus.CounterVec{
			counter("kvatlas_route_asked_tokens_total", "Tokens of prompts that were asked for or routed.", "model"),
			counter("kvatlas_route_seen_prefix_tokens_total", "Of these, tokens of prefixes that were asked for or stored "+
				"before: what an unbounded cache would have.", "model"),
			counter("kvatlas_route_best_cached_tokens_total", "Of these, tokens of the longest prefix that some worker held, "+
				"by the tier in which it held them.", "model", "tier"),
			counter("kvatlas_route_selected_cached_tokens_total", "Of these, tokens of the prefix that the chosen worker "+
				"held, by tier.", "model", "tier"),
		},
		outcomes: counter("kvatlas_route_decisions_total", "Choices of a worker by what they made of the index: best (no "+
			"candidate held more), lost_to_load, cold (nobody held any), pinned, no_index (the answer lacked partitions), "+
			"no_worker.", "model", "outcome"),
		ratio: histogram("kvatlas_find_best_ratio", "Share of a query's blocks that the worker holds that holds most, "+
			"by model. Choices of workers are not in it.", prometheus.LinearBuckets(0, 0.1, 11), "model"),
		stages: map[string]prometheus.Observer{}, selection: map[string]prometheus.Observer{},
	}
	parts := prometheus.ExponentialBuckets(1e-6, 4, 12)
	stages := histogram("kvatlas_request_stage_seconds", "Time of each part of queries and choices on this node: "+
		"tokenize (a text), hash (a prompt's tokens), index (the look-up in this node's index), peers (until other "+
		"nodes have answered), store (what a shared store is waited for), load, choose, book.", parts, "stage")
	for _, stage := range Stages {
		q.stages[stage] = stages.WithLabelValues(stage)
	}
	selection := histogram("kvatlas_selection_stage_seconds", "Old form of kvatlas_request_stage_seconds, for one "+
		"release: time of each part of a choice, hash, match (all that finds out who holds what), load, choose, book.",
		prometheus.ExponentialBuckets(1e-6, 4, 10), "stage")
	for _, stage := range []string{"hash", "match", "load", "choose", "book"} {
		q.selection[stage] = selection.WithLabelValues(stage)
	}
	registry.MustRegister(append(ofProcess(), collector{cfg})...)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), q
}

// ofProcess collects what Go and the system say of this process, with what lived through the last garbage collection:
// go_gc_heap_live_bytes, in which a leak shows long before resident memory does.
func ofProcess() []prometheus.Collector {
	live := collectors.GoRuntimeMetricsRule{Matcher: regexp.MustCompile(`^/gc/heap/live:bytes$`)}
	return []prometheus.Collector{
		collectors.NewGoCollector(collectors.WithGoCollectorRuntimeMetrics(live)),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	}
}

// collector reads the figures at each scrape.
type collector struct{ Config }

// Describe names no metrics: each is described where it is told.
func (collector) Describe(chan<- *prometheus.Desc) {}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	to := newEmitter()
	f := c.Figures()
	to.node(f.Status)
	to.stores(f.Status.L3)
	to.routing(f.Status)
	for i := range f.Status.Partitions {
		to.partition(&f.Status.Partitions[i])
	}
	to.applied(f)
	to.loads(f.Loads, c.Workers)
	to.spans(f.Spans)
	to.send(ch)
}

// emitter gathers the values of one scrape.
type emitter struct {
	metrics map[string]*metric // by name
}

func newEmitter() emitter { return emitter{map[string]*metric{}} }

// metric is all of one name.
type metric struct {
	desc   *prometheus.Desc
	kind   prometheus.ValueType
	max    bool // of values with the same labels the greatest counts; else their sum
	series map[string]*series

	histogram *Histogram
}

type series struct {
	labels []string // their values
	value  float64
}

// put tells one value of a metric. labels are names and values in turn.
func (to emitter) put(kind prometheus.ValueType, name, help string, v float64, labels []string) *metric {
	var names, values []string
	for pair := range slices.Chunk(labels, 2) {
		names, values = append(names, pair[0]), append(values, strings.ToValidUTF8(pair[1], "\ufffd"))
	}
	m := to.metrics[name]
	if m == nil {
		m = &metric{desc: prometheus.NewDesc(name, help, names, nil), kind: kind, series: map[string]*series{}}
		to.metrics[name] = m
	}
	key := strings.Join(values, "\xff") // which no UTF-8 has
	x := m.series[key]
	if x == nil {
		x = &series{labels: values}
		m.series[key] = x
	}
	if m.max {
		x.value = max(x.value, v)
	} else {
		x.value += v
	}
	return m
}

// send hands on all that was told.
func (to emitter) send(ch chan<- prometheus.Metric) {
	for _, m := range to.metrics {
		if h := m.histogram; h != nil {
			ch <- prometheus.MustNewConstHistogram(m.desc, h.Count, h.Sum, h.Buckets)
			continue
		}
		for _, x := range m.series {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, x.value, x.labels...)
		}
	}
}

// applied tells of what was applied to the index.
func (to emitter) applied(f *Figures) {
	for _, e := range f.Events {
		to.count("kvatlas_events_total",
			"Events of engines that were applied to the index, by source (how the engine speaks, as its shim says; "+
				"unknown: the shim has not said yet), event (stored, removed, cleared) and tier (all: of a cleared "+
				"event).", e.Count, "source", e.Source, "event", e.Event, "tier", e.Tier)
	}
	const age = "kvatlas_event_age_seconds"
	to.metrics[age] = &metric{histogram: &f.Ages, desc: prometheus.NewDesc(age,
		"Time from when the log took a message, by the NATS server's clock, to when it was applied, by this host's; "+
			"of partitions that served.", nil, nil)}
}

// spans tells of traces, if they are sent.
func (to emitter) spans(counts map[string]uint64) {
	to.counts("kvatlas_trace_spans_total", "Spans of traces by what became of them: sent, failed (the collector did not "+
		"take them) or dropped (too many waited). Absent without --otlp-endpoint.", "outcome", counts)
}

// loads tells of requests under way, by model, and of as many workers as are wanted.
func (to emitter) loads(list []WorkerLoad, workers int) {
	var shown []string
	for _, l := range list {
		if l.Worker != "" {
			shown = append(shown, l.Worker)
		}
	}
	slices.Sort(shown)
	shown = slices.Compact(shown)
	shown = shown[:min(len(shown), workers)]
	for i := range list {
		l := &list[i]
		worker := other
		if _, is := slices.BinarySearch(shown, l.Worker); is {
			worker = l.Worker
		}
		for _, x := range []struct {
			name, what string
			value      float64
		}{
			{"requests", "Requests that are booked and have not ended", float64(l.Requests)},
			{"prefill_tokens", "Tokens that booked requests have still to prefill", float64(l.PrefillTokens)},
			{"decode_blocks", "Blocks of booked requests, shared ones counted once for each rank", float64(l.Blocks)},
		} {
			to.gauge("kvatlas_load_"+x.name, x.what+", by model (MODEL:GROUP of a routing group). The same at each node.",
				x.value, "model", l.Model)
			to.most("kvatlas_load_"+x.name+"_max", x.what+": of the rank that has most, by model. The same at each node.",
				x.value, "model", l.Model)
			if workers > 0 && l.Worker != "" {
				to.gauge("kvatlas_worker_load_"+x.name, x.what+", by model and worker; only with --metrics-workers, as "+
					"many workers as it says, the rest as other.", x.value, "model", l.Model, "worker", worker)
			}
		}
	}
}

func (to emitter) gauge(name, help string, v float64, labels ...string) {
	to.put(prometheus.GaugeValue, name, help, v, labels)
}

// most tells a gauge of which the greatest value counts.
func (to emitter) most(name, help string, v float64, labels ...string) {
	if to.metrics[name] == nil {
		to.put(prometheus.GaugeValue, name, help, 0, labels).max = true
	}
	to.gauge(name, help, v, labels...)
}

func (to emitter) count(name, help string, n uint64, labels ...string) {
	to.put(prometheus.CounterValue, name, help, float64(n), labels)
}

func (to emitter) yes(name, help string, is bool, labels ...string) {
	v := 0.0
	if is {
		v = 1
	}
	to.gauge(name, help, v, labels...)
}

// gauges and counts tell a metric by the values of one label.
func (to emitter) gauges(name, help, by string, values map[string]uint64) {
	for label, n := range values {
		to.gauge(name, help, float64(n), by, label)
	}
}

func (to emitter) counts(name, help, by string, values map[string]uint64, labels ...string) {
	for label, n := range values {
		to.count(name, help, n, append([]string{by, label}, labels...)...)
	}
}

func (to emitter) node(s *api.Status) {
	to.yes("kvatlas_ready", "1 once every partition is restored and caught up.", s.Ready)
	to.counts("kvatlas_log_outcomes_total",
		"What became of the log's messages, events and blocks since the process started, by outcome.",
		"outcome", s.Events)
	to.count("kvatlas_log_rereads_total",
		"How often messages were missing between a partition's log and the index, and the log was read again.",
		s.Rereads)
	to.counts("kvatlas_resync_total",
		"Resync requests to shims: asked, answered, and partitions whose resync is complete (ended).", "what",
		map[string]uint64{"asked": s.Resyncs.Asked, "answered": s.Resyncs.Answered, "ended": s.Resyncs.Ended})
	to.count("kvatlas_snapshot_written_total", "Snapshots written since the process started.", s.Snapshots.Written)
	to.count("kvatlas_snapshot_failed_total",
		"Snapshots that could not be written; they are retried.", s.Snapshots.Failed)
	to.counts("kvatlas_snapshot_rejected_total",
		"Snapshots that could not be restored, by reason.", "reason", s.Snapshots.Rejected)
	to.gauge("kvatlas_snapshot_bucket_bytes",
		"Size of the bucket with the snapshots.", float64(s.SnapshotBucket.Bytes))
	if limit := s.SnapshotBucket.Limit; limit > 0 {
		to.gauge("kvatlas_snapshot_bucket_limit_bytes",
			"Size beyond which the bucket rejects snapshots; absent without a limit.", float64(limit))
	}
	to.yes("kvatlas_snapshot_bucket_writable",
		"0 if the bucket rejects snapshots, as on a full disk.", s.SnapshotBucket.Refused == "")
	to.gauge("kvatlas_store_bytes",
		"Size of all streams and buckets of the account on the NATS servers.", float64(s.Store.Bytes))
	if limit := s.Store.Limit; limit > 0 {
		to.gauge("kvatlas_store_limit_bytes",
			"Size beyond which the NATS servers reject writes; absent if not known.", float64(limit))
	}
	to.gauge("kvatlas_problems", "Number of problems in the node's status.", float64(len(s.Problems)))
	for _, r := range s.Requests {
		to.count("kvatlas_requests_total",
			"Requests by transport (nats, http, grpc; node: from other nodes), operation and outcome: ok, an "+
				"error's code, canceled (by the caller), expired or unsent.", r.Count,
			"transport", string(r.Transport), "operation", r.Operation, "outcome", r.Outcome)
	}
	if c := s.Cluster; c != nil {
		to.gauge("kvatlas_cluster_nodes",
			"Nodes that share the namespace, as this one sees it.", float64(len(c.Nodes)))
		to.gauges("kvatlas_cluster_partitions",
			"Partitions with fewer ready nodes than configured (short), and with none that serves them "+
				"(unserved).", "state",
			map[string]uint64{"short": uint64(len(c.Short)), "unserved": uint64(len(c.Unserved))})
	}
	if e := s.Engines; e != nil {
		to.gauges("kvatlas_engines",
			"Registered ranks by the state of their engines: connected, silent, gone, asleep, remote, unknown. The "+
				"same at each node.", "state",
			map[string]uint64{string(api.EngineConnected): uint64(e.Connected), string(api.EngineSilent): uint64(e.Silent),
				string(api.EngineGone): uint64(e.Gone), string(api.EngineAsleep): uint64(e.Asleep),
				string(api.EngineRemote): uint64(e.Remote), "unknown": uint64(e.Unknown)})
		to.gauge("kvatlas_shims_catching_up",
			"Registered ranks whose shims are still replaying their engines' backlog. The same at each node.",
			float64(e.CatchingUp))
		to.gauge("kvatlas_registrations_skipped",
			"Registered ranks of which an address or a folder is not used: the node's status names them.",
			float64(e.Skipped))
	}
	to.count("kvatlas_dials_denied_total",
		"Connections to registered addresses that --dial-allow does not permit, since the process started.", s.DialsDenied)
	held := s.Index.Blocks
	to.gauges("kvatlas_index_blocks", "Blocks held, counted for each rank that holds them, by tier.", "tier",
		map[string]uint64{"device": held.Device, "host": held.Host, "disk": held.Disk, "external": held.External})
	to.gauge("kvatlas_index_distinct_blocks",
		"Distinct blocks that at least one rank holds.", float64(s.Index.Distinct))
	to.gauge("kvatlas_index_bytes", "Memory of the index.", float64(s.Index.Bytes))
	to.gauge("kvatlas_decoder_bytes",
		"Memory for decoding messages of the log; bounded.", float64(s.Index.DecoderBytes))
	for _, m := range s.Models {
		to.gauge("kvatlas_model_ranks", "Ranks that the log knows, by model and block size.", float64(m.Ranks),
			"model", m.Model, "block_size", strconv.FormatUint(uint64(m.BlockSize), 10))
	}
}

// routing tells of requests that were booked here, or wait, and what follows from them.
func (to emitter) routing(s *api.Status) {
	if s.Load != nil {
		to.count("kvatlas_bookings_healed_total",
			"Requests that this node ended late, when it heard from another that they had ended.", s.Load.Healed)
		for _, m := range s.Load.Models {
			name := m.Model
			if m.Group != "" {
				name += ":" + m.Group
			}
			to.gauge("kvatlas_requests_under_way",
				"Old name of kvatlas_load_requests, for one release.", float64(m.Requests), "model", name)
			to.counts("kvatlas_bookings_total",
				"Bookings asked of this node, by model and outcome: ok, conflict (the id is under way), full (too "+
					"much is under way: also for an output block).", "outcome",
				map[string]uint64{"ok": m.Booked, "conflict": m.Conflicts, "full": m.Full}, "model", name)
			to.counts("kvatlas_bookings_ended_total",
				"Bookings that have ended, by model and why: freed (by a request to this node); on each node: "+
					"expired (by their age), rival (another node had booked their id too), gone (with their rank).",
				"why",
				map[string]uint64{"freed": m.Freed, "expired": m.Expired, "rival": m.Rivals, "gone": m.Gone}, "model", name)
		}
	}
	for _, g := range s.Guesses {
		to.gauge("kvatlas_guessed_blocks",
			"Blocks that ranks are guessed to hold, as requests were sent to them, by model.",
			float64(g.Blocks), "model", g.Model)
		to.counts("kvatlas_guessed_blocks_dropped_total",
			"Blocks that ranks are no longer guessed to hold, by reason: expired, evicted (lru), pruned (too "+
				"many), refuted (by events), removed (with the rank).", "reason", g.Dropped, "model", g.Model)
	}
	for _, w := range s.Waiting {
		to.gauge("kvatlas_queue_requests",
			"Requests that wait on this node for a worker that is not busy, by model.",
			float64(w.Requests), "model", w.Model)
		to.gauge("kvatlas_queue_tokens",
			"Tokens of the prompts of requests that wait, by model.", float64(w.Tokens), "model", w.Model)
	}
	if x := s.Sessions; x != nil {
		to.gauge("kvatlas_sessions",
			"Sessions that are bound to a worker. The same at each node.", float64(x.Sessions))
		to.counts("kvatlas_session_bindings_total",
			"Bookings of a session on this node, by what became of its binding: made, kept, moved, refused (the "+
				"worker is another's), full (too many sessions), unclear (prompts without an id that end with the same "+
				"block); and bindings that expired.",
			"outcome", map[string]uint64{"made": x.Made, "kept": x.Kept, "moved": x.Moved, "refused": x.Refused,
				"full": x.Full, "unclear": x.Unclear, "expired": x.Expired})
		to.gauge("kvatlas_session_prompts",
			"Prompts without a session id whose next one is awaited at a worker. The same at each node.", float64(x.Prompts))
		to.count("kvatlas_session_prompts_continued_total",
			"Bookings on this node without a session id whose prompt continued a session.", x.Continued)
	}
	if x := s.EngineReports; x != nil {
		to.counts("kvatlas_engine_reports_total",
			"Reports of how full engines are, by what became of them: taken, late (too old), refused (of too many "+
				"ranks), malformed.", "outcome", map[string]uint64{"taken": x.Taken,
				"late": x.Late, "refused": x.Refused, "malformed": x.Malformed})
	}
	if x := s.RouterRequests; x != nil {
		to.gauge("kvatlas_router_requests",
			"Requests under way that routers of another make sent to workers.", float64(x.Requests))
		to.counts("kvatlas_router_request_changes_total",
			"Changes of such requests, by result: added, prefilled, freed, expired (never freed), own (booked with "+
				"kvatlas too), duplicate, unknown (not added before), refused (beyond --max-requests).", "outcome",
			map[string]uint64{"added": x.Added, "prefilled": x.Prefilled, "freed": x.Freed, "expired": x.Expired,
				"own": x.Own, "duplicate": x.Duplicate, "unknown": x.Unknown, "refused": x.Refused})
	}
}

// stores tells of stores that workers share.
func (to emitter) stores(list []api.StoreStatus) {
	for where, x := range byStore(list) {
		to.yes("kvatlas_l3_up",
			"0 while a store that workers share is known to be down, and is not asked.", x.Down == "", "store", where)
		to.counts("kvatlas_l3_questions_total",
			"Requests to a store that workers share, by outcome: ok, failed, or busy (not sent: too many in "+
				"flight).", "outcome", map[string]uint64{
				"ok": x.Questions - min(x.Failed, x.Questions), "failed": x.Failed, "busy": x.Busy}, "store", where)
		to.count("kvatlas_l3_partial_answers_total",
			"Answers to queries that lacked something of what a store that workers share was asked for.", x.Partial,
			"store", where)
		to.count("kvatlas_l3_forgotten_total",
			"How often the cache of a store's answers was cleared, as the store may have been replaced.",
			x.Forgotten, "store", where)
		to.gauge("kvatlas_l3_remembered_runs",
			"Runs of 16 or 64 blocks whose answer from a store is cached.", float64(x.Remembered), "store", where)
		to.count("kvatlas_l3_strange_objects_total",
			"Objects in a store's answers that were not asked about.", x.Strange, "store", where)
		if e := x.Election; e != nil {
			to.count("kvatlas_l3_leaders_total",
				"Leaders of a store's masters that were found in etcd; absent for a store with one master.", e.Changes, "store",
				where)
			to.count("kvatlas_l3_election_failures_total",
				"Errors of etcd, and its answers without a usable leader of a store's masters.", e.Failures, "store", where)
		}
		if set := x.Set; set != nil {
			to.gauge("kvatlas_l3_set_objects",
				"Objects in the set made from a store's events; absent without events.",
				float64(set.Objects), "store", where)
			to.yes("kvatlas_l3_set_whole", "1 while the set has all objects of the store.", set.Whole, "store", where)
			to.counts("kvatlas_l3_set_given_up_total",
				"How often the set was discarded: for a gap in the events, or for its size.", "reason",
				map[string]uint64{"gap": set.Gaps, "size": set.Overflows}, "store", where)
			to.counts("kvatlas_l3_objects_total", "Objects looked up in the set, or asked of the store.", "from",
				map[string]uint64{"set": set.Answered, "store": set.Asked}, "store", where)
		}
	}
}

func (to emitter) partition(p *api.PartitionDetail) {
	of := []string{"partition", strconv.FormatUint(uint64(p.Partition), 10)}
	to.gauge("kvatlas_log_lag_messages",
		"Messages of a partition's log that are not applied yet.", float64(p.Lag), of...)
	to.gauge("kvatlas_log_applied_sequence",
		"Last message of a partition's log that is applied.", float64(p.Seq), of...)
	to.yes("kvatlas_partition_behind",
		"1 if a partition has been behind its log for more than five seconds.", p.Behind, of...)
	to.yes("kvatlas_partition_serving",
		"1 if a partition is caught up and needs no resync.", p.State == api.PartitionServing, of...)
	to.yes("kvatlas_partition_resync_needed",
		"1 if a partition's log does not have all that its ranks hold.", p.ResyncNeeded, of...)
	to.gauge("kvatlas_partition_stale_seconds",
		"Time since a partition's log was last known to be read to its end and to accept messages; 0 up to three "+
			"seconds.", float64(p.StaleMS)/1000, of...)
	to.gauge("kvatlas_log_bytes", "Size of a partition's log.", float64(p.Log.Bytes), of...)
	if p.Log.Limit > 0 {
		to.gauge("kvatlas_log_limit_bytes",
			"Size beyond which the oldest messages of a partition's log are removed.", float64(p.Log.Limit), of...)
	}
	to.yes("kvatlas_log_writable",
		"0 if a partition's log rejects messages, as on a full disk: shims wait.", p.Log.Refused == "", of...)
	if !p.SnapshotTime.IsZero() {
		to.gauge("kvatlas_snapshot_age_seconds",
			"Time since a partition's snapshot was written by this process.",
			time.Since(p.SnapshotTime).Seconds(), of...)
		to.gauge("kvatlas_snapshot_bytes", "Size of a partition's snapshot.", float64(p.SnapshotSize), of...)
	}
}

// byStore adds up what is known of stores at the same place, in which objects are called in several ways.
func byStore(list []api.StoreStatus) map[string]api.StoreStatus {
	sum := make(map[string]api.StoreStatus, len(list))
	for _, x := range list {
		was, again := sum[x.Store]
		if again {
			x.Down = cmp.Or(x.Down, was.Down)
			x.Questions, x.Failed, x.Busy = x.Questions+was.Questions, x.Failed+was.Failed, x.Busy+was.Busy
			x.Partial += was.Partial
			x.Forgotten, x.Remembered, x.Strange = x.Forgotten+was.Forgotten, x.Remembered+was.Remembered,
				x.Strange+was.Strange
			if was.Election != nil && x.Election != nil {
				e := *x.Election // the same masters, watched twice
				e.Changes, e.Failures = e.Changes+was.Election.Changes, e.Failures+was.Election.Failures
				x.Election = &e
			}
			if was.Set != nil && x.Set != nil {
				a, b := *x.Set, was.Set // the same set, kept twice
				a.Whole = a.Whole && b.Whole
				a.Objects, a.Gaps, a.Overflows = a.Objects+b.Objects, a.Gaps+b.Gaps, a.Overflows+b.Overflows
				a.Lists, a.Answered, a.Asked = a.Lists+b.Lists, a.Answered+b.Answered, a.Asked+b.Asked
				x.Set = &a
			} else if x.Set == nil {
				x.Set = was.Set
			}
		}
		sum[x.Store] = x
	}
	return sum
}
