// Package fleet holds no code of its own: its tests run the machines that decide in a large cluster,
// internal/fleet/cluster's, internal/fleet/registry's, internal/index/scatter's and internal/choose/load's, against
// each other in virtual time. One goroutine, one seed, one order of events: the same run each time.
//
// What is modelled beside them is NATS (a bucket with revisions and compare-and-set, a log with an expected last
// sequence, delays, lost acknowledgements, an outage, replicas that are behind), how long a node takes to restore a
// partition, and the worker's end of a lease.
package fleet
