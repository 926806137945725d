// Package natsauth keeps the keys of a deployment's NATS users in a folder, and writes what NATS servers must know of
// them.
//
// A [Ring] is the folder: a roster of namespaces and users, and one file with a secret for each user. The roster is
// roster.json and contains public keys alone.
//
//	ring, err := natsauth.Create(dir, natsauth.Static)
//	err = ring.AddNamespace("prod", 8)
//	grant, err := ring.Add(natsauth.Member{Namespace: "prod", Role: jetstream.RoleShim, Worker: "w1"})
//	err = ring.Save()
//	text, err := ring.ServerConfig("")
//
// Servers learn of users in one of two ways, fixed when the ring is created:
//
//   - [Static]: users and accounts are in the servers' configuration. A new user needs a reload.
//   - [JWT]: the configuration names an operator, and servers take accounts that the operator has signed while they run
//     ([Ring.Push]). A new shim needs no reload.
//
// Which subjects a user may use, and how accounts share them, is in pkg/jetstream (Grant, Accounts). A ring is for one
// goroutine. Two processes must not change one folder at the same time.
package natsauth
