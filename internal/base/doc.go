// Package base holds small helpers for every layer, pkg included. Its packages import no other package of kvatlas.
//
//   - datafolder rejects a data folder with write access for other users of the host
//   - dial limits the addresses in requests of clients, and the receivers of secrets
//   - escape escapes foreign texts for terminals and shell commands
//   - littleendian converts lists of numbers to bytes and back
//   - loop waits, with cancellation, and wakes a waiting goroutine
//   - msgp reads and appends MessagePack without reflection, for events, batches, queries and answers
//   - natsurl checks the addresses of NATS servers, and removes their secrets for logs
//   - ops has the names of operations and of the outcomes of requests
//   - rpc sends requests over NATS, matches replies, and bounds hedged requests
//   - strictjson decodes JSON with exact letter case and without duplicate names
//   - usage holds the errors of invalid input, with the exit status 2
package base
