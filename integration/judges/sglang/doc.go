// Package sglang sends queries to a running indexer as SGLang's router does. SGLang's own code computes the hashes,
// protoc for Python generates the gRPC client from the published .proto file, and SGLang's own publisher announces
// blocks. Build tag judges; see `make judges`.
package sglang
