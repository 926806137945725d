// Package kvindexer answers SGLang's router over gRPC (kv_indexer.v1.KVIndexer). For a prompt's blocks, it returns the
// number of leading blocks on each worker:
//
//	service := kvindexer.New(kvindexer.Config{Find: find, Pools: registry.Pools})
//	kvindexerpb.RegisterKVIndexerServer(registrar, service)
//
// The router identifies blocks as SGLang's events do, and names no model. The service queries all models of the
// namespace by engine hashes. These hashes depend only on tokens, so the answer may contain workers of two models with
// the same tokens. The router ignores the addresses of workers that it does not use.
//
// A depth counts device and host memory together, by the rules of the worker's groups. Of several ranks at one address,
// the deepest counts. Ranks without an address are left out.
package kvindexer
