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
// Where the replay socket does not reach back and the engine gives snapshots (Config.Snapshot; none does by itself
// yet), what it holds is asked for instead of being given up: a new incarnation begins with it. The live messages that
// come meanwhile are held, and go on behind it.
//
// Without a replay socket a gap cannot be filled and clears the rank; a message whose number fits is trusted.
//
// A replay socket that is dead or mute holds live messages back for a few seconds only (Limits.ReplayPatience,
// Config.ReplayTimeout). Then they are judged as if there were no such socket: a number that fits is taken, a gap
// clears the rank. The question is asked again every few seconds until it is answered, and the answer's digest shows
// whether what was taken on trust was right; if not, a new incarnation begins. The price is that a restart whose
// numbers fit exactly is seen only when the socket is back; holding live messages until then would leave the index
// wrong for as long, and about every block instead of those of such a restart.
//
// # What a shim before it knew
//
// Engines announce some of what a block's hash is made of with another block alone: vLLM says a prompt's cache salt
// with its first block. The decoder remembers such things, and a shim that starts again has a new decoder. So it has
// the engine say the messages up to the cursor too, for a decoder of their own ([Ready].Learn; learn.go). That
// publishes nothing, no live message waits for it, and whatever becomes of it nothing is cleared.
//
// Events that come meanwhile, of which the parent is unknown, are published at once with the hash of a block without a
// salt: no query finds a wrong block by it. They are recorded, in at most Limits.HeldBytes. What the other decoder
// hashes otherwise is removed and stored again; until that is published the shim counts as catching up. If learning
// fails, or the record is full, answers for salted prompts that go on from old blocks stay too low until these are
// stored anew. A shim that dies among its corrections begins a new incarnation.
//
// # An engine that dies
//
// A dead engine says nothing, and beside a living shim its blocks would be credited for ever. When its connection has
// ended and its own ports refuse, its process is gone, and its memory with it: [Machine.Gone] says so in the log. A
// hung engine or a cut link refuse nothing and prove nothing; they are told ([Hooks].Standing), and Config.GoneAfter
// may bound them. presence.go decides which of these it is, watch.go waits around it.
//
// Whoever is connected next begins a new incarnation and is asked for all that it has said: if it is the same engine
// after all, nothing is lost as far as its replay buffer reaches.
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
package shim
