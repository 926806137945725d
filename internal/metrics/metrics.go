// Package metrics shows a node's status to Prometheus. Names follow its conventions: base units, _total for what only
// grows, and labels of bounded number (partitions, models, outcomes), never workers or hashes.
package metrics

import (
	"cmp"
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Statuser tells how a node is doing.
type Statuser interface {
	Status(ctx context.Context) (*api.Status, error)
}

// Queries counts requests and their outcomes.
type Queries struct {
	duration *prometheus.HistogramVec
	asked    *prometheus.CounterVec
	replied  *prometheus.HistogramVec
	withheld prometheus.Counter // denied under its old name
	denied   prometheus.Counter
	missing  *prometheus.CounterVec
	selected *prometheus.CounterVec
	stage    *prometheus.HistogramVec
	texts    *prometheus.CounterVec
	textTime *prometheus.HistogramVec
	reused   *prometheus.CounterVec
	moved    *prometheus.CounterVec

	stages map[string]prometheus.Observer // of stage: looked up once, since each choice has them all
}

// Observe counts one request by its outcome: "ok", or the error's code.
func (q *Queries) Observe(op, outcome string, took time.Duration) {
	q.duration.WithLabelValues(op, outcome).Observe(took.Seconds())
}

// Asked counts a request to another node by its kind: first, next (after a failure) or hedge.
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

// Missing counts partitions that an answer lacks.
func (q *Queries) Missing(op string, n int) { q.missing.WithLabelValues(op).Add(float64(n)) }

// Selected counts a choice of a worker by its policy and outcome: "ok", or the error's code.
func (q *Queries) Selected(policy, outcome string) { q.selected.WithLabelValues(policy, outcome).Inc() }

// Reused counts tokens of prompts that an engine says it has reused.
func (q *Queries) Reused(model string, tokens uint64) {
	q.reused.WithLabelValues(model).Add(float64(tokens))
}

// Moved counts a request that another worker than the chosen one has answered.
func (q *Queries) Moved(model string) { q.moved.WithLabelValues(model).Inc() }

// Stage observes how long a part of a choice took: hash, match, load, choose or book.
func (q *Queries) Stage(stage string, took time.Duration) {
	if of := q.stages[stage]; of != nil {
		of.Observe(took.Seconds())
	}
}

// Tokenized counts a text of which tokens were to be made, by its source and outcome.
func (q *Queries) Tokenized(model, from, outcome string, took time.Duration) {
	q.texts.WithLabelValues(model, from, outcome).Inc()
	q.textTime.WithLabelValues(model, from).Observe(took.Seconds())
}

// New returns a handler of /metrics for a node, and what counts its requests.
func New(node Statuser) (http.Handler, *Queries) {
	registry := prometheus.NewRegistry()
	buckets := prometheus.ExponentialBuckets(10e-6, 2.5, 14)
	q := &Queries{
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "kvatlas_request_duration_seconds",
			Help:    "Time from a request's arrival at the node's handler to its answer. Operations with the prefix own_ are requests of other nodes.",
			Buckets: buckets,
		}, []string{"operation", "outcome"}),
		asked: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvatlas_peer_requests_total",
			Help: "Requests to other nodes for their shares of a query: first, next after a failure, or hedge beside a slow one.",
		}, []string{"kind"}),
		replied: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "kvatlas_peer_reply_duration_seconds",
			Help:    "Time from a request to another node to its reply, by what it is. Requests without a reply are not counted.",
			Buckets: buckets,
		}, []string{"outcome"}),
		withheld: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvatlas_peer_hedges_withheld_total",
			Help: "Old name of kvatlas_peer_hedges_denied_total, for one release.",
		}),
		denied: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvatlas_peer_hedges_denied_total", Help: "Hedged requests that were due and denied by the budget.",
		}),
		missing: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvatlas_answer_missing_partitions_total",
			Help: "Partitions that answers lack, as no node answered for them.",
		}, []string{"operation"}),
		selected: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvatlas_selections_total",
			Help: "Choices of a worker on this node, by policy (other: it is not known) and outcome: ok, or an error's code.",
		}, []string{"policy", "outcome"}),
		stage: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "kvatlas_selection_stage_seconds",
			Help:    "Time of each part of a choice: hash, match, load, choose, book.",
			Buckets: prometheus.ExponentialBuckets(1e-6, 4, 10),
		}, []string{"stage"}),
		texts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvatlas_tokenize_total",
			Help: "Prompts and messages of which tokens were to be made, by source (render, tokenize, engines, local) " +
				"and outcome: ok, cached, busy, timeout, unavailable, refused, malformed, no_source.",
		}, []string{"model", "from", "outcome"}),
		textTime: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kvatlas_tokenize_seconds", Buckets: buckets,
			Help: "Time to make tokens of a prompt or of messages.",
		}, []string{"model", "from"}),
		reused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvatlas_route_reused_tokens_total",
			Help: "Tokens of prompts that engines say they have reused (cached_tokens in their answers through a gateway).",
		}, []string{"model"}),
		moved: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvatlas_route_moved_total",
			Help: "Requests through a gateway that another worker than the chosen one has answered.",
		}, []string{"model"}),
		stages: map[string]prometheus.Observer{},
	}
	for _, stage := range []string{"hash", "match", "load", "choose", "book"} {
		q.stages[stage] = q.stage.WithLabelValues(stage)
	}
	registry.MustRegister(q.duration, q.asked, q.replied, q.withheld, q.denied, q.missing, q.selected, q.stage,
		q.texts, q.textTime, q.reused, q.moved, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collector{node})
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), q
}

