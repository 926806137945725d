// Package hicache answers: what does an engine call the blocks of a prompt in a shared store, and what of it would the engine
// load from there?
//
// # In order of use
//
// Workers register a [Config]; [Config.Check] says what is wrong with one, [Agree] joins those of one model or says why it cannot.
// For SGLang's HiCache [SGLang.PageHashes] hashes a prompt, [SGLang.Keys] names the objects of its pages, [PageKeys.Pages] folds the
// store's answers back into pages, and [SGLang.WouldLoad] says what a worker would load of them beyond what it has. For
// vLLM's MooncakeStoreConnector [VLLM.KeyPrefixes] and [Key] name the objects of a block, and a [Coordinator] says how long a
// prefix all KV-cache groups of a hybrid model can go on from.
//
// # Promises
//
//  1. Names and hits are those of the engines' own code.
//  2. What a configuration says wrongly is an error that names the field or the rule; nothing that is registered makes this
//     package panic once Check has passed.
//  3. The arithmetic starts no goroutine, reads no clock and changes no argument. Configurations and coordinators do not change and can be
//     shared by any number of goroutines.
package hicache
