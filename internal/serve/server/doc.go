// Package server is an indexer node: it assembles a node's state machines and serves their interfaces.
//
//	s, err := server.New(ctx, settings, log)
//	err = s.Run(ctx)
//
// A [Server] answers for the whole cluster: [Server.Find], [Server.Workers], [Server.Status], [Server.StatusOf],
// [Server.Verify] and [Server.Snapshot]. The interfaces read requests and call these methods:
//
//   - nats.go: micro services on the subjects for any node, and on the subjects of this node for queries of other nodes
//     about this node's partitions;
//   - http.go: a mux with the same operations, the paths of other indexers (internal/faces/compat), metrics and health;
//   - access.go: access rules of the HTTP port and the limit of concurrent requests.
//
// [Server.Find] and similar methods check the readiness of the node, so all interfaces behave the same. outcomes.go
// counts the outcomes of requests.
//
// All methods except Run are safe for concurrent use. The caller owns the connection and the NATS server in this
// process.
package server
