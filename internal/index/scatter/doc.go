// Package scatter answers for a whole cluster what one node answers for the partitions that it holds: it asks one node
// for each partition, asks another where one is slow or gone, and puts the answers together.
//
// [Scatter] asks around what this node holds itself ([Local]):
//
//	s := scatter.New(scatter.Config{Self: id, Local: node, View: …, Transport: …, …})
//	answer, err := s.Find(ctx, query)    // from all nodes
//	list, err := s.Workers(ctx, asked)   // of all nodes
//
// A query whose partitions this node serves itself goes to it as it is; nothing is added but a look at the view.
//
// # How a query travels
//
//  1. Wanted are the partitions that may have workers of the model, by what nodes announce, and those whose place in
//     the log the query names; all, if there are none: that nobody knows a model is said only by all.
//  2. Tokens are hashed here, once for each way in which the model's workers hash (block size, lookahead), which is
//     remembered from answers; if it is not known, or turns out to have changed, the query is asked anew. Nodes are
//     sent hashes, never tokens.
//  3. A [Round] groups the partitions by node: this one first, then as few others as there need be, each the first that
//     is fit. Requests go out together; this node answers its own share while they travel.
//  4. An answer is taken for those of its partitions that nobody answered before. What it names as missing, and what an
//     error leaves open, goes on to the next node at once. An answer that lets its node's 95th percentile pass has the
//     same partitions asked of another (a hedged request), within the budget of [rpc.Budget], which this process's
//     clients share: a tenth of all requests. After 250 ms that is done anyway.
//  5. A node that failed, or was overtaken, is penalised: it is asked only where there is no other until it answers,
//     and tried once a second.
//  6. [Union] merges. Workers of one partition never depend on another's, so the union is exact. What nobody answered
//     before the deadline, less what the answer needs to travel, is named in Missing.
//  7. The store that workers share is asked once, here, while the nodes are, and merged into what they say together.
//
// # Forwarding
//
// A query over NATS that one other node can complete takes a message less: three, not four. The field calls this
// recursive routing, as opposed to iterative. The node that is asked is the query's origin; the other one finishes it.
//
//	client --query--> origin --query, origin's share--> finisher --answer--> client
//	                                                    finisher --report--> origin
//
// In this order:
//
//  1. [Scatter.Forward] chooses a fit node that has all partitions which this one lacks, looks up this node's share,
//     and packs both. Where an answer takes more than the indexes of two nodes, the query is scattered instead:
//     explain, min_seq, a shared store, guesses, ranks by address. So is every query over HTTP and every choice of a
//     worker.
//  2. [Forward.Send] sends that with the client's own reply subject, or with that of another account in a header
//     (jetstream.Conn.Forward). Queries of other clusters are not forwarded (jetstream.MayForward).
//  3. [Scatter.Finish] looks up the rest and merges by the same [Union]. It answers only if that is complete, and if
//     tokens were hashed as all workers do it now.
//  4. [Reports] tells the origin: either a summary of the answer, which it counts as if it had given it, or why there
//     is none. The client has its answer by then, so reports wait up to 5 ms for others to the same origin.
//  5. Where the report is an error, the origin answers as above ([Scatter.Find]). It does so too if there is no report
//     5 ms after a hedge is due and the budget allows one, or after 250 ms. The client may then get two
//     answers. It takes the first one; its library drops the other.
//
// A forward is awaited, unhedged (no hedge is left) or overtaken (the origin answers); a report ends it. Exactly one of
// its report and its time decides who accounts for the query, which is always the origin. Nodes announce that they
// finish queries (cluster.Record); nodes before v0.5.0 do not, and get none. A node that was penalised gets none until
// it has answered a request, since a request to a dead node fails at once and a forward does not; one that declined
// gets none for a second.
//
// # What it costs
//
// A query that travels on is two requests, one after the other, so it takes twice as long as one at least, and one and
// a half times if it is forwarded. On two cores that do all of it, a bare request's p50 counting 1, three relays take
// 2.2, a query that is forwarded 2.2, and one that is not 3.0 (docs/measurements/2026-11-cluster.md). What follows is
// of queries that are not forwarded.
//
// Their own work is little: 8.8 µs on warm caches for a query of 128 blocks over 8 partitions with 32 workers, an
// answer of this node and one of another, of which 1.5 µs decode the other's answer. The rest is getting from one
// goroutine, process and machine to the next. Three processes that relay in the same way and do nothing else take 2.1
// times a bare request on two cores (tools/bench/cluster); a query takes 2.8 times. Of the 621 µs of one run some 90
// are the nodes' own, one after the other, by their metrics (kvatlas_request_stage_seconds and its like). On warm
// caches they are several times less, but many processes take turns on two cores:
//
//	this node, before and after the others are asked: read, plan, merge, write      31 µs
//	around the other's reply: encode, send, be woken, decode                        35 µs
//	the other node's handler: read, look up, write; 9 µs of it in the index         23 µs
//
// Processor time of all three nodes is some 550 µs a query, with 20 switches of threads that wait; of three relays 290
// µs, with 14. Shares by samples, which overlap:
//
//	handlers of both nodes                                          30 %
//	the Go scheduler: threads that wait, poll and wake              20 %
//	the Go runtime's monitor, which sleeps 20 µs at a time          17 %
//	reading from NATS                                               12 %
//	writing to NATS                                                 11 %
//	memory: allocation, and pages that are touched first            10 %
//	the funnel, after the answer                                     4 %
//
// What was tried, in turns with the same without it, p50: each message written by who publishes it and not by the
// connection's goroutine, 1.5 % less in one run and 4 to 7 % in another, with 16 % more processor time in a third,
// not kept; no timer while a reply is waited for, which would cost the hedge, and no funnel at all, each 1 to 2 %
// less in the median of four rounds, which is within noise; one processor for Go (GOMAXPROCS=1), which wakes no
// threads to look for work, 10 % less, but a node has more to do than one query after the other.
//
// # Promises
//
// A complete answer is that of a node that has everything. An incomplete one is the same without the missing
// partitions. An error that one node with everything would give is given: unknown_model if no partition knows it,
// block_size_mismatch if any contradicts.
//
// # Who may call what
//
// All of [Scatter] and [Peers] from any goroutine. A [Round] and a [Union] belong to one. Requests in flight are in a
// pool ([rpc.Pool]), which is bounded. Nothing is left running when a call returns but the requests that were sent;
// their replies tell how long nodes take, and nothing else.
//
// # What it leaves to others
//
// Who serves what (internal/fleet/cluster), how requests travel (pkg/rpc), what a node says (internal/index/node), and
// that the answer to a forwarded query reaches its client, where only the origin does (internal/serve/server).
package scatter
