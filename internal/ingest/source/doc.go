// Package source runs the shims of sources with many workers: lines of JSON, Dynamo's event planes over NATS and
// ZeroMQ, and engines that dial a common socket. It also relays the events of a shared store's master.
//
//	err := (&source.Source{Shim: s, Settings: more}).Run(ctx, conn, log)
//	err := (&source.Store{Shim: s, Master: "mooncake:9003"}).Run(ctx, conn, log)
//
// A source delivers router events. The ids are consecutive within a rank. A missing id clears the rank, and a
// smaller id begins a new incarnation, unless the source can repeat events: only workers of Dynamo over ZeroMQ can.
// [Source.Run] starts and feeds a shim for every new rank (package host).
//
// The watch (watch.go) reports a source without events or without a connection to the nodes. Before the first event, no
// rank exists, so no record of a rank can contain this state.
package source
