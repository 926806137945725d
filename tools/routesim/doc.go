// Package routesim answers: what would this way of choosing workers come to, on this workload, with this fleet? It is a
// discrete-event simulation in virtual time, and the command indexer simulate.
//
// Use: a [Workload] ([Capacity73], [Capacity37], [FromTrace], [Measured.Workload]), and [Compare] for a comparison of
// [Arms], or [Simulate] for one of them. A [Report] prints itself as a table, JSON and an SVG plot. A [Matrix] compares
// arms on many workloads, at several loads. DESIGN.md describes the model, its constants and the arms.
//
// # What is simulated
//
// Engines ([Engine]; engine.go, pool.go, gpu.go): continuous batching with chunked prefill, memory in blocks under
// vLLM's eviction rule, preemption, prefix reuse, asynchronous scheduling, GPUs that engines share, and, if wanted,
// host memory behind the device and a store that all engines share.
//
// Routers ([Arm]; arms.go, fleet.go, rivals.go, llmd.go): each request comes to one of several routers at random. Exact
// knowledge comes from the engines' events through pkg/radix, after a lag. Requests under way are charged as Dynamo's
// slot tracker charges them.
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
// DESIGN.md lists what is left out.
package routesim
