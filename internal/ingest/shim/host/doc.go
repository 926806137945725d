// Package host runs the shims of ranks. Worker-shim runs the shims of an engine, of sources with many ranks, and of
// engines in pods. An indexer runs the shims of engines registered over HTTP.
//
//	err := host.Run(ctx, host.Rank{Record: record, Decoder: decoder, Config: sockets}, host.Env{Namespace: ns})
//	err := (&host.Shim{Shared: shared, Settings: settings}).Run(ctx, conn, log)
//
// [Run] runs the shim of one rank from the claim to the end. Run claims the rank, which excludes a second shim;
// prepares the lease; and calls [shim.Run] with a decoder for findings about the engine. The record of the lease
// ([shim.Report]) contains the reports of the shim. An [Observer] of the caller writes log lines and counts.
//
// [Shim] runs all ranks of an engine for a program. Run reads missing settings over HTTP, waits for the namespace and
// for earlier shims, logs the events of each rank, and restarts the ranks if the engine returns with new settings.
package host
