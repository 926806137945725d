// Package host runs the shim of one rank from its claim to its end. The program worker-shim uses it for its own engines
// and for fleets of engines, and an indexer for the engines that were registered over HTTP.
//
//	err := host.Run(ctx, host.Rank{Record: record, Decoder: decoder, Config: sockets}, host.Env{Namespace: ns})
//
// [Run] claims the rank, so that no other shim publishes for it; prepares its lease; and runs [shim.Run] with a decoder
// that reports findings about the engine. The lease's record ([shim.Report]) always has what the shim reports. [Watch]
// has the functions that a caller adds, for its log lines and counts.
package host
