// Package kvindexerpb contains the protocol between SGLang's router and an index, kv_indexer.v1, as Go code generated
// from kv_indexer.proto.
package kvindexerpb

import _ "embed"

// Proto is the protocol as text, kv_indexer.proto.
//
//go:generate go run generate.go
//go:embed kv_indexer.proto
var Proto []byte
