// Package kvindexerpb is the protocol by which SGLang's router asks an index, kv_indexer.v1, in Go code made from
// kv_indexer.proto.
package kvindexerpb

import _ "embed"

// Proto is the protocol as text, kv_indexer.proto.
//
//go:generate go run generate.go
//go:embed kv_indexer.proto
var Proto []byte
