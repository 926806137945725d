// Package fleet tracks the members of the fleet: indexer nodes and workers.
//
//   - cluster assigns partitions to nodes and decides when a node may release one
//   - peerapi has the requests that only nodes send to each other
//   - regions exchanges digests of cached prefixes between regions
//   - registry tracks workers by their leases, renews the leases for shims (lease.go), and decides which workers are
//     gone
//   - shared keeps the same table on all nodes: requests under way and sessions
package fleet
