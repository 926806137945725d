// Package routing chooses the worker for a request. The inputs are, for each candidate, the cached part of the prompt
// and the present load. The result is a choice with its reasons. The package has no network and no clock, and the
// random source is an argument.
//
// # Use
//
//	s, err := routing.New("kvatlas", routing.DefaultConfig())
//	var scratch routing.Scratch // of one goroutine, reused
//	choice, err := s.Choose(&request, candidates, rng, &scratch)
//
// A [Selector] is safe for concurrent use. A [Scratch] and a *rand.Rand are used by one goroutine at a time. Without
// Request.Explain, a call does not allocate once the scratch has grown. With Explain, Choice.Explanation has the terms
// of every candidate, and the filter and the reason of every dropped candidate. Every error of Choose is a [*Refusal]
// with a code and a message.
//
// # A policy
//
// A policy is a name for filters, scorers and a picker. Each [Filter] drops candidates with a reason. Each [Scorer]
// returns a finite cost for every remaining candidate, and the costs are summed. The [Picker] chooses by these sums.
// The built-in policies are kvatlas (the default of an indexer), dynamo, least_load, prefix_only, random and
// round_robin. [Register] adds further policies. Before the policy runs, [Selector.Choose] drops the candidates that
// the request or the operator excludes.
//
// # The cost of the policy dynamo
//
// The cost equals the cost of NVIDIA Dynamo's KV router (crate dynamo-kv-router 1.6.1,
// scheduling/selector/reference.rs); integration/judges/routing compares the two. In blocks, for a request of isl
// tokens, with blocks of B tokens:
//
//	request_blocks = ceil(isl / B)
//	effective      = device + host_w·host + disk_w·disk           a tier counts its additional blocks only
//	cached_tokens  = round(effective·B)                           half away from zero
//	uncached       = max(isl − cached_tokens, 0)
//	raw_prefill    = (active_prefill + uncached + cached_tokens) / B
//	                 isl / B without a load row, 0 if prefill is not tracked
//	decay          = 1 / (1 + d·((active_prefill − least active_prefill) / B) / max(request_blocks, 1))
//	                 1 if prefill is not tracked or d is 0
//	shared         = m·(blocks of the shared store that count for the candidate; see SharedMode)
//	credit         = c·decay·device + host_w·host + disk_w·disk + shared
//	decode         = active_blocks + new_blocks                   0 without a load row
//	cost           = s·max(raw_prefill − credit, 0) + decode + a·active_requests
//	                 max(decode − credit, 0) + a·active_requests  if prefill is not tracked, c > 0, and the request is
//	                                                              not for the prefill pool
//	                 both times exp(−tanh(sum of the weights of the worker's preferred taints)), unless pinned
//
// With temperature 0, the smallest cost wins, and equal costs win uniformly at random. With T > 0, the probability of a
// candidate is proportional to exp(−(cost − min) / ((max − min)·T)).
//
// # The cost of the policy kvatlas
//
// In milliseconds, for a request of isl tokens. A [Pace] measures rate, busy, working and life. [Reuse] measures again,
// and [Unique] measures unique:
//
//	device   = tokens of the prompt in device memory, or in requests under way on the candidate
//	lower    = tokens that follow in host memory, on disk, and in the shared store
//	uncached = isl − device − lower
//	queue    = active_prefill / rate − min(working, active_prefill / rate / prefilling requests)
//	room     = life · min(missing blocks / active_blocks, 1)       missing: active and new blocks beyond the capacity
//	prefill  = uncached / rate · (1 + (device + lower + uncached/2) / 32768)         0 for the decode pool
//	load     = (0.1·host + 0.5·disk + 0.2·shared) / rate                             in tokens of these tiers
//	context  = 0.1 · tokens of active_blocks / rate
//	decode   = 0.05 · prefill · decoding requests
//	later    = (congestion − 1) · prefill · rate / mean rate of all candidates
//	evicted  = max(ceil((isl − device) / B) − free blocks, 0)      0 if the candidate has never evicted a block
//	evict    = congestion · evicted · B / mean rate of all candidates · unique · again
//	           times 0.1 if lower tiers have copies of evicted blocks, times 0.2 for the decode pool
//	congestion = min(1 / (1 − mean busy of all candidates)², 3)
//	cost     = queue + room + prefill + load + context + decode + later + evict
//	           times the taints' factor, as with dynamo
//
// queue + room + prefill + load is the time to the first token. context is the slowdown of the request's own output.
// The other terms are delays of other requests. decode delays requests in the output phase, later delays later
// requests, and evict is the time in which later requests compute evicted blocks again.
//
// The congestion follows from queueing theory. A queue with random arrivals and utilisation u has u/(1−u) requests on
// average. The derivative by u, 1/(1−u)², is the additional wait of all requests for one more unit of work. The wait is
// short in an idle fleet, so the shortest time wins. The wait is long in a busy fleet, so the least work wins. In a
// busy fleet, requests go to workers with the prefix, and a second copy must be worth the work.
//
// The weight of a millisecond of prefill is therefore no constant: later and evict are different for each worker and
// moment. A copy of a hot prefix goes first to a worker with free memory, or with blocks that other workers hold too. A
// worker that must evict unique blocks comes last.
//
// A booking counts uncached tokens, and tokens of lower tiers by the tier's share in load.
//
// docs/routing.md explains the terms by an example. The caller keeps load rows, bookings and queues.
package routing
