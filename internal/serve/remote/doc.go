// Package remote sends the requests of commands to running indexers, over NATS or HTTP, and reads prompts from flags.
//
//	cmd := remote.Command(&cobra.Command{Use: "workers"}, remote.Request[*api.WorkerList]{
//		Send: remote.Get((*client.Client).Workers), Print: tables.Workers,
//	})
//
// Package cli has the flags of the NATS connection, and package client the protocol.
package remote
