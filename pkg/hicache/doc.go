// Package hicache computes the names of a prompt's blocks in a shared store, and the blocks that an engine would load
// from the store.
//
// # In order of use
//
// Workers register a [Config]. [Config.Check] validates a configuration. [Share] joins the configurations of a model's
// workers, or returns a conflict. [Config.Prompt] returns the names of a prompt's blocks. A [Cache] in front of a
// [Store] looks up the names. [Prompt.Map] converts the result to the index's blocks. [Map.Load] returns the number of
// blocks that a worker would load beyond its own, and the reason for the limit. The stores themselves are in
// internal/ingest/sharedstore.
//
// For SGLang's HiCache, [SGLang.PageHashes] hashes a prompt, [SGLang.Keys] names the objects of the pages, and
// [SGLang.Rule] describes the engine's loads. For vLLM's MooncakeStoreConnector, [VLLM.Digests] hashes a prompt,
// [Prompt.Keys] names the objects of a block, and a [Coordinator] computes the longest prefix that all KV-cache groups
// of a hybrid model can continue.
//
// # Guarantees
//
//  1. Names and hits equal the results of the engines' own code.
//  2. An invalid configuration is an error that names the field or the rule. A configuration that passes Check never
//     makes this package panic.
//  3. The computations start no goroutine, read no clock and change no argument. Configurations and coordinators are
//     immutable and safe for concurrent use.
package hicache
