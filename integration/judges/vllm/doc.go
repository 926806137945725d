// Package vllm compares kvatlas with a complete real vLLM: API server, engine core, worker, scheduler, block pool and
// event publisher, on the CPU, with a small model of random weights.
//
// Before every request, the test queries an indexer for the engine's blocks of the prompt. Then the request goes to the
// engine, and the answer has the number of reused tokens (usage.prompt_tokens_details.cached_tokens). The two must be
// equal, or the difference must belong to a class in docs/engines/vllm.md. Any other difference fails the test.
//
// TestFleet runs several engines, each with a shim and a twin, and sends the same requests at the same moments with
// every routing method: policies of kvatlas, and methods of routers without an index. It compares every answer of
// kvatlas with the twin of the chosen engine, and the engine's reuse with the answer. make real-vllm runs the test with
// two small engines on the CPU; make gpu-fleet with four on GPUs.
//
// TestGateway and TestGatewayPools send requests of clients through a real Envoy with an indexer. TestGateway compares
// answers to texts with answers to the token ids of --forward-tokens. TestGatewayPools compares answers of a prefill
// and a decode engine with answers of a single engine.
//
// The tests need 3 GB of packages, minutes of time, gcc and x86-64 Linux. So the test has a separate build tag,
// realvllm, and a separate command, make real-vllm. The parts for the judgement are built and tested without the tag:
//
//   - twin is a naive copy of an engine's announced state, with a separate subscription. It keeps all past states.
//   - classify returns the class of an answer.
//   - generator makes requests from a seed.
package vllm
