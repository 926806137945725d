// Package host runs the shims of ranks. The program worker-shim uses it for its own engine, for sources with many ranks
// and for the engines in pods. An indexer uses it for the engines that were registered over HTTP.
//
//	err := host.Run(ctx, host.Rank{Record: record, Decoder: decoder, Config: sockets}, host.Env{Namespace: ns})
//	err := (&host.Shim{Shared: shared, Settings: settings}).Run(ctx, conn, log)
//
// [Run] runs the shim of one rank from its claim to its end. It claims the rank, so that no other shim publishes for
// it; prepares its lease; and runs [shim.Run] with a decoder that reports findings about the engine. The lease's record
// ([shim.Report]) contains the reports of the shim. [Watch] holds further functions of the caller, for log lines and
// counts.
//
// [Shim] runs all ranks of an engine for a program: it reads missing settings over HTTP, waits for the namespace and
// for earlier shims, logs the events of each rank, and restarts the ranks if the engine returns with other settings.
package host
