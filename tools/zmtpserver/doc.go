// Package zmtpserver is the engine's side of ZeroMQ, for simulated engines and tests: [Pub] and [Router], made of
// internal/ingest/zmtp's connections. Both have a bounded queue for each peer and drop what does not fit, as libzmq's
// do; a Pub counts it, a Router says so.
package zmtpserver
