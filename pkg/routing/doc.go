// Package routing answers one question: which worker should serve this request? It takes what is known of the
// candidates (what each holds of the prompt, what it has to do already) and returns a choice with its reasons. It is
// pure: no network, no clock, and the random source is an argument.
//
// # Use
//
//	s, err := routing.New("kvatlas", routing.DefaultConfig())
//	var scratch routing.Scratch // of one goroutine, reused
//	choice, err := s.Choose(&request, candidates, rng, &scratch)
//
// A [Selector] may be used by any number of goroutines; a [Scratch] and a *rand.Rand belong to one at a time. Without
// Request.Explain a call allocates nothing once its scratch has grown. With it, Choice.Explanation has the terms of
// every candidate, and who was dropped by which filter and why. Every error of Choose is a [*Refusal] with a code and
// a sentence.
//
// # A policy
//
// A policy is a name for filters, scorers and a picker. Each [Filter] drops candidates and says why. Each [Scorer]
// gives every candidate that is left a finite cost; the costs are summed. The [Picker] chooses one by its cost. The
// policies here are kvatlas (the default of an indexer), dynamo, least_load, prefix_only, random and round_robin;
// [Register] adds others. Candidates that a request or an operator forbids are dropped before a policy sees them: see
// [Selector.Choose].
//
// # The cost of the policy dynamo
//
// It is the cost of NVIDIA Dynamo's KV router (crate dynamo-kv-router 1.6.1, scheduling/selector/reference.rs), held
// to it by integration/judges/routing. In blocks; for a request of isl tokens, with blocks of B tokens:
//
//	request_blocks = ceil(isl / B)
//	effective      = device + host_w·host + disk_w·disk           each tier counts what it adds to those before
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
//	                 both times exp(−tanh(sum of the weights of preferred taints that the worker has)), unless pinned
//
// With temperature 0 the smallest cost wins, equal ones uniformly at random. With T > 0 the probability of a candidate
// is proportional to exp(−(cost − min) / ((max − min)·T)).
//
// # The cost of the policy kvatlas
//
// In milliseconds, for a request of isl tokens. A [Pace] has measured rate, busy, working and life:
//
//	device   = tokens of the prompt in device memory, or in requests under way at the candidate
//	lower    = tokens that follow in host memory, on disk, and in the shared store
//	uncached = isl − device − lower
//	queue    = active_prefill / rate − min(working, active_prefill / rate / prefilling requests)
//	room     = life · min(missing blocks / active_blocks, 1)       missing: active and new blocks beyond the capacity
//	prefill  = uncached / rate · (1 + (device + lower + uncached/2) / 32768)         0 for the decode pool
//	load     = (0.1·host + 0.5·disk + 0.2·shared) / rate                             in tokens of these tiers
//	context  = 0.1 · tokens of active_blocks / rate
//	decode   = 0.05 · prefill · decoding requests
//	later    = (congestion − 1) · prefill · rate / mean rate of all candidates
//	congestion = min(1 / (1 − mean busy of all candidates)², 3)
//	cost     = queue + room + prefill + load + context + decode + later
//	           times the taints' factor, as with dynamo
//
// queue + room + prefill + load is the time to the first token. context is the time that this request's decoding takes
// longer beside others. The rest is delay of others: requests that decode there, and requests that come later. In a
// queue with random arrivals and utilisation u there are u/(1−u) requests on average; the derivative by u, 1/(1−u)², is
// how much longer all requests wait for one more unit of work. It is small in an idle fleet, where the shortest time
// wins, and large in a busy one, where the least work wins. That is when prefixes should be used where they are, and
// when a second copy is worth its work.
//
// A booking counts uncached tokens, and tokens of lower tiers by their share in load.
//
// docs/routing.md explains the terms by an example. The caller keeps load rows, bookings and queues.
package routing
