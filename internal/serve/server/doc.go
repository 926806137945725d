// Package server is an indexer node that serves: it puts a node's machines together and gives them faces.
//
//	s, err := server.New(ctx, settings, log)
//	err = s.Run(ctx)
//
// A [Server] answers for the whole cluster: [Server.Find], [Server.Workers], [Server.Status], [Server.StatusOf],
// [Server.Verify] and [Server.Snapshot]. Its faces read requests and call these:
//
//   - nats.go: micro services on the subjects that any node may answer, and on this node's own subjects, where other
//     nodes ask for what it holds itself;
//   - http.go: one mux with the same operations, the paths of other indexers (internal/faces/compat), metrics and
//     health;
//   - access.go: who may use the HTTP port, and how many requests at once.
//
// Whether the node may be asked is decided in [Server.Find] and its like, so that it is the same for every face.
// What becomes of each request is counted in outcomes.go. log.go makes log lines from the hooks of the machines.
//
// All methods but Run may be called from any goroutine. The connection and the NATS server in this process stay the
// caller's.
package server
