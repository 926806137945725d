// Package metrics exports a node's status to Prometheus. Names follow the conventions of Prometheus: base units, and
// _total for counters. Labels have a bounded number of values (partitions, models, outcomes). Hashes are never labels.
// Workers
// and tenants are labels only on request, up to the requested number.
//
// A scrape reads published values. Scrapes do not block the application of events or the answers to queries.
package metrics

//go:generate go test . -run TestPage -update

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Figures are the values in a node's scrape. Entries of a list with the same labels are added.
type Figures struct {
	Status *api.Status

	Events []EventCount // applied to the index
	Ages   Histogram    // ages of messages at their application, in seconds
	Loads  []WorkerLoad // an entry per rank with requests, and an entry without a worker per model

	Spans map[string]uint64 // trace spans by outcome; nil without tracing

	Curves map[string][]api.CapacityTier // tiers of the capacity curve of each model
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

// Histogram counts values by upper bound.
type Histogram struct {
	Buckets map[float64]uint64 // by upper bound, smaller ones included
	Count   uint64
	Sum     float64
}

// Config configures the content of a scrape.
type Config struct {
	Figures func() *Figures // called at each scrape, from any goroutine

	// Workers is the number of workers with separate series, the first by name. Further workers share the name "other". 0
	// disables series of workers.
	Workers int

	// Tenants is the number of tenants with separate series, in the order of their first requests. Further tenants share
	// the name "other". 0 disables series of tenants.
	Tenants int
}

// ofProcess returns collectors of Go's and the system's process metrics. The heap after the last
// garbage collection, go_gc_heap_live_bytes, shows a leak long before resident memory does.
func ofProcess() []prometheus.Collector {
	live := collectors.GoRuntimeMetricsRule{Matcher: regexp.MustCompile(`^/gc/heap/live:bytes$`)}
	return []prometheus.Collector{
		collectors.NewGoCollector(collectors.WithGoCollectorRuntimeMetrics(live)),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	}
}

// collector reads the figures at each scrape.
type collector struct{ Config }

// Describe sends no descriptions: Collect creates the metrics with descriptions.
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
	to.curves(f.Curves)
	to.send(ch)
}

// emitter collects the values of one scrape.
type emitter struct {
	metrics map[string]*metric // by name
}

func newEmitter() emitter { return emitter{map[string]*metric{}} }

// metric contains the series of one name.
type metric struct {
	desc   *prometheus.Desc
	kind   prometheus.ValueType
	max    bool // combines values with the same labels by maximum instead of sum
	series map[string]*series

	histogram *Histogram
}

type series struct {
	labels []string // label values
	value  float64
}

// put adds one value of a metric. labels are alternating names and values.
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
	key := strings.Join(values, "\xff") // never part of UTF-8
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

// send sends all collected metrics.
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

// applied adds the metrics of events applied to the index.
func (to emitter) applied(f *Figures) {
	for _, e := range f.Events {
		to.count("kvatlas_events_total",
			"Engine events applied to the index, by source (the engine's protocol according to its shim; "+
				"unknown: not reported yet), event (stored, removed, cleared) and tier (all: of a cleared "+
				"event).", e.Count, "source", e.Source, "event", e.Event, "tier", e.Tier)
	}
	const age = "kvatlas_event_age_seconds"
	to.metrics[age] = &metric{histogram: &f.Ages, desc: prometheus.NewDesc(age,
		"Time between a message's arrival in the log (NATS server's clock) and its application (this host's clock); "+
			"for serving partitions.", nil, nil)}
}

// spans adds the metrics of traces, if tracing is on.
func (to emitter) spans(counts map[string]uint64) {
	to.counts("kvatlas_trace_spans_total", "Spans of traces by outcome: sent, failed (the collector did not "+
		"accept them) or dropped (too many waited). Absent without --otlp-endpoint.", "outcome", counts)
}

