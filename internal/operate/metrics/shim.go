package metrics

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
)

// NewShim returns a handler of /metrics for a shim's process. figures is called at each scrape, from any goroutine.
func NewShim(figures func() *host.Sum) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(append(ofProcess(), shimCollector(figures))...)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
}

type shimCollector func() *host.Sum

// Describe sends no descriptions: Collect creates the metrics with descriptions.
func (shimCollector) Describe(chan<- *prometheus.Desc) {}

func (c shimCollector) Collect(ch chan<- prometheus.Metric) {
	f, to := c(), newEmitter()
	to.gauges("kvatlas_shim_ranks",
		"Ranks of this process, by the state of their engines: connected, silent, gone, unknown.", "state", f.Ranks)
	to.gauge("kvatlas_shim_catching_up", "Ranks with a backlog that is still being replayed.", float64(f.CatchingUp))
	to.gauge("kvatlas_shim_refused", "Ranks with waiting events that the log does not accept.", float64(f.Refused))
	to.gauge("kvatlas_shim_queue_bytes", "Size of the events that wait for the log.", float64(f.QueueBytes))
	to.gauge("kvatlas_shim_queue_limit_bytes",
		"Size at which the shim stops reading engines: --queue-bytes of each rank.", float64(f.QueueMost))
	to.count("kvatlas_shim_engine_messages_total", "Engine messages accepted in order.", f.Messages)
	to.count("kvatlas_shim_events_total", "Events queued for the log.", f.Events)
	to.count("kvatlas_shim_blocks_total", "Blocks in stored events.", f.Blocks)
	to.count("kvatlas_shim_log_messages_total", "Messages acknowledged by the log.", f.Published)
	to.counts("kvatlas_shim_incidents_total",
		"Unusual incidents: undecodable (an engine's message), overtaken (a message that is requested "+
			"again), gap (not recoverable: the rank was cleared), restart (of an engine), departure (the engine's process is "+
			"gone), resync (on request), snapshot (of the engine, in place of an impossible replay), joined_late "+
			"(earlier events are unknown), correction (of a wrong hash), log_unreadable (the rank's last message in "+
			"the log: a new incarnation began), batch_refused (by the log: too many were open), foreign "+
			"(a message of another engine "+
			"at the same socket, skipped).", "what", f.Incidents)
	to.counts("kvatlas_shim_events_skipped_total", "Skipped events, by reason.", "reason", f.Skipped)
	to.spans(f.Spans)
	to.send(ch)
}
