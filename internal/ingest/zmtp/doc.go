// Package zmtp answers one question: how does a static Go binary talk to the ZeroMQ sockets of inference engines
// without losing, inventing or misreading a message?
//
// It is a small implementation of ZMTP 3.1 (https://rfc.zeromq.org/spec/37/) with the NULL mechanism, and of as much of
// 3.0 as old peers need. There are two kinds of sockets:
//
//   - [Sub] hears publishers. [DialSub] keeps one connection to one publisher; [ListenSub] lets publishers dial in, and
//     [ListenEach] gives each of them a handler of its own.
//   - [Dealer] asks a router and hears its replies: [DialDealer].
//
// The engine's side of the two, PUB and ROUTER, is in tools/zmtpserver, for simulated engines and tests: [Listen].
//
// # Promises
//
//  1. A Sub never drops a message. Its queue is bounded in messages and bytes; when it is full, the socket is not read
//     and TCP holds the publisher back (which, being a publisher, then drops at its own high-water mark).
//  2. Each beginning and each end of a connection stands in the queue as a [Message] of its own, in order with the
//     data. Whatever was sent between an end and the next beginning is lost to this socket; who needs it looks for a
//     gap.
//  3. What breaks framing, exceeds a bound or falls silent ends that connection, with an error that says why, and
//     nothing else. A dialling Sub dials again, after a jittered pause that doubles up to a bound and is forgotten once
//     a connection has lasted as long as that bound. While the peer's host can be reached the pause is a second at
//     most.
//  4. Nothing that a peer sends can panic, or make memory grow beyond the bounds of [Config]. Memory for a frame is
//     taken as its bytes arrive, not as its header promises.
//  5. Connecting, the handshake and silence have deadlines. Stop waits until all goroutines of a socket have ended, and
//     may be called again.
//
// # Ownership
//
// The frames of a received message belong to the receiver. They share one buffer, so that keeping a small frame keeps
// the whole message. Frames that are handed to a Send are copied before it returns.
//
// All methods may be called from any goroutine. Hooks are called from a socket's own goroutines, one at a time
// for each connection, and must neither block nor call the socket.
//
// # Endpoints
//
// tcp://HOST:PORT (a name, an IPv4 address or an IPv6 address in brackets) and ipc://PATH (ipc://@NAME for Linux's
// abstract names). Listening on port 0 takes a free one; Addr tells which. The host * means loopback, both to dial and
// to listen; who writes tcp://0.0.0.0:PORT or tcp://[::]:PORT gets all interfaces.
//
// # Heartbeats
//
// A socket answers PING, and sends PING itself to peers that speak 3.1 (3.0 does not know it) each Heartbeat. A peer of
// whom nothing was heard for HeartbeatTimeout is given up; the time in which a full queue keeps us from reading does
// not count, and PINGs go out in that time too, so that the peer does not give up on us. For other peers there is TCP's
// keep-alive.
//
// # Left to others
//
// What messages mean, sequence numbers, replay. Security mechanisms: a peer that demands PLAIN or CURVE is refused
// with an error that says so.
package zmtp
