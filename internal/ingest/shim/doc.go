// Package shim carries the KV-cache events of an engine's rank from the sockets into the log, without losses and
// without repetitions.
//
// [Machine] makes the decisions: the next engine message, the reaction to any other message, the numbers of events, the
// batches, and the events to publish. [Run] does the waiting: it reads the engine's PUB socket, sends requests to the
// replay socket, and publishes a flight at a time. It has no file. After a crash, it reads its cursor from the last
// message of its own subject, requests the later messages from the engine, and continues.
//
// The machine is in a single phase at a time: recovering, live, replaying, awaiting a snapshot, or departed. After
// every step, [Machine.Advance] returns the actions to start.
//
// # How it detects missing messages
//
// An engine numbers its messages. A message that does not follow the last message is a gap. The shim then requests a
// replay from the last message on. If the replay returns the last message unchanged (the cursor has the digest), the
// engine process is the same, and the following messages fill the gap. If the content differs, or the engine's newest
// number is smaller, the engine has restarted, and a new incarnation begins. If the engine's buffer has moved on, the
// missed messages are unknown, and the rank is cleared with the reason. The shim sends the same request after every new
// connection, to detect a restart with matching numbers.
//
//	             Live              Replayed, ReplayEnded, ReplayFailed
//	engine PUB ───────▶ Machine ◀──────────────────────────────────── engine replay ROUTER
//	                    │     ▲
//	     Advance: flight │     │ Flushed, LogLost, Ended
//	                    ▼     │
//	                  the log (JetStream, acknowledged)
//
// DESIGN.md in this folder describes engines with a short, dead or missing replay buffer, the transfer of a previous
// shim's state, and the distinction of a dead engine from a hanging engine.
//
// # The control server
//
// A shim answers requests for its identity on NATS ([ControlServer]), so a second shim of the rank is refused early
// ([Claim]). If both start at the same moment, or cannot reach each other, the log permits only one of them to publish.
// The control server also begins a new incarnation on request ([Machine.Resync]): an indexer sends the request when the
// log has lost events.
//
// [Report] writes the state of the shim into the rank's lease. Package registry renews the lease.
//
// # A store's events
//
// [Relay] is another shim, for the events of a Mooncake master about a shared store. The events go to the indexers
// without the log and without acknowledgements, because no source can repeat them. The sequence numbers reveal losses.
//
// # Limits
//
// The queue for the log is limited in bytes ([Limits]). While the queue is full, the shim does not read the engine's
// socket. Then TCP and the engine's high-water mark hold messages back. Messages dropped by the engine are a gap, and
// the replay buffer fills the gap when the log accepts events again.
//
// A message may decode to 40 times its size, so the machine decodes a message in parts (work.go). It decodes the next
// part when less than Limits.PartBytes wait. Live messages wait in the socket's inbox, which is limited in bytes too.
// In total, a message takes less than four times its size. After a crash in the middle of a message, the next shim
// continues there: a batch has the cursor of the message before, and the number of published events of the next message
// (events.Cursor.Partial).
package shim
