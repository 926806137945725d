// Package envoy puts a real Envoy, with the configuration of deploy/envoy, before simulated engines, and has it choose
// by an indexer. Build tag judges; see `make judges`.
package envoy