// loads adds the metrics of booked requests, by model, and for the requested number of workers.
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
			{"requests", "Booked requests that have not ended", float64(l.Requests)},
			{"prefill_tokens", "Tokens of booked requests still to prefill", float64(l.PrefillTokens)},
			{"decode_blocks", "Blocks of booked requests, shared blocks counted once for each rank", float64(l.Blocks)},
		} {
			to.gauge("kvatlas_load_"+x.name, x.what+", by model (MODEL:GROUP of a routing group). The same at each node.",
				x.value, "model", l.Model)
			to.most("kvatlas_load_"+x.name+"_max", x.what+": maximum over ranks, by model. The same at each node.",
				x.value, "model", l.Model)
			if workers > 0 && l.Worker != "" {
				to.gauge("kvatlas_worker_load_"+x.name, x.what+", by model and worker; only with --metrics-workers, up to "+
					"that many workers, the rest as other.", x.value, "model", l.Model, "worker", worker)
			}
		}
	}
}

func (to emitter) gauge(name, help string, v float64, labels ...string) {
	to.put(prometheus.GaugeValue, name, help, v, labels)
}

// most adds a gauge that keeps the maximum.
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

// gauges and counts add a metric by the values of one label.
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
		"Messages, events and blocks of the log since the process started, by outcome.",
		"outcome", s.Events)
	to.count("kvatlas_log_rereads_total",
		"Gaps between a partition's log and the index, after which the log was read again.",
		s.Rereads)
	to.counts("kvatlas_resync_total",
		"Resync requests to shims: asked, answered, and partitions with a complete resync (ended).", "what",
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
			"Nodes of the namespace, from this node's view.", float64(len(c.Nodes)))
		to.gauges("kvatlas_cluster_partitions",
			"Partitions with fewer ready nodes than configured (short), and without a serving node "+
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
			"Registered ranks with a shim that still replays the engine's backlog. The same at each node.",
			float64(e.CatchingUp))
		to.gauge("kvatlas_registrations_skipped",
			"Registered ranks with an unused address or folder; the node's status lists the ranks.",
			float64(e.Skipped))
	}
	to.count("kvatlas_dials_denied_total",
		"Connections to registered addresses denied by --dial-allow, since the process started.", s.DialsDenied)
	held := s.Index.Blocks
	to.gauges("kvatlas_index_blocks", "Blocks held, counted once per holding rank, by tier.", "tier",
		map[string]uint64{"device": held.Device, "host": held.Host, "disk": held.Disk, "external": held.External})
	to.gauge("kvatlas_index_distinct_blocks",
		"Distinct blocks held by at least one rank.", float64(s.Index.Distinct))
	to.gauge("kvatlas_index_bytes", "Memory of the index.", float64(s.Index.Bytes))
	to.gauge("kvatlas_decoder_bytes",
		"Memory for decoding messages of the log; bounded.", float64(s.Index.DecoderBytes))
	for _, m := range s.Models {
		to.gauge("kvatlas_model_ranks", "Ranks in the log, by model and block size.", float64(m.Ranks),
			"model", m.Model, "block_size", strconv.FormatUint(uint64(m.BlockSize), 10))
	}
}

