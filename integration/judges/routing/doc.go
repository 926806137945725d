// Package routing puts NVIDIA Dynamo's worker selector, of the crate dynamo-kv-router, beside the policy dynamo of
// pkg/routing: the same calls go to both. judge is a program in Rust around the crate. Build tag judges; see
// `make judges`.
package routing
