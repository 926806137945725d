// Package openapi runs schemathesis on a real indexer, with valid and invalid requests by the OpenAPI document. Build
// tag judges; see `make judges`.
package openapi
