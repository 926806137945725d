// Package shim carries one engine rank's KV-cache events from its sockets into the log, losing nothing and repeating
// nothing.
//
// [Machine] decides: which engine message comes next, what to do about one that does not, how events are numbered and
// cut into batches, what is owed to the log. [Run] does the waiting around it: it hears the engine's PUB socket, asks
// its replay socket, publishes one flight at a time. It keeps no file. After a crash it reads its cursor back from the
// last message of its own subject, asks the engine for what came since, and goes on.
//
// The machine is in one phase at a time: recovering, live, replaying, awaiting a snapshot, or departed.
// [Machine.Advance] begins what is to be done after a step.
//
// # How it knows that nothing is missing
//
// An engine numbers its messages. The next one follows the last one taken, or there is a gap; then the engine's replay
// socket is asked, beginning with the message that was taken last: if it comes back unchanged (the cursor holds its
// digest), this is the same run of the engine and what follows fills the gap. If it comes back with another content,
// or the engine's newest number is smaller, the engine has begun anew: a new incarnation. If the engine's buffer has
// moved on, nobody knows what was missed, and whatever the rank was known to hold is cleared, with the reason. The same
// question is asked after each new connection, so that a restart shows even where numbers happen to fit.
//
//	             Live              Replayed, ReplayEnded, ReplayFailed
//	engine PUB ───────▶ Machine ◀──────────────────────────────────── engine replay ROUTER
//	                    │     ▲
//	     Advance: flight │     │ Flushed, LogLost, Ended
//	                    ▼     │
//	                  the log (JetStream, acknowledged)
//
// DESIGN.md beside this file says what follows where the replay socket does not reach back, is dead or is not there;
// how a shim learns what one before it knew; and how it tells an engine that has died from one that hangs.
//
// # The control server
//
// A shim answers on NATS who it is ([ControlServer]), so that a second one for its rank is refused before it does harm
// ([Claim]); where both began at the same moment, or could not hear each other, the log lets one of them publish. It
// also begins a new incarnation when it is asked to ([Machine.Resync]): an indexer does that when the log has lost what
// it said.
//
// [Report] holds a rank's lease and writes into it how the shim is doing.
//
// # A store's events
//
// [Relay] is another shim: for what a Mooncake master publishes of a store that workers share. That goes to indexers as
// it comes, unacknowledged and outside of the log, for there is nothing that could say it again; numbers show what is
// lost.
//
// # What bounds it
//
// The queue towards the log is bounded in bytes ([Limits]). While it is full the engine's socket is not read: TCP and
// then the engine's own high-water mark hold things back, and what the engine drops there shows as a gap, which its
// replay buffer fills when the log is back.
//
// A message may decode to 40 times its size, so the machine decodes it in parts (work.go), the next one when less than
// Limits.PartBytes wait. Live messages wait in the socket's inbox, which is bounded in bytes too. Together a message
// takes less than four times its size. A shim that dies in the middle goes on there: each batch has the cursor of the
// message before, and how many events of the next one are published (events.Cursor.Partial).
package shim
