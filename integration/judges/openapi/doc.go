// Package openapi has schemathesis ask a real indexer what its OpenAPI document allows, and what it forbids. Build tag
// judges; see `make judges`.
package openapi
