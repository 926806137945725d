// Package cluster decides which indexer node keeps which partitions, so that each has as many ready owners as were
// asked for and changing hands never leaves one without.
//
// Each node keeps a [Record] in a bucket: who it is, which partitions it serves, which it is about to let go. [Machine]
// reads all records and says what this node is to take and what it may let go. It is stepped and replayable; it reads
// no clock. Whoever steps it announces, looks and acts, once a beat:
//
//	record := m.Announce(standing, leave)     // write it by compare-and-set on its revision
//	look := all records of the bucket         // from the leader while m.Releasing(), and after the write was acknowledged
//	actions := m.Step(now, acknowledged, look) // restore actions.Take; stop and forget actions.Release
//
// What must not wait for a beat is that workers of a model have come to a partition which others know this node to
// serve, since queries for that model pass it over: [Machine.News] asks for that, the node then writes at once, at most
// ten times a second, and tells the others what it wrote ([Machine.Hear]). Who does not hear it finds it at his next
// look.
//
// One goroutine owns a machine. [Member] is that goroutine: it claims the node's name, writes and reads records, and
// tells a [Keeper] which partitions to keep. What it knows of the others is a [View], for any goroutine: whom to ask
// for a partition, and whether it may have workers of a model.
//
// # Who owns what
//
// Of the nodes that live and do not leave, the first R in the order of hash(node, partition) own a partition
// (rendezvous hashing: a node that comes takes only what becomes its own, one that goes leaves only what was its own to
// others). R is the greatest that any of them asks for; if none does, all of them while they are three or fewer, and
// then two.
//
// # Who lives
//
// A record's Beat grows with each write. A node is dead when its beat has stood still for DeadAfter of heard time,
// which passes only between writes of one's own that were acknowledged, and at most two beats between two of them. So
// while NATS elects a leader nobody grows old, a process that was held for a minute believes nobody dead for it, and
// clocks of hosts mean nothing.
//
// # A start
//
// A node that starts takes nothing before it has settled: until it has looked at the others, and nobody young has come
// for a beat, or for ten beats if they keep coming. Young is who has written three records at most. Where others have
// been there for long it takes at once, and a node that has settled never waits again: what a dead node had is taken
// when it is found dead. And what a node has taken and not yet announced as served it lets go at once when another owns
// it: who starts first among many drops what it has not come to.
//
// Both together make 64 nodes that start within a second restore 1,024 of 1,024 partitions, settled after 6.7 s, in
// tools/fleet's simulation. With neither they restored 4,122, in 69 s; dropping alone, without waiting, 1,301. Of nodes
// that start over ten seconds, some 1,300 with both, 1,400 to 1,550 by waiting alone, 1,820 by dropping alone. The
// price is one beat, when the first node of all starts.
//
// A node in whose process the NATS server runs ([Config.Host]) takes at the first look: nobody can have come to that
// server before it. It knows of processes that had its data folder before that they have ended ([MemberConfig.Dead]),
// and does not wait for their records to grow old. When it ends, nobody hears anything any more, so it hands nothing
// over.
//
// # Make before break
//
// Taking is always safe. What was announced as served is let go in two steps:
//
//  1. When all owners of a partition are ready and this node is none of them, it announces the partition as releasing.
//     From then on the others no longer count it among the ready.
//  2. When that is acknowledged it reads all records from the leader. Only if all owners are still ready, and none of
//     them is releasing, it lets go. Else it takes its word back.
//
// Of two nodes that let go at the same time with different views of who owns, the one whose word is later in the bucket
// reads that of the other, and stays. That is why a partition that has a ready owner keeps one, whatever the views are,
// unless those that have it die.
//
// # What it leaves to others
//
// Restoring and serving partitions (internal/node's, which is a keeper), queries (internal/scatter's).
package cluster
