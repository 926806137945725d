// Package upkeep changes a deployment for operators: it clears workers and models, deletes namespaces, requests
// resyncs, prepares the end of a NATS server, and changes the keys of NATS users.
//
// The functions need NATS, except for those of [Keys]. [DeleteNamespace] and [ForgetModel] also send requests to
// indexers, and refuse the change while an indexer or a shim depends on the state.
package upkeep
