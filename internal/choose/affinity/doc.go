// Package affinity keeps the requests of a session on one worker.
//
//	m := affinity.NewMachine(now, affinity.Config{Origin: origin, TTL: ttl})
//	rank, bound := m.Get(now, key)
//	how, err := m.Bind(now, key, rank, requestID, mayLeave) // after the booking of the request there
//
// A session is bound to a rank by its first booking. The binding ends after a time to live without use. A request under
// way holds the binding (a lease): the node of the booking checks the load table every second or eighth of the time to
// live. With hard affinity, a booking elsewhere is refused. With soft affinity, the binding follows the booking.
//
// A request without a session id belongs to the session that the prompt continues: [Machine.Follow] and
// [Machine.BindPrompt]. DESIGN.md has the rule and its reasons.
//
// # Every node has the same bindings
//
// Each binding of a session to a rank is an entry of [shared.Machine], which has the protocol and its guarantees. This
// package defines the state of an entry:
//
//   - An entry has a version (sequence, writer), and so has its last use. Sequences are a Lamport clock of the node:
//     one more than the greatest known sequence. Of two entries of a session, the later version stays, and the earlier
//     one ends.
//   - A later use has the end of the binding as the remaining life, because clocks of hosts are not compared.
//   - The writer ends the entry when no node can report an earlier use any more.
//
// New and moved bindings are published after at most 1 ms. A mere use is published within a second, or an eighth of the
// time to live, if shorter; during a request, four times in the time to live.
//
// Two nodes may bind a session at the same moment, or while they are cut off from each other. The greater version wins
// on both nodes. Requests under way stay on their workers.
//
// # First requests
//
// [Service] owns a machine, and lets one request at a time initialise a session: [Service.Begin]. Other requests of the
// session wait until the first one is bound or has failed. This holds within one node.
package affinity
