// Package envoy runs a real Envoy, with the configuration of deploy/envoy, before simulated engines and with an indexer
// for the choice. Build tag judges; see `make judges`.
package envoy