// routing adds the metrics of requests booked or waiting on this node, and of guesses and sessions.
func (to emitter) routing(s *api.Status) {
	if x := s.Load; x != nil {
		to.bookings(x)
	}
	for _, g := range s.Guesses {
		to.gauge("kvatlas_guessed_blocks",
			"Blocks that ranks probably hold because of earlier requests, by model.",
			float64(g.Blocks), "model", g.Model)
		to.counts("kvatlas_guessed_blocks_dropped_total",
			"Dropped guesses of held blocks, by reason: expired, evicted (lru), pruned (too "+
				"many), refuted (by events), removed (with the rank).", "reason", g.Dropped, "model", g.Model)
	}
	for _, w := range s.Waiting {
		to.gauge("kvatlas_queue_requests",
			"Requests waiting on this node for an idle worker, by model.",
			float64(w.Requests), "model", w.Model)
		to.gauge("kvatlas_queue_tokens",
			"Prompt tokens of waiting requests, by model.", float64(w.Tokens), "model", w.Model)
	}
	if x := s.Sessions; x != nil {
		to.sessions(x)
	}
	if x := s.EngineReports; x != nil {
		to.counts("kvatlas_engine_reports_total",
			"Load reports of engines, by outcome: taken, late (too old), refused (too many "+
				"ranks), malformed.", "outcome", map[string]uint64{"taken": x.Taken,
				"late": x.Late, "refused": x.Refused, "malformed": x.Malformed})
		to.counts("kvatlas_request_failures_total",
			"Failed requests at workers, by the routers' reason: refused (no connection), broken (the connection ended "+
				"before the end of the answer), status (5xx), timeout. The same at each node.", "reason", x.Failures)
		to.gauge("kvatlas_workers_penalised",
			"Workers with a penalty for failed requests. The same at each node.",
			float64(x.Penalised))
	}
	if x := s.RouterRequests; x != nil {
		to.gauge("kvatlas_router_requests",
			"Requests in progress from other kinds of routers.", float64(x.Requests))
		to.counts("kvatlas_router_request_changes_total",
			"Changes of these requests, by result: added, prefilled, freed, expired (never freed), own (booked with "+
				"kvatlas too), duplicate, unknown (not added before), refused (beyond --max-requests).", "outcome",
			map[string]uint64{"added": x.Added, "prefilled": x.Prefilled, "freed": x.Freed, "expired": x.Expired,
				"own": x.Own, "duplicate": x.Duplicate, "unknown": x.Unknown, "refused": x.Refused})
	}
	if x := s.Recording; x != nil {
		to.counts("kvatlas_recording_records_total",
			"Records of requests (--record), by outcome: stored, dropped (the queue was full).", "outcome",
			map[string]uint64{"stored": x.Stored, "dropped": x.Dropped})
		to.gauge("kvatlas_recording_waiting_bytes", "Records that wait for JetStream, in bytes.", float64(x.WaitingBytes))
	}
	if x := s.HotPrefixes; x != nil {
		to.copies(x)
	}
	if x := s.Regions; x != nil {
		to.regions(x)
	}
}

// bookings adds the metrics of bookings.
func (to emitter) bookings(x *api.LoadStatus) {
	to.count("kvatlas_bookings_healed_total",
		"Requests ended late, after a report of another node.", x.Healed)
	for _, m := range x.Models {
		name := m.Model
		if m.Group != "" {
			name += ":" + m.Group
		}
		to.gauge("kvatlas_requests_under_way",
			"Old name of kvatlas_load_requests, for one release.", float64(m.Requests), "model", name)
		to.counts("kvatlas_bookings_total",
			"Bookings on this node, by model and outcome: ok, conflict (the id is in progress), full (too "+
				"many in progress: also for an output block).", "outcome",
			map[string]uint64{"ok": m.Booked, "conflict": m.Conflicts, "full": m.Full}, "model", name)
		to.counts("kvatlas_bookings_ended_total",
			"Ended bookings, by model and reason: freed (by a request to this node); on each node: "+
				"expired (by age), rival (another node also booked the id), gone (with the rank).",
			"why",
			map[string]uint64{"freed": m.Freed, "expired": m.Expired, "rival": m.Rivals, "gone": m.Gone}, "model", name)
	}
}

