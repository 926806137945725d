// Package fleet tracks the members of the fleet: indexer nodes and workers.
//
//   - cluster assigns partitions to nodes and decides when a node may release one
//   - registry tracks workers by their leases, and decides which of them are gone
//   - replication runs the state machines that hold the same state on all nodes
package fleet
