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
// [Machine] is stepped: time and messages are arguments, and what is to be published is the result of [Machine.Step].
// Messages may be lost, late, twice or out of order.
//
// A binding has a version (sequence, writer), of which the greater wins. Sequences are a Lamport clock of the node: one
// more than all that it has seen, so a version is never used twice. A use has a version of the same kind; a later use
// brings the moment at which the binding ends, as what is left of its life: clocks of hosts are not compared. States of
// one binding are joined by the greater pair of versions, in any order, and nothing is removed but by its end, so there
// are no tombstones. A binding that ends a moment later on one node than on another may come back for that moment.
//
// Twice a second each node publishes a beat: the number and the sum of the hashes of its bindings, and how many
// messages of bindings it has sent. A node asks another for what it has if it has missed such a message, or hears it
// for the first time, or a third has gone silent; if their sums differ while neither changes; or if they have differed
// for 10 s. Two seconds after the last fault all have the same. It sends its 256 sums, one for each part of the
// bindings, and gets those parts that differ. A node that starts asks for all, and is ready when it has come, or when
// no ready node was heard for 1.5 s.
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