// sessions adds the metrics of sessions.
func (to emitter) sessions(x *api.SessionStatus) {
	to.gauge("kvatlas_sessions",
		"Sessions bound to a worker. The same at each node.", float64(x.Sessions))
	to.counts("kvatlas_session_bindings_total",
		"Bookings of a session on this node, by result for the binding: made, kept, moved, refused (the "+
			"session is bound elsewhere), full (too many sessions), unclear (prompts without an id that end with the same "+
			"block), expired.",
		"outcome", map[string]uint64{"made": x.Made, "kept": x.Kept, "moved": x.Moved, "refused": x.Refused,
			"full": x.Full, "unclear": x.Unclear, "expired": x.Expired})
	to.gauge("kvatlas_session_prompts",
		"Prompts without a session id with an expected continuation at a worker. The same at each node.", float64(x.Prompts))
	to.count("kvatlas_session_prompts_continued_total",
		"Bookings on this node that continue a session without a session id.", x.Continued)
}

// regions adds the metrics of the exchange with other regions. A node keeps a bounded number of regions.
func (to emitter) regions(x *api.RegionsStatus) {
	to.counts("kvatlas_region_digests_published_total",
		"Published digests for other regions, by outcome: sent, failed.", "outcome",
		map[string]uint64{"sent": x.Published, "failed": x.Failed})
	to.count("kvatlas_region_published_bytes_total", "Bytes of published digests.", x.PublishedBytes)
	to.gauge("kvatlas_region_digest_blocks", "Blocks in the last published digest.", float64(x.DigestBlocks))
	to.gauge("kvatlas_region_held_blocks",
		"Blocks of the last published digest without the limit --region-digest-bytes.", float64(x.HeldBlocks))
	to.gauge("kvatlas_region_digest_seconds", "Time to make the last published digest.", x.MadeInMS/1000)
	to.counts("kvatlas_region_digests_received_total",
		"Digests and messages of other regions, by outcome: taken, malformed (also of another version), broken (a message "+
			"is missing), refused (beyond a limit).", "outcome", map[string]uint64{"taken": x.Received,
			"malformed": x.Malformed, "broken": x.Broken, "refused": x.Refused})
	to.count("kvatlas_region_leaks_total",
		"Messages of other regions on a subject for a single region.", x.Leaks)
	for _, r := range x.Regions {
		to.gauge("kvatlas_region_age_seconds",
			"Age of the oldest used digest of another region, or of the last digest.", float64(r.AgeMS)/1000,
			"region", r.Region)
		to.gauge("kvatlas_region_bytes", "Memory for the digests of another region.", float64(r.Bytes), "region", r.Region)
		to.yes("kvatlas_region_known", "0 while another region has no recent digest.",
			r.State != api.RegionUnknown, "region", r.Region)
	}
}

// copies adds the metrics of copies of hot prefixes.
func (to emitter) copies(x *api.HotStatus) {
	to.counts("kvatlas_prefix_copies_total",
		"Copies of hot prefixes by this node, by outcome: made, failed.", "outcome",
		map[string]uint64{"made": x.Copies, "failed": x.Failed})
	to.count("kvatlas_prefix_copy_tokens_total", "Computed tokens of copies by this node.", x.Computed)
	to.count("kvatlas_prefix_copy_requests_total",
		"Requests with a reused copy of a hot prefix, routed by this node.", x.Requests)
	to.count("kvatlas_prefix_copy_reused_tokens_total", "Reused tokens of copies in the requests.", x.Reused)
	to.count("kvatlas_prefix_copy_saved_seconds_total",
		"Saved time to the first tokens of the requests, by forecasts.", uint64(x.SavedMS/1000))
	to.gauge("kvatlas_hot_prompt_bytes", "Memory for the tokens of hot prefixes.", float64(x.PromptBytes))
}

