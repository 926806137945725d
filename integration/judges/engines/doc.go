// Package engines judges the decoders, the hashes and the answers by the engines' own code: the event publishers and
// cache managers of vLLM and SGLang, and what they call blocks in a shared store, all run out of their wheels. Build
// tag judges; see `make judges`.
package engines
