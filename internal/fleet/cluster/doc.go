// Package cluster assigns partitions to indexer nodes. A partition has the requested number of ready owners, and a
// change of owners never leaves a partition without an owner.
//
// Every node keeps a [Record] in a bucket: the name, the served partitions ([Advertisement]), and the partitions in
// release. [Machine] reads all records, and decides which partitions this node acquires and may release. A machine is a
// stepped state machine, is replayable, and reads no clock. The caller steps the machine once per heartbeat:
//
//	record := m.Announce(advertisement, leaving) // write it by compare-and-set on its revision
//	look := all records of the bucket            // from the leader while m.Releasing(), after the write
//	                                             // was acknowledged
//	actions := m.Step(now, acknowledged, look)   // restore actions.Acquire; stop and drop actions.Release
//
// A single change does not wait for the next heartbeat: workers of a new model appear in a partition with an announced
// service. Other nodes would not send queries for the model here. [Machine.MustAnnounce] reports the case. The node
// then writes the record at once, at most ten times a second, and sends a copy to all remaining nodes
// ([Machine.Receive]). A node without the copy reads the record at the next look.
//
// A single goroutine owns a machine. The goroutine of a [Member] claims the node's name, writes and reads records, and
// passes the set of partitions to a [Keeper]. A [View] has the state of the nodes: the serving nodes of a partition,
// and whether a partition may have workers of a model. A View is safe for concurrent use.
//
// # Owners: rendezvous hashing
//
// The owners of a partition are the first R nodes in the order of hash(node, partition), among the live nodes without
// the leaving nodes. A new node acquires only the partitions of a new owner; a leaving node releases only own
// partitions. R is the greatest requested replication. Without a request, R is the number of nodes up to three, and two
// beyond.
//
// # Zones
//
// A zone is a set of nodes with common failures. The order of nodes is then by the rank of a node in the zone for the
// partition, and by the hash among nodes of the same rank. So the first owners are in as many zones as possible.
// A new node moves no other node to an earlier place, so only the new node acquires partitions. Nodes of its zone with
// a lower hash move down by a rank. A node without a zone is a separate zone. If no node has a zone, the hash alone
// determines the order.
//
// The rank limits the share of a zone: with R zones or more, a zone has a partition at most once. So nodes of small
// zones have more partitions than nodes of large zones; TestLoadOfZones has the figures.
//
// Nodes of earlier versions have no zones. A record has the latest supported version of the rule. If a live node does
// not support zones, all nodes ignore zones.
//
// # Liveness: heartbeats
//
// A record's heartbeat counter grows with each write. A node is dead if its counter has not changed for DeadAfter of
// observed time. Observed time passes only between two acknowledged writes of the observer, at most two heartbeats per
// pair. So no node ages while NATS elects a leader, a process that was paused for a minute declares no node dead, and
// the clocks of hosts are not compared.
//
// # Start-up grace
//
// A starting node acquires nothing during a start-up grace. The grace ends after the first look at the other nodes, if
// no starting node has appeared for most of a heartbeat, and at the latest after ten heartbeats. A node is starting
// until the fourth record. Without another starting node, there is no grace. The grace never returns: a node after the
// grace acquires a dead node's partitions as soon as the death is detected. A node drops an acquired partition at once
// if another node owns the partition and the service is not yet announced. So the first of many starting nodes drops
// the partitions without a finished restore.
//
// In the simulation of tools/fleet, 64 nodes with starts within a second restore 1,024 of 1,024 partitions and are
// stable after 6.7 s. With neither rule, the nodes restored 4,122 partitions, in 69 s; with only the drop 1,301. Nodes
// with starts over ten seconds restore some 1,300 with the two rules, 1,400 to 1,550 with only the grace, and 1,820
// with only the drop. The cost is a heartbeat at the start of the very first node.
//
// A node with the NATS server in the process ([Config.Host]) has no grace, because no node can use the server before.
// [MemberConfig.Dead] reports earlier processes with the same data folder as ended, so the node does not wait until
// their records are old. At the end of such a node, no node has NATS, so nothing is handed over.
//
// # Make before break
//
// An acquisition is always safe. A node releases an announced partition in two steps:
//
//  1. If all owners of a partition are ready and this node is not an owner, the node announces the partition as
//     releasing. Other nodes then no longer count the node among the ready nodes.
//  2. After the acknowledgement of the write, the node reads all records from the leader. If all owners are still ready
//     and none of them is releasing, the node releases the partition. Otherwise the node withdraws the announcement.
//
// Two nodes with different views of the owners may release at the same time. The node with the later write reads the
// record of the earlier, and keeps the partition. So a partition with a ready owner always has a ready owner, under any
// views, unless the nodes with the partition die.
//
// # Other packages
//
// internal/index/node, which is a keeper, restores and serves partitions; internal/index/scatter answers queries.
package cluster
