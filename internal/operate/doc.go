// Package operate gives operators a view of a deployment.
//
//   - capacity computes hit rates by size of the cache, from sampled reuse distances
//   - doctor finds faults of a deployment and names the flag or command that repairs them
//   - dump exports and imports the index in a form that other programs read
//   - funnel accounts for reusable tokens: where reuse was gained and where it was lost
//   - metrics exports the status to Prometheus
//   - recording records requests as keyed hashes, and reads and exports the records
//   - survey collects the status of all nodes
//   - tenants counts and limits the tokens of a bounded number of tenants
//   - top shows the fleet live in a terminal
//   - upkeep changes a deployment: remove a worker, resync, delete a namespace, hand over a NATS server
//   - watch streams changes of the fleet to its subscribers
package operate
