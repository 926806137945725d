// Package serve assembles a node and its interfaces.
//
//   - cli reads settings and flags, formats tables and sets exit codes
//   - launch runs a node as a process, with its NATS server, traces and signals
//   - page contains the files of the live page
//   - remote sends the requests of commands to running indexers
//   - server runs the parts of a node together and serves NATS, HTTP and gRPC
//   - shimport serves the state of a shim's process over HTTP
//   - tables prints the answers of indexers for people
package serve
