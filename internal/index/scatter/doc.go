// Package scatter answers queries for a whole cluster. It sends a query to one node for each partition, uses another
// node after a failure or a delay, and merges the answers.
//
// [Scatter] combines the node's own data ([Local]) with other nodes:
//
//	s := scatter.New(scatter.Config{Self: id, Local: node, View: …, Transport: …, …})
//	answer, err := s.Find(ctx, query)    // from all nodes
//	list, err := s.Workers(ctx, asked)   // of all nodes
//
// If this node serves all partitions of a query, the query goes to it unchanged, after a look at the view.
//
// # The path of a query
//
//  1. The wanted partitions are those that may have workers of the model, by the announcements of nodes, and those with
//     a position in the query's min_seq. If there are none, all partitions are wanted: only all nodes together can
//     report an unknown model.
//  2. Tokens are hashed here, once for each block size and lookahead of the model's workers, known from earlier
//     answers. After a change, the query is repeated. Nodes receive hashes, never tokens.
//  3. A [Round] groups the partitions by node: this node first, then as few other nodes as possible, the first fit node
//     of each partition. Requests are sent together, and this node computes its own share meanwhile.
//  4. An answer counts for partitions that no earlier answer covered. Missing partitions, and the partitions of an
//     error, go to the next node at once. If an answer exceeds its node's 95th percentile, another node gets the same
//     partitions (a hedged request), within the budget of [rpc.Budget] for all clients of this process: a tenth of all
//     requests, or ten per second. After 250 ms the budget does not matter.
//  5. A node that failed or was overtaken is penalised: it gets requests only without an alternative until it answers,
//     and one try a second.
//  6. [Union] merges. Workers of one partition never depend on another partition, so the union is exact. Partitions
//     without an answer before the deadline, less the time of the answer's transport, are in Missing.
//  7. The shared store of the workers is queried once, here, during the requests, and merged into the union.
//
// # Forwarding
//
// If another node can complete a query over NATS, forwarding saves a message: three instead of four. The field calls
// this recursive routing, in contrast to iterative. The receiving node is the query's origin, and the completing node
// the finisher.
//
//	client --query--> origin --query, origin's share--> finisher --answer--> client
//	                                                    finisher --report--> origin
//
// In this order:
//
//  1. [Scatter.Forward] chooses a fit node with all partitions that this node lacks, computes this node's share, and
//     packs both. A query whose answer needs more than the indexes of two nodes is scattered instead: explain, min_seq,
//     a shared store, guesses, ranks by address. The same holds for every query over HTTP and every choice of a worker.
//  2. [Forward.Send] sends the package with the client's own reply subject, or with the reply subject of another
//     account in a header (jetstream.Conn.Forward). Queries of other clusters are not forwarded
//     (jetstream.Request.MayForward).
//  3. [Scatter.Finish] computes the rest and merges by the same [Union]. The finisher answers only if the result is
//     complete, and if the tokens' hashes match all workers' present hashing.
//  4. [Reports] sends the origin a summary of the answer, which the origin counts as its own, or the reason that there
//     is none. The client has the answer by then, so reports wait up to 5 ms for further reports to the same origin.
//  5. After an error in the report, the origin answers as above ([Scatter.Find]). The origin also answers without a
//     report 5 ms after a hedge is due, if the budget allows one, or after 250 ms. The client may then get two answers.
//     The client's library drops the second.
//
// A forward is awaited, unhedged (no hedge is left) or overtaken (the origin answers); a report ends it. Either the
// report or the time ends the forward. The origin always accounts for the query. Nodes announce that they finish
// queries (cluster.Record). Nodes before v0.5.0 do not, and get no forwards. A penalised node gets no forwards until it
// has answered a request, since a request to a dead node fails at once and a forward does not. A node that declined
// gets no forwards for a second.
//
// # Costs
//
// A query to another node is two consecutive requests, and needs at least twice the time of a request, and one and a
// half times if forwarded. On two cores that do all of it, with a bare request's p50 as 1, three relays need 2.2, a
// forwarded query 2.2, and a scattered query 3.0 (docs/measurements/2026-11-cluster.md). The rest of this section is
// about scattered queries.
//
// Their own work is small: 8.8 µs on warm caches for a query of 128 blocks over 8 partitions with 32 workers, an answer
// of this node and an answer of another node, with 1.5 µs for decoding. The rest is transport between goroutines,
// processes and machines. Three processes that relay in the same way and do nothing else need 2.1 times a bare request
// on two cores (tools/bench/cluster); a query needs 2.8 times. Of the 621 µs of one run, some 90 are consecutive work
// of the nodes, by their metrics (kvatlas_request_stage_seconds and similar). On warm caches the times are several
// times less, but many processes take turns on two cores:
//
//	this node, before and after the other requests: read, plan, merge, write        31 µs
//	around the other node's reply: encode, send, wake up, decode                    35 µs
//	the other node's handler: read, look up, write; 9 µs of it in the index         23 µs
//
// Processor time of all three nodes is some 550 µs a query, with 20 switches of waiting threads; of three relays 290
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
// Trials, in turns with the unchanged code, p50: messages written by the publishing goroutine instead of the
// connection's, 1.5 % less in one run and 4 to 7 % in another, with 16 % more processor time in a third, not kept. No
// timer during the wait for a reply, which would cost the hedge, and no funnel at all, 1 to 2 % less each in the median
// of four rounds, within noise. One processor for Go (GOMAXPROCS=1), which wakes no threads to look for work, 10 %
// less, but a node serves more than one query at a time.
//
// # Guarantees
//
// A complete answer equals the answer of a node with all data. An incomplete answer equals a complete one without the
// missing partitions. Errors equal the errors of one node with all data: unknown_model if no partition has the model,
// block_size_mismatch if any partition contradicts.
//
// # Goroutines
//
// [Scatter] and [Peers] may be used from any goroutine. A [Round] and a [Union] belong to a single goroutine. Requests
// in flight are in a bounded pool ([rpc.Pool]). After the return of a call, only sent requests remain; their replies
// update the nodes' reply times.
//
// # Tasks of other packages
//
// internal/fleet/cluster decides which node serves a partition, internal/base/rpc transports requests, and
// internal/index/node answers for one node. internal/serve/server delivers the answer to a forwarded query if only the
// origin can reach the client.
package scatter
