// Package affinity answers: which worker has a session's requests?
//
//	m := affinity.NewMachine(now, affinity.Config{Origin: origin, TTL: ttl})
//	rank, bound := m.Get(now, key)
//	how, err := m.Bind(now, key, rank, requestID, hard) // after the request was booked there
//
// A session is bound to a rank by its first booking, and stays until its time to live has passed since its last use.
// While a request of the session is under way that time does not begin to run (a lease): the node that booked it looks
// into the load table, every second or eighth of the time to live. With hard affinity a booking elsewhere is refused;
// with soft affinity the binding follows it.
//
// A request without a session id is of the session whose last prompt its own prompt continues: [Machine.Follow] and
// [Machine.BindPrompt]. DESIGN.md has the rule and its reasons.
//
// # Every node has the same bindings
//
// Each rank that a session is bound to is an entry of [shared.Machine], which has the protocol and its guarantees. This
// package has what an entry means:
//
//   - It has a version (sequence, writer), and its last use has one too. Sequences are a Lamport clock of the node: one
//     more than all that it has seen. Of two entries of one session the later version stays, and the other ends.
//   - A later use brings the moment at which the binding ends, as the rest of its life: clocks of hosts are not
//     compared.
//   - The writer of the entry ends it, when no node can tell of a use before its end any more.
//
// New and moved bindings are published after 1 ms at most. A use that only prolongs a binding is published within a
// second, or an eighth of the time to live, if that is less; while a request is under way, four times in the time to
// live.
//
// Two nodes that are asked at the same moment, or are cut off from each other, may both bind a session. The greater
// version wins on both; requests that are under way elsewhere end where they are.
//
// # First requests
//
// [Service] owns a machine, and lets one request at a time initialise a session: [Service.Begin]. Others of the session
// wait until the first one is bound or has been given up. This holds on one node.
package affinity
