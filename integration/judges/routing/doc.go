// Package routing compares NVIDIA Dynamo's worker selector, of the crate dynamo-kv-router, with the policy dynamo of
// pkg/routing: the same calls go to both. judge is a Rust program with the crate. Build tag judges; see `make judges`.
package routing
