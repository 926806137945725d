// Package edge holds the parts that every port and connection shares: keys, bearer tokens, routes, limits, traces and
// the NATS server of this process.
//
//   - grpcserver authorises gRPC calls and limits how many run at once
//   - natsauth creates and reads the keys of NATS users, as a server configuration or as JWTs
//   - natsserver runs a NATS server with JetStream in this process, in a data folder of its own
//   - rights maps bearer tokens to rights, and reads their file again after a change
//   - tracing records and exports OpenTelemetry spans
//   - web guards HTTP routes and limits the memory of request bodies
package edge
