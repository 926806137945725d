// Package upkeep changes a deployment for operators: it clears workers and models, deletes namespaces, requests
// resyncs, and prepares the end of a NATS server.
//
// The functions need NATS. [DeleteNamespace] and [ForgetModel] also send requests to indexers, and refuse the change
// while an indexer or a shim depends on the state.
package upkeep