// collector reads the status at each scrape.
type collector struct{ node Statuser }

// all has every metric of the status.
var all []*prometheus.Desc

// desc describes a metric of the status.
func desc(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc(name, help, labels, nil)
	all = append(all, d)
	return d
}

var (
	ready    = desc("kvatlas_ready", "1 once every partition is restored and caught up.")
	outcomes = desc("kvatlas_log_outcomes_total",
		"What became of the log's messages, events and blocks since the process started, by outcome.", "outcome")
	holdings     = desc("kvatlas_index_blocks", "Blocks held, counted for each rank that holds them, by tier.", "tier")
	distinct     = desc("kvatlas_index_distinct_blocks", "Distinct blocks that at least one rank holds.")
	indexBytes   = desc("kvatlas_index_bytes", "Memory of the index.")
	decoderBytes = desc("kvatlas_decoder_bytes", "Memory for decoding messages of the log; bounded.")
	modelRanks   = desc("kvatlas_model_ranks",
		"Ranks that the log knows, by model and block size.", "model", "block_size")
	lag         = desc("kvatlas_log_lag_messages", "Messages of a partition's log that are not applied yet.", "partition")
	applied     = desc("kvatlas_log_applied_sequence", "Last message of a partition's log that is applied.", "partition")
	serving     = desc("kvatlas_partition_serving", "1 if a partition is caught up and needs no resync.", "partition")
	snapshotAge = desc("kvatlas_snapshot_age_seconds",
		"Time since a partition's snapshot was written by this process.", "partition")
	snapshotSize = desc("kvatlas_snapshot_bytes", "Size of a partition's snapshot.", "partition")
	written      = desc("kvatlas_snapshot_written_total", "Snapshots written since the process started.")
	failed       = desc("kvatlas_snapshot_failed_total", "Snapshots that could not be written; they are retried.")
	rejected     = desc("kvatlas_snapshot_rejected_total",
		"Snapshots that could not be restored, by reason.", "reason")
	logBytes = desc("kvatlas_log_bytes", "Size of a partition's log.", "partition")
	logLimit = desc("kvatlas_log_limit_bytes",
		"Size beyond which the oldest messages of a partition's log are removed.", "partition")
	bucketBytes = desc("kvatlas_snapshot_bucket_bytes", "Size of the bucket with the snapshots.")
	bucketLimit = desc("kvatlas_snapshot_bucket_limit_bytes",
		"Size beyond which the bucket rejects snapshots; absent without a limit.")
	storeBytes = desc("kvatlas_store_bytes", "Size of all streams and buckets of the account on the NATS servers.")
	storeLimit = desc("kvatlas_store_limit_bytes",
		"Size beyond which the NATS servers reject writes; absent if not known.")
	logWritable = desc("kvatlas_log_writable",
		"0 if a partition's log rejects messages, as on a full disk: shims wait.", "partition")
	snapWritable = desc("kvatlas_snapshot_bucket_writable", "0 if the bucket rejects snapshots, as on a full disk.")
	problems     = desc("kvatlas_problems", "Number of problems in the node's status.")
	resyncs      = desc("kvatlas_resync_total",
		"Resync requests to shims: asked, answered, and partitions whose resync is complete (ended).", "what")
	behind = desc("kvatlas_partition_behind",
		"1 if a partition has been behind its log for more than five seconds.", "partition")
	clusterNodes = desc("kvatlas_cluster_nodes", "Nodes that share the namespace, as this one sees it.")
	clusterShort = desc("kvatlas_cluster_partitions",
		"Partitions with fewer ready nodes than configured (short), and with none that serves them "+
			"(unserved).", "state")
	l3Up        = desc("kvatlas_l3_up", "0 while a store that workers share is known to be down, and is not asked.", "store")
	l3Questions = desc("kvatlas_l3_questions_total",
		"Requests to a store that workers share, by outcome: ok, failed, or busy (not sent: too many in "+
			"flight).", "store", "outcome")
	l3Forgotten = desc("kvatlas_l3_forgotten_total",
		"How often the cache of a store's answers was cleared, as the store may have been replaced.", "store")
	l3Remembered = desc("kvatlas_l3_remembered_runs",
		"Runs of 16 or 64 blocks whose answer from a store is cached.", "store")
	l3Strange = desc("kvatlas_l3_strange_objects_total",
		"Objects in a store's answers that were not asked about.", "store")
	l3SetObjects = desc("kvatlas_l3_set_objects",
		"Objects in the set made from a store's events; absent without events.", "store")
	l3SetWhole = desc("kvatlas_l3_set_whole", "1 while the set has all objects of the store.", "store")
	l3SetLost  = desc("kvatlas_l3_set_given_up_total",
		"How often the set was discarded: for a gap in the events, or for its size.", "store", "reason")
	l3Objects = desc("kvatlas_l3_objects_total",
		"Objects looked up in the set, or asked of the store.", "store", "from")
	rereads = desc("kvatlas_log_rereads_total",
		"How often messages were missing between a partition's log and the index, and the log was read again.")
	stale = desc("kvatlas_partition_stale_seconds",
		"Time since a partition's log was last known to be read to its end and to accept messages; 0 up to "+
			"three seconds.", "partition")
	engines = desc("kvatlas_engines",
		"Registered ranks by the state of their engines: connected, silent, gone, unknown. The same at each "+
			"node.", "state")
	catchingUp = desc("kvatlas_shims_catching_up",
		"Registered ranks whose shims are still replaying their engines' backlog. The same at each node.")
	requests = desc("kvatlas_requests_total",
		"Requests by transport (nats, http, grpc; node: from other nodes), operation and outcome: ok, an error's "+
			"code, expired or unsent.", "transport", "operation", "outcome")
	underWay = desc("kvatlas_requests_under_way",
		"Requests that are booked and have not ended, by model (MODEL:GROUP of a routing group). The same at each node.",
		"model")
	bookings = desc("kvatlas_bookings_total",
		"Bookings asked of this node, by model and outcome: ok, conflict (the id is under way), full (too much is under "+
			"way: also for an output block).", "model", "outcome")
	bookingsEnded = desc("kvatlas_bookings_ended_total",
		"Bookings that have ended, by model and why: freed (by a request to this node); on each node: expired (by their "+
			"age), rival (another node had booked their id too), gone (with their rank).", "model", "why")
	bookingsHealed = desc("kvatlas_bookings_healed_total",
		"Requests that this node ended late, when it heard from another that they had ended.")
	guessed = desc("kvatlas_guessed_blocks",
		"Blocks that ranks are guessed to hold, as requests were sent to them, by model.", "model")
	guessesDropped = desc("kvatlas_guessed_blocks_dropped_total",
		"Blocks that ranks are no longer guessed to hold, by reason: expired, evicted (lru), pruned (too many), "+
			"refuted (by events), removed (with the rank).", "model", "reason")
	waiting = desc("kvatlas_queue_requests",
		"Requests that wait on this node for a worker that is not busy, by model.", "model")
	waitingTokens = desc("kvatlas_queue_tokens", "Tokens of the prompts of requests that wait, by model.", "model")
	sessions      = desc("kvatlas_sessions", "Sessions that are bound to a worker. The same at each node.")
	bindings      = desc("kvatlas_session_bindings_total",
		"Bookings of a session on this node, by what became of its binding: made, kept, moved, refused (the worker is "+
			"another's), full (too many sessions); and bindings that expired.", "outcome")
	engineReports = desc("kvatlas_engine_reports_total",
		"Reports of how full engines are, by what became of them: taken, late (too old), refused (of too many ranks), "+
			"malformed.", "outcome")
	resyncNeeded = desc("kvatlas_partition_resync_needed",
		"1 if a partition's log does not have all that its ranks hold.", "partition")
)

