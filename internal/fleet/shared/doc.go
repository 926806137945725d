// Package shared keeps a table equal on all indexer nodes: the requests under way (internal/choose/load) and the
// sessions (internal/choose/affinity).
//
// A package with such a table implements [Table] and calls the machine with each local change:
//
//	m := shared.NewMachine(now, table, shared.Config[state]{Origin: origin, Memory: time.Minute, Read: read})
//	k := m.NewKey()             // of a new entry, which the caller enters into its table
//	m.Put(now, k, false)        // the entry was created, or has changed
//	m.End(now, k, false)        // the entry has left the table
//	messages := m.Step(now)     // to send; when m.Wake() is due
//	m.Receive(now, data)        // a message of another node: calls the table's methods
//
// [Runner] is the shell around a machine: lock, clock, NATS.
//
// # Guarantees
//
//   - A change is in the local table at once. It reaches other nodes after a few milliseconds, and within two seconds
//     after messages arrive again.
//   - No entry is lost while a living node has it. If a living node knows the end of an entry, the entry does not
//     reappear there.
//   - Messages may be lost, late, duplicated and reordered. Clocks of hosts are not compared.
//   - A message has at most some 350 kB, except for one large change. At most 64 MiB wait to be sent.
//
// DESIGN.md describes the protocol, its invariants, and the rejected designs.
package shared
