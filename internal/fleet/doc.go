// Package fleet tracks the members of the fleet: indexer nodes and workers.
//
//   - cluster assigns partitions to nodes and decides when a node may release one
//   - registry tracks workers by their leases, and decides which of them are gone
//   - regions exchanges digests of cached prefixes with other regions
//   - shared keeps the same table on all nodes: requests under way and sessions
package fleet
