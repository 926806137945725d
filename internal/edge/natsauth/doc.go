// Package natsauth keeps the keys of a deployment's NATS users in a folder, and writes the users into the configuration
// of NATS servers.
//
// A [Ring] is the folder: a roster of namespaces and users, and a file with a secret for each user. The roster is
// roster.json and contains only public keys.
//
//	ring, err := natsauth.Create(dir, natsauth.Static)
//	err = ring.AddNamespace("prod", 8)
//	grant, err := ring.Add(natsauth.Member{Namespace: "prod", Role: RoleShim, Worker: "w1"})
//	err = ring.Save()
//	text, err := ring.ServerConfig("")
//
// The mode of a ring is fixed at its creation:
//
//   - [Static]: users and accounts are in the servers' configuration. A new user requires a reload.
//   - [JWT]: the configuration names an operator. Running servers accept accounts that the operator has signed
//     ([Ring.Push]). A new shim requires no reload.
//
// A [Grant] lists the subjects of a user (grants.go), and an [Account] the subjects that users share (exports in
// accounts.go). A ring is for one goroutine.
// Two processes must not change a folder at the same time.
package natsauth
