// Package grpcserver is the gRPC port of an indexer: access, limits and counts. Other packages provide the services:
//
//	stop, addr, err := grpcserver.Serve("127.0.0.1:9002", grpcserver.Config{...}, func(r grpc.ServiceRegistrar) {
//		extprocv3.RegisterExternalProcessorServer(r, picker)
//	})
//	defer stop()
//
// Every port serves grpc.health.v1 without a token. "liveness" is SERVING while the process runs. "", "readiness" and
// each service on the port are SERVING while the node is ready. Watch is not supported: clients call Check again.
//
// A call needs the metadata "authorization: Bearer TOKEN" if the port has tokens, or a client certificate that
// [Config.TLS] verifies. A refusal has the message of an [api.Error], and the status that [Status] assigns to its code.
// Calls beyond [Config.Calls] and [Config.Streams] are refused with RESOURCE_EXHAUSTED. The gRPC library refuses
// messages beyond [MaxMessage]. Every check except the last happens before a message is read. The message of a call
// must arrive within 30 s.
//
// Handlers return errors of type [*api.Error], or statuses.
package grpcserver