func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range all {
		ch <- d
	}
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	s, err := c.node.Status(ctx)
	if err != nil {
		ch <- prometheus.NewInvalidMetric(ready, err)
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	usage := func(bytes, limit *prometheus.Desc, u api.Usage, labels ...string) {
		gauge(bytes, float64(u.Bytes), labels...)
		if u.Limit > 0 {
			gauge(limit, float64(u.Limit), labels...)
		}
	}
	yes := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	gauge(ready, yes(s.Ready))
	for name, n := range s.Events {
		count(outcomes, n, name)
	}
	count(written, s.Snapshots.Written)
	count(failed, s.Snapshots.Failed)
	for reason, n := range s.Snapshots.Rejected {
		count(rejected, n, reason)
	}
	count(resyncs, s.Resyncs.Asked, "asked")
	count(resyncs, s.Resyncs.Answered, "answered")
	count(resyncs, s.Resyncs.Ended, "ended")
	count(rereads, s.Rereads)
	usage(bucketBytes, bucketLimit, s.SnapshotBucket)
	usage(storeBytes, storeLimit, s.Store)
	gauge(snapWritable, yes(s.SnapshotBucket.Refused == ""))
	gauge(problems, float64(len(s.Problems)))
	for _, r := range s.Requests {
		count(requests, r.Count, string(r.Transport), r.Operation, r.Outcome)
	}
	if c := s.Cluster; c != nil {
		gauge(clusterNodes, float64(len(c.Nodes)))
		gauge(clusterShort, float64(len(c.Short)), "short")
		gauge(clusterShort, float64(len(c.Unserved)), "unserved")
	}
	if e := s.Engines; e != nil {
		gauge(engines, float64(e.Connected), string(api.EngineConnected))
		gauge(engines, float64(e.Silent), string(api.EngineSilent))
		gauge(engines, float64(e.Gone), string(api.EngineGone))
		gauge(engines, float64(e.Unknown), "unknown")
		gauge(catchingUp, float64(e.CatchingUp))
	}
	if s.Load != nil {
		loads(s.Load, gauge, count)
	}
	gauge(holdings, float64(s.Index.Blocks.Device), "device")
	gauge(holdings, float64(s.Index.Blocks.Host), "host")
	gauge(holdings, float64(s.Index.Blocks.Disk), "disk")
	gauge(holdings, float64(s.Index.Blocks.External), "external")
	gauge(distinct, float64(s.Index.Distinct))
	gauge(indexBytes, float64(s.Index.Bytes))
	gauge(decoderBytes, float64(s.Index.DecoderBytes))
	for _, m := range s.Models {
		gauge(modelRanks, float64(m.Ranks), m.Model, strconv.FormatUint(uint64(m.BlockSize), 10))
	}
	for _, g := range s.Guesses {
		gauge(guessed, float64(g.Blocks), g.Model)
		for reason, n := range g.Dropped {
			count(guessesDropped, n, g.Model, reason)
		}
	}
	for _, w := range s.Waiting {
		gauge(waiting, float64(w.Requests), w.Model)
		gauge(waitingTokens, float64(w.Tokens), w.Model)
	}
	if x := s.Sessions; x != nil {
		gauge(sessions, float64(x.Sessions))
		for outcome, n := range map[string]uint64{"made": x.Made, "kept": x.Kept, "moved": x.Moved, "refused": x.Refused,
			"full": x.Full, "expired": x.Expired} {
			count(bindings, n, outcome)
		}
	}
	if x := s.EngineReports; x != nil {
		for outcome, n := range map[string]uint64{"taken": x.Taken, "late": x.Late, "refused": x.Refused,
			"malformed": x.Malformed} {
			count(engineReports, n, outcome)
		}
	}
	for where, x := range byStore(s.L3) {
		gauge(l3Up, yes(x.Down == ""), where)
		count(l3Questions, x.Questions-min(x.Failed, x.Questions), where, "ok")
		count(l3Questions, x.Failed, where, "failed")
		count(l3Questions, x.Busy, where, "busy")
		count(l3Forgotten, x.Forgotten, where)
		gauge(l3Remembered, float64(x.Remembered), where)
		count(l3Strange, x.Strange, where)
		if x.Set != nil {
			gauge(l3SetObjects, float64(x.Set.Objects), where)
			gauge(l3SetWhole, yes(x.Set.Whole), where)
			count(l3SetLost, x.Set.Gaps, where, "gap")
			count(l3SetLost, x.Set.Overflows, where, "size")
			count(l3Objects, x.Set.Answered, where, "set")
			count(l3Objects, x.Set.Asked, where, "store")
		}
	}
	for _, p := range s.Partitions {
		name := strconv.FormatUint(uint64(p.Partition), 10)
		gauge(lag, float64(p.Lag), name)
		gauge(applied, float64(p.Seq), name)
		gauge(behind, yes(p.Behind), name)
		gauge(serving, yes(p.State == api.PartitionServing), name)
		gauge(resyncNeeded, yes(p.ResyncNeeded), name)
		gauge(stale, float64(p.StaleMS)/1000, name)
		usage(logBytes, logLimit, p.Log, name)
		gauge(logWritable, yes(p.Log.Refused == ""), name)
		if !p.SnapshotTime.IsZero() {
			gauge(snapshotAge, time.Since(p.SnapshotTime).Seconds(), name)
			gauge(snapshotSize, float64(p.SnapshotSize), name)
		}
	}
}

// loads tells of requests under way.
func loads(
	l *api.LoadStatus, gauge func(*prometheus.Desc, float64, ...string), count func(*prometheus.Desc, uint64, ...string),
) {
	count(bookingsHealed, l.Healed)
	for _, m := range l.Models {
		name := m.Model
		if m.Group != "" {
			name += ":" + m.Group
		}
		gauge(underWay, float64(m.Requests), name)
		for outcome, n := range map[string]uint64{"ok": m.Booked, "conflict": m.Conflicts, "full": m.Full} {
			count(bookings, n, name, outcome)
		}
		for why, n := range map[string]uint64{"freed": m.Freed, "expired": m.Expired, "rival": m.Rivals, "gone": m.Gone} {
			count(bookingsEnded, n, name, why)
		}
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
			x.Forgotten, x.Remembered, x.Strange = x.Forgotten+was.Forgotten, x.Remembered+was.Remembered,
				x.Strange+was.Strange
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
