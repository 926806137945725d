// Package kvindexerpb is the protocol by which SGLang's router asks an index, kv_indexer.v1, in Go code made from
// kv_indexer.proto.
package kvindexerpb

//go:generate go run generate.go
