// Package sglang asks a running indexer as SGLang's router does: hashes are of SGLang's own code, the gRPC client is
// generated from the published .proto file by protoc for Python, and blocks are announced by SGLang's own publisher.
// Build tag judges; see `make judges`.
package sglang
