// Package zmtpserver implements the engine's side of ZeroMQ for simulated engines and tests: [Pub] and [Router], built
// on the connections of internal/ingest/zmtp. As in libzmq, every peer has a bounded queue, and messages for a full
// queue are dropped. A Pub counts dropped messages. A Router returns an error.
package zmtpserver
