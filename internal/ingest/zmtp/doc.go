// Package zmtp connects a static Go binary to the ZeroMQ sockets of inference engines, without losing, inventing or
// misreading a message.
//
// The package is a small implementation of ZMTP 3.1 (https://rfc.zeromq.org/spec/37/) with the NULL mechanism. The
// parts of ZMTP 3.0 for old peers are included. Two kinds of sockets exist:
//
//   - [Sub] receives messages of publishers. [DialSub] keeps one connection to one publisher. [ListenSub] accepts
//     connections of publishers, and [ListenEach] calls a separate handler for each.
//   - [Dealer] sends requests to a router and receives the replies: [DialDealer].
//
// The sockets of the engine's side, PUB and ROUTER, are in tools/zmtpserver, for simulated engines and tests: [Listen].
//
// # Promises
//
//  1. A Sub never drops a message. Its queue is bounded in messages and bytes. While the queue is full, the socket is
//     not read, and TCP backpressure reaches the publisher. The publisher then drops at its own high-water mark.
//  2. The queue contains a separate [Message] for each beginning and each end of a connection, in order with the data.
//     Messages sent between an end and the next beginning are lost to this socket. The caller detects the gap.
//  3. A framing error, an exceeded bound or silence ends one connection, with an error that contains the reason. A
//     dialling Sub reconnects after a jittered pause. The pause doubles up to a bound, and is reset after a connection
//     that lasted as long as the bound. While the peer's host is reachable, the pause is at most one second.
//  4. No input of a peer can cause a panic, or make memory grow beyond the bounds of [Config]. Memory for a frame is
//     allocated as its bytes arrive, not as its header announces.
//  5. Connecting, the handshake and silence have deadlines. Stop waits until all goroutines of a socket have ended, and
//     may be called again.
//
// # Ownership
//
// The frames of a received message belong to the receiver. All frames share one buffer, so a caller that keeps a small
// frame keeps the whole message in memory. Send copies its frames before it returns.
//
// All methods are safe for concurrent use. A socket calls the functions of Config from its own goroutines, one at a
// time for each connection. The functions must neither block nor call the socket.
//
// # Endpoints
// Endpoints are tcp://HOST:PORT (a name, an IPv4 address or an IPv6 address in brackets) and ipc://PATH (ipc://@NAME
// for Linux's abstract names). Port 0 selects a free port to listen on, and Addr returns the port. The host * means
// loopback, both for dialling and for listening; tcp://0.0.0.0:PORT and tcp://[::]:PORT mean all interfaces.
// both for dialling and for listening; tcp://0.0.0.0:PORT and tcp://[::]:PORT mean all interfaces.
//
// # Heartbeats
//
// A socket answers PING. It also sends a PING each Heartbeat to peers that speak 3.1; 3.0 has no PING. A peer that is
// silent for HeartbeatTimeout is disconnected. Time in which a full queue stops the reading does not count as silence.
// PINGs continue in that time, so the peer does not disconnect either. For 3.0 peers, TCP keep-alive finds dead hosts.
//
// # Left to other packages
//
// The content of messages, sequence numbers and replay belong to the caller. Security mechanisms are not implemented: a
// peer that demands PLAIN or CURVE is refused with an error that names the mechanism.
package zmtp