// stores adds the metrics of shared stores.
func (to emitter) stores(list []api.StoreStatus) {
	for where, x := range byStore(list) {
		to.yes("kvatlas_l3_up",
			"0 while a shared store is down and not queried.", x.Down == "", "store", where)
		to.counts("kvatlas_l3_questions_total",
			"Requests to a shared store, by outcome: ok, failed, or busy (not sent: too many in "+
				"flight).", "outcome", map[string]uint64{
				"ok": x.Questions - min(x.Failed, x.Questions), "failed": x.Failed, "busy": x.Busy}, "store", where)
		to.count("kvatlas_l3_partial_answers_total",
			"Answers to queries that lacked results of a shared store.", x.Partial,
			"store", where)
		to.count("kvatlas_l3_forgotten_total",
			"Clears of the cache of a store's answers, because the store may have been replaced.",
			x.Forgotten, "store", where)
		to.gauge("kvatlas_l3_remembered_runs",
			"Runs of 16 or 64 blocks with a cached answer of a store.", float64(x.Remembered), "store", where)
		to.count("kvatlas_l3_strange_objects_total",
			"Unrequested objects in a store's answers.", x.Strange, "store", where)
		if e := x.Election; e != nil {
			to.count("kvatlas_l3_leaders_total",
				"Leaders of a store's masters found in etcd; absent for a store with one master.", e.Changes, "store",
				where)
			to.count("kvatlas_l3_election_failures_total",
				"Errors of etcd, and its answers without a usable leader of a store's masters.", e.Failures, "store", where)
		}
		if set := x.Set; set != nil {
			to.gauge("kvatlas_l3_set_objects",
				"Objects in the set built from a store's events; absent without events.",
				float64(set.Objects), "store", where)
			to.yes("kvatlas_l3_set_whole", "1 while the set contains all objects of the store.", set.Whole, "store", where)
			to.counts("kvatlas_l3_set_given_up_total",
				"Discards of the set: for a gap in the events, or for its size.", "reason",
				map[string]uint64{"gap": set.Gaps, "size": set.Overflows}, "store", where)
			to.counts("kvatlas_l3_objects_total", "Objects looked up in the set, or requested from the store.", "from",
				map[string]uint64{"set": set.Answered, "store": set.Asked}, "store", where)
		}
	}
}

func (to emitter) partition(p *api.PartitionDetail) {
	of := []string{"partition", strconv.FormatUint(uint64(p.Partition), 10)}
	to.gauge("kvatlas_log_lag_messages",
		"Messages of a partition's log not applied yet.", float64(p.Lag), of...)
	to.gauge("kvatlas_log_applied_sequence",
		"Last applied message of a partition's log.", float64(p.Seq), of...)
	to.yes("kvatlas_partition_behind",
		"1 if a partition has been behind its log for more than five seconds.", p.Behind, of...)
	to.yes("kvatlas_partition_serving",
		"1 if a partition is caught up and needs no resync.", p.State == api.PartitionServing, of...)
	to.yes("kvatlas_partition_resync_needed",
		"1 if a partition's log lacks holdings of its ranks.", p.ResyncNeeded, of...)
	to.gauge("kvatlas_partition_stale_seconds",
		"Time since a partition's log was last read to its end and accepted messages; 0 up to three "+
			"seconds.", float64(p.StaleMS)/1000, of...)
	to.gauge("kvatlas_log_bytes", "Size of a partition's log.", float64(p.Log.Bytes), of...)
	if p.Log.Limit > 0 {
		to.gauge("kvatlas_log_limit_bytes",
			"Size beyond which a partition's log removes the oldest messages.", float64(p.Log.Limit), of...)
	}
	to.yes("kvatlas_log_writable",
		"0 if a partition's log rejects messages, as on a full disk: shims wait.", p.Log.Refused == "", of...)
	if !p.SnapshotTime.IsZero() {
		to.gauge("kvatlas_snapshot_age_seconds",
			"Time since this process wrote a partition's snapshot.",
			time.Since(p.SnapshotTime).Seconds(), of...)
		to.gauge("kvatlas_snapshot_bytes", "Size of a partition's snapshot.", float64(p.SnapshotSize), of...)
	}
}

// byStore combines the statuses of stores at the same place with different object names.
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
