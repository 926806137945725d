package metrics

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// ShimFigures are what a scrape shows of a shim's process, over all ranks that it shims.
type ShimFigures struct {
	Ranks                 map[string]uint64 // by the state of their engines: connected, silent, gone, unknown
	CatchingUp, Refused   int               // ranks
	QueueBytes, QueueMost int               // of events that wait for the log

	Messages, Events, Blocks, Published uint64

	Incidents map[string]uint64 // by what happened
	Skipped   map[string]uint64 // events that were passed over, by reason

	Spans map[string]uint64 // as in [Figures]
}

// NewShim returns a handler of /metrics for a shim's process. Any goroutine calls figures, at each scrape.
func NewShim(figures func() *ShimFigures) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(append(ofProcess(), shimCollector(figures))...)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
}

type shimCollector func() *ShimFigures

// Describe names no metrics: each is described where it is told.
func (shimCollector) Describe(chan<- *prometheus.Desc) {}

func (c shimCollector) Collect(ch chan<- prometheus.Metric) {
	f, to := c(), newEmitter()
	to.gauges("kvatlas_shim_ranks",
		"Ranks that this process shims, by the state of their engines: connected, silent, gone, unknown.", "state", f.Ranks)
	to.gauge("kvatlas_shim_catching_up", "Ranks whose backlog is still being replayed.", float64(f.CatchingUp))
	to.gauge("kvatlas_shim_refused", "Ranks whose events the log does not take: they wait.", float64(f.Refused))
	to.gauge("kvatlas_shim_queue_bytes", "Size of the events that wait for the log.", float64(f.QueueBytes))
	to.gauge("kvatlas_shim_queue_limit_bytes",
		"Size at which engines are no longer read: --queue-bytes of each rank.", float64(f.QueueMost))
	to.count("kvatlas_shim_engine_messages_total", "Messages of engines that were taken, in order.", f.Messages)
	to.count("kvatlas_shim_events_total", "Events queued for the log.", f.Events)
	to.count("kvatlas_shim_blocks_total", "Blocks in stored events.", f.Blocks)
	to.count("kvatlas_shim_log_messages_total", "Messages that the log has acknowledged.", f.Published)
	to.counts("kvatlas_shim_incidents_total",
		"What happened beside the usual: undecodable (an engine's message), overtaken (a message that is asked for "+
			"again), gap (nothing could fill it: the rank was cleared), restart (of an engine), departure (its process is "+
			"gone), resync (was asked for), snapshot (of the engine, in place of what could not be replayed), joined_late "+
			"(what it said before is not known), correction (of a wrong hash), log_unreadable (the rank's last message in "+
			"the log: a new incarnation began), batch_refused (by the log: too many were open), foreign (a message of another engine "+
			"at the same socket: it is skipped).", "what", f.Incidents)
	to.counts("kvatlas_shim_events_skipped_total", "Events that were passed over, by reason.", "reason", f.Skipped)
	to.spans(f.Spans)
	to.send(ch)
}
