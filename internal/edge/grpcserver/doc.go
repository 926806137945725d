// Package grpcserver is the gRPC port of an indexer: who may use it, how much may be under way, and what is counted.
// The services on it come from elsewhere:
//
//	stop, addr, err := grpcserver.Serve("127.0.0.1:9002", grpcserver.Config{...}, func(r grpc.ServiceRegistrar) {
//		extprocv3.RegisterExternalProcessorServer(r, picker)
//	})
//	defer stop()
//
// Every port has grpc.health.v1 too, for anybody: "liveness" is served while the process runs; "", "readiness" and each
// service on the port are served while the node is ready. Watch is not served: clients call Check again.
//
// A call needs the metadata "authorization: Bearer TOKEN" if the port has tokens. A client certificate that
// [Config.TLS] verifies takes its place. What is refused is an [api.Error]'s
// message with the status that [Status] gives its code. Calls beyond [Config.Calls] and [Config.Streams] are refused
// with RESOURCE_EXHAUSTED, messages beyond [MaxMessage] by the gRPC library. All this but the last is decided before a
// message is read. The message of a call must come within 30 s, as the call has its place by then.
//
// Handlers return errors of type [*api.Error], or statuses.
package grpcserver
