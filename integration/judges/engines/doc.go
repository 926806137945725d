// Package engines compares the decoders, the hashes and the answers with the engines' own code from their wheels: the
// event publishers and cache managers of vLLM and SGLang, and the names of blocks in a shared store. Build tag judges;
// see `make judges`.
package engines
