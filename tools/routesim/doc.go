// Package routesim estimates the effect of a routing method on a workload and a fleet. It is a discrete-event
// simulation in virtual time, and the command indexer simulate.
//
// Use: a [Workload] ([Capacity73], [Capacity37], [FromTrace], [Measured.Workload]), and [Compare] for a comparison of
// [Arms], or [Simulate] for a single arm. A [Report] has the formats table, JSON and SVG plot. A [Matrix] compares arms
// on many workloads at several loads. DESIGN.md describes the model, its constants and the arms.
//
// # What is simulated
//
// Engines ([Engine]; engine.go, pool.go, gpu.go): continuous batching with chunked prefill, memory in blocks under
// vLLM's eviction rule, preemption, prefix reuse, asynchronous scheduling and shared GPUs. Host memory behind the
// device and a shared store are optional.
//
// Routers ([Arm]; arms.go, fleet.go, rivals.go, llmd.go): a request goes to a random router of several. Exact knowledge
// comes from the engines' events through pkg/radix, after a lag. Running requests are charged as in Dynamo's slot
// tracker.
//
// # Where reuse is lost
//
// A [Funnel] has the shares of prompt tokens at five steps: the reuse of a cache without bounds, the reuse of a cache
// with the memory of the whole fleet and knowledge of the future, the match of the best worker at the time of routing,
// the match of the chosen worker, and the real reuse. A step is at most the step before.
//
// # Promises
//
//  1. Equal configurations give equal results: the simulation uses no clock, no goroutines and no order of maps.
//  2. Every request ends, and every prompt token of the first start was reused, loaded or computed.
//  3. A simulated engine is equal to a naive engine that visits every request in every step (engine_test.go).
//
// DESIGN.md lists the omissions.
package routesim
