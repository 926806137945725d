package main

// row is a line of panels of the same width.
type row struct {
	title  string
	height int
	panels []panel
}

// panel is a graph, or a number.
type panel struct {
	title, help string
	unit        string // Grafana's name
	stat        bool   // a number
	queries     []query
}

type query struct{ legend, expr string }

// Grafana's names of units.
const (
	percent = "percentunit"
	seconds = "s"
	size    = "bytes"
	perSec  = "ops"
	number  = "short"
)

// rows are the rows of the dashboard. Counters are summed over nodes. For values that are equal on all nodes, a query
// selects the maximum.
var rows = []row{
	{"Now", 4, []panel{
		{"Nodes", "Indexer nodes with successful scrapes.", number, true, []query{
			{"", `count(kvatlas_ready)`}}},
		{"Not ready", "Nodes in a restore or catch-up.", number, true, []query{
			{"", `count(kvatlas_ready) - sum(kvatlas_ready)`}}},
		{"Partitions unserved", "Answers lack them.", number, true, []query{
			{"", `max(kvatlas_cluster_partitions{state="unserved"})`}}},
		{"Engines", "Connected ranks.", number, true, []query{
			{"", `max(kvatlas_engines{state="connected"})`}}},
		{"Blocks", "Distinct blocks held by at least a rank: the maximum over nodes.", number, true, []query{
			{"", `max(kvatlas_index_distinct_blocks)`}}},
		{"Problems", "In nodes' status; indexer doctor explains them.", number, true, []query{
			{"", `max(kvatlas_problems)`}}},
	}},
	{"Hit rate: shares of the requested tokens", 9, []panel{
		{"Steps", "seen: an unbounded cache. held: the best worker. selected: the chosen worker. reused: engines' " +
			"reports. indexer funnel explains the losses between two steps.", percent, false, []query{
			{"seen {{model}}", share("seen_prefix")}, {"held {{model}}", share("best_cached")},
			{"selected {{model}}", share("selected_cached")}, {"reused {{model}}", share("reused")}}},
		{"Regret", "Share of the computed tokens that another worker held. Needs rules.yml. Prompts that are " +
			"queried and never routed raise the share.", percent, false, []query{
			{"{{model}}", `model:kvatlas_route_regret:ratio_rate5m{model=~"$model"}`}}},
		{"Choices", "By the use of the index.", perSec, false, []query{
			{"{{outcome}}",
				`sum by (outcome) (rate(kvatlas_route_decisions_total{model=~"$model"}[$__rate_interval]))`}}},
		{"Held by the best worker", "Share of a query's blocks: quantiles over queries.", percent, false, []query{
			{"half", quantile("0.5", `kvatlas_find_best_ratio_bucket{model=~"$model"}`, "le")},
			{"a tenth has less than", quantile("0.1", `kvatlas_find_best_ratio_bucket{model=~"$model"}`, "le")}}},
	}},
	{"Requests", 8, []panel{
		{"Requests", "By operation, from outside.", perSec, false, []query{
			{"{{operation}}", `sum by (operation) (rate(kvatlas_requests_total{transport!="node"}[$__rate_interval]))`}}},
		{"Outcomes", "ok, or an error's code.", perSec, false, []query{
			{"{{outcome}}", `sum by (outcome) (rate(kvatlas_requests_total{transport!="node"}[$__rate_interval]))`}}},
		{"Time to answer, p99", "In the node's handler.", seconds, false, []query{
			{"{{operation}}", quantile("0.99", `kvatlas_request_duration_seconds_bucket`, "operation, le")}}},
		{"Stages, p99", "Parts of queries and choices.", seconds, false, []query{
			{"{{stage}}", quantile("0.99", `kvatlas_request_stage_seconds_bucket`, "stage, le")}}},
	}},
	{"Load", 8, []panel{
		{"Requests under way", "Booked requests without an end.", number, false, []query{
			{"all {{model}}", `max by (model) (kvatlas_load_requests{model=~"$model"})`},
			{"busiest rank {{model}}", `max by (model) (kvatlas_load_requests_max{model=~"$model"})`}}},
		{"Tokens to prefill", "Of requests under way.", number, false, []query{
			{"all {{model}}", `max by (model) (kvatlas_load_prefill_tokens{model=~"$model"})`},
			{"busiest rank {{model}}", `max by (model) (kvatlas_load_prefill_tokens_max{model=~"$model"})`}}},
		{"Blocks in use", "Of requests under way.", number, false, []query{
			{"all {{model}}", `max by (model) (kvatlas_load_decode_blocks{model=~"$model"})`},
			{"busiest rank {{model}}", `max by (model) (kvatlas_load_decode_blocks_max{model=~"$model"})`}}},
		{"Bookings", "By outcome.", perSec, false, []query{
			{"{{outcome}}",
				`sum by (outcome) (rate(kvatlas_bookings_total{model=~"$model"}[$__rate_interval]))`}}},
	}},
	{"Index and log", 8, []panel{
		{"Events applied", "The maximum over nodes.", perSec, false, []query{{"{{event}} {{tier}}",
			`max by (event, tier) (sum by (instance, event, tier) (rate(kvatlas_events_total[$__rate_interval])))`}}},
		{"Age of events, p99", "Time from the log to the index.", seconds, false, []query{
			{"{{instance}}", quantile("0.99", "kvatlas_event_age_seconds_bucket", "instance, le")}}},
		{"Lag", "Messages of the log before application.", number, false, []query{
			{"{{instance}}", `sum by (instance) (kvatlas_log_lag_messages)`}}},
		{"Blocks", "Counted for every holding rank.", number, false, []query{
			{"{{tier}}", `max by (tier) (kvatlas_index_blocks)`}}},
		{"Memory of the index", "By node.", size, false, []query{{"{{instance}}", `kvatlas_index_bytes`}}},
	}},
	{"Cluster and durability", 8, []panel{
		{"Nodes, by observer", "Equal lines: all nodes agree.", number, false, []query{
			{"{{instance}}", `kvatlas_cluster_nodes`}}},
		{"Requests between nodes", "hedge: a second request beside a slow request. Empty if all nodes keep all partitions.",
			perSec, false, []query{
				{"{{kind}}", `sum by (kind) (rate(kvatlas_peer_requests_total[$__rate_interval]))`}}},
		{"Room in NATS", "Used share of the limits.", percent, false, []query{
			{"store", `max(kvatlas_store_bytes / kvatlas_store_limit_bytes)`},
			{"fullest log", `max(kvatlas_log_bytes / kvatlas_log_limit_bytes)`}}},
		{"Snapshots' age", "Age of the newest snapshot, maximum over partitions.", seconds, false, []query{
			{"oldest", `max(min by (partition) (kvatlas_snapshot_age_seconds))`}}},
	}},
	{"Engines, shims and shared stores", 8, []panel{
		{"Engines", "Ranks by engine state.", number, false, []query{
			{"{{state}}", `max by (state) (kvatlas_engines)`}}},
		{"Shims: messages of engines", "Of shims with --http-listen.", perSec, false, []query{
			{"{{instance}}", `sum by (instance) (rate(kvatlas_shim_engine_messages_total[$__rate_interval]))`}}},
		{"Shims: queue", "Share of --queue-bytes waiting for the log.", percent, false, []query{
			{"{{instance}}", `kvatlas_shim_queue_bytes / kvatlas_shim_queue_limit_bytes`}}},
		{"Shims: incidents", "Unusual events.", perSec, false, []query{
			{"{{what}}", `sum by (what) (rate(kvatlas_shim_incidents_total[$__rate_interval]))`}}},
		{"Shared stores: requests", "By outcome. Empty while workers have no shared store.", perSec, false, []query{
			{"{{store}} {{outcome}}", `sum by (store, outcome) (rate(kvatlas_l3_questions_total[$__rate_interval]))`}}},
	}},
}

// share returns the query for the share of a model's tokens that reached a step.
func share(step string) string {
	sum := func(step string) string {
		return `sum by (model) (rate(kvatlas_route_` + step + `_tokens_total{model=~"$model"}[$__rate_interval]))`
	}
	return sum(step) + " / " + sum("asked")
}

// quantile is of a histogram's buckets, by labels.
func quantile(q, buckets, by string) string {
	return "histogram_quantile(" + q + ", sum by (" + by + ") (rate(" + buckets + "[$__rate_interval])))"
}
