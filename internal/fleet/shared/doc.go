// Package shared keeps the same table on every indexer node: the requests under way (internal/choose/load) and the
// sessions (internal/choose/affinity).
//
// A package that shares a table implements [Table] and calls its machine with each local change:
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
//   - A change is in the local table at once. Other nodes have it a few milliseconds later, and at most two seconds
//     after messages arrive again.
//   - No entry is lost while a node lives that has it. An entry whose end a living node knows does not reappear there.
//   - Messages may be lost, late, duplicated and reordered; clocks of hosts are not compared.
//   - A message has at most some 350 kB, one change aside. What waits to be sent has at most 64 MiB.
//
// DESIGN.md describes the protocol, its invariants, and the designs that were rejected.
package shared
