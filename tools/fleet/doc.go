// Package fleet contains only tests. They run the state machines of a large cluster against each other in virtual time:
// internal/fleet/cluster, internal/fleet/registry, internal/index/scatter and internal/choose/load. A run has a single
// goroutine, a seed and a deterministic order of events, so runs are reproducible.
//
// The tests model the other parts. NATS is a bucket with revisions and compare-and-set, and a log with an expected last
// sequence. The model has delays, lost acknowledgements, outages and lagging replicas. The tests also model the
// duration of a partition's restore and the shim's part of a lease.
package fleet
