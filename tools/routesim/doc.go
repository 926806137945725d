// Package routesim answers: what would this way of choosing workers come to, on this workload, with this fleet? It is a
// discrete-event simulation in virtual time, and the command indexer simulate.
//
// Use: a [Workload] ([Capacity73], [Capacity37], [FromTrace]), and [Compare] for a comparison of [Arms], or [Simulate]
// for one of them. A [Report] prints itself as a table, JSON and an SVG plot.
//
// # What is simulated
//
// Engines ([Engine]; engine.go, pool.go): continuous batching with chunked prefill, block by block memory under vLLM's
// eviction rule, preemption when memory runs out, reuse of what is there, and, if wanted, host memory behind the device
// and a store that all engines share. A step's time is linear in what it does.
//
// Routers ([Arm]; arms.go): requests come to one of several at random. All that know anything of caches choose with the
// policy dynamo of pkg/routing, and differ in what they tell it. Exact knowledge comes from the engines' events by way
// of pkg/radix, 5 ms late. What is under way is charged as Dynamo's slot tracker charges it.
//
// # Where reuse is lost
//
// A [Funnel] says of the prompt tokens which share a cache without bounds would reuse; which one with the memory of the
// whole fleet, if it knew the future; what the best worker could have given each request when it was routed; what the
// chosen worker could have; and what was reused. Each step is at most the one before it.
//
// # Promises
//
//  1. Equal configurations give equal results: no clock, no goroutines, no order of maps.
//  2. Every request ends, and every prompt token of its first start was reused, loaded or computed.
//  3. A simulated engine does what a naive one does that looks at every request in every step (engine_test.go).
//
// # What is left out
//
// Blocks of output are in memory but are never found: no later prompt of the workloads here names them. Attention's
// quadratic part, tokenization, and the network cost nothing. A block that two requests compute at the same time is
// kept once. A published workload's engine is told by a handful of constants, so that absolute times are the right
// order of magnitude, and what is compared is arms on one simulated fleet.
package routesim
