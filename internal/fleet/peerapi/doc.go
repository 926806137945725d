// Package peerapi has the requests that only nodes send to each other: for a node's part of an answer about the whole
// fleet, and for notes to all nodes. Clients cannot send them: NATS permits the subjects of a node to nodes only. The
// requests of clients, which nodes send to each other too, are in [github.com/kvatlas/kvatlas/pkg/api].
//
//	part, err := peerapi.Client{Client: c}.TenantsPart(ctx, request) // of another node
//	handler.Further = peerapi.Operations(node)                       // answers other nodes
//
// Nodes of two versions run side by side during an upgrade. Therefore the names of operations and fields are fixed, a
// new field is optional, and an unknown field is ignored.
//
// All functions are safe for concurrent use.
package peerapi
