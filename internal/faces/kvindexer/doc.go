// Package kvindexer answers SGLang's router, which asks over gRPC (kv_indexer.v1.KVIndexer) which of its workers hold
// how many leading blocks of a prompt:
//
//	service := kvindexer.New(kvindexer.Config{Find: find, Pools: registry.Pools})
//	kvindexerpb.RegisterKVIndexerServer(registrar, service)
//
// The router names blocks as SGLang's events do, and no model. All models of the namespace are asked by engine hashes:
// these differ by tokens only, so workers of two models that were sent the same tokens are both named, and the router
// heeds the addresses that it was given.
//
// A depth is that in device and host memory together, by the rules of the worker's groups. Of several ranks at one
// address the deepest counts. Ranks without an address are left out.
package kvindexer
