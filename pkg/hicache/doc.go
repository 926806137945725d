// Package hicache answers: what does an engine call the blocks of a prompt in a shared store, and what of it would the
// engine load from there?
//
// # In order of use
//
// Workers register a [Config]; [Config.Check] says what is wrong with one, [Share] joins those of one model or says who
// contradicts whom. [Config.Prompt] names what a store may hold of a prompt, a [Cache] in front of a [Store] says what
// of it is there, and [Prompt.Map] what that means for the index's blocks: [Map.Load] is how many of them a worker
// would load beyond what it has, and why no more. A [Mirror] is a store that answers from the events of a Mooncake
// master what it can, and asks the master for the rest.
//
// Beneath, for SGLang's HiCache, [SGLang.PageHashes] hashes a prompt, [SGLang.Keys] names the objects of its pages, and
// [SGLang.Rule] is what the engine loads. For vLLM's MooncakeStoreConnector [VLLM.Digests] hashes a prompt,
// [Prompt.Keys] names the objects of a block, and a [Coordinator] says how long a prefix all KV-cache groups of a
// hybrid model can go on from.
//
// # Promises
//
//  1. Names and hits are those of the engines' own code.
//  2. What a configuration says wrongly is an error that names the field or the rule; nothing that is registered makes
//     this package panic once Check has passed.
//  3. The arithmetic starts no goroutine, reads no clock and changes no argument. Configurations and coordinators do
//     not change and can be shared by any number of goroutines.
package hicache
