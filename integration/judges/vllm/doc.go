// Package vllm judges kvatlas by a whole real vLLM: its API server, engine core, worker, scheduler, block pool and
// event publisher, on the CPU, with a small model of random weights.
//
// Before each request an indexer is asked how much of the prompt the engine holds. Then the request goes to the engine,
// whose answer says how much it reused (usage.prompt_tokens_details.cached_tokens). The two must be equal, or their
// difference must belong to a class that docs/engines/vllm.md names; a difference of no class fails the test.
//
// TestFleet runs several engines, each with a shim and a twin, and sends the same requests at the same moments through
// each way of choosing one: policies of kvatlas, and what routers do without an index. It holds every answer of kvatlas
// to the twin of the chosen engine, and what that engine reused to the answer. make real-vllm runs it with two tiny
// engines on the CPU; make gpu-fleet with four on GPUs.
//
// The test needs 3 GB of packages, minutes of time, gcc and x86-64 Linux, so that it has a build tag of its own,
// realvllm, and a command of its own, make real-vllm. What it judges with is built and tested without the tag:
//
//   - twin is a naive copy of what an engine has announced, with a subscription of its own. It remembers every state
//     that it was ever in.
//   - classify says to which class an answer belongs.
//   - generator makes requests from a seed.
package vllm
