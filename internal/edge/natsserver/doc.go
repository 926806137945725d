// Package natsserver runs a NATS server with JetStream in this process, in a data folder of its own.
//
//	srv, err := natsserver.Start(ctx, natsserver.Options{Dir: "data"})
//	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{Server: srv})
//	defer srv.Stop()
//
// No other package imports nats-server, which is larger than a whole shim. Programs that only connect to NATS import
// [github.com/kvatlas/kvatlas/pkg/jetstream] and stay small.
//
// # Guarantees
//
//  1. One process at a time uses a data folder. A second process gets [ErrInUse].
//  2. Acknowledged messages are on the disk, unless [Options.SyncInterval] is set.
//  3. [Server.Supervise] restarts a server that cannot write, as soon as the disk has room.
//
// The methods of [Server] are safe for concurrent use.
package natsserver
