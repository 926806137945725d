// Package dynamo compares NVIDIA Dynamo's indexer, hash function and mocker with kvatlas: the same requests and events
// go to both. testdata/dynamo-differences.md lists the differences. Build tag judges; see `make judges`.
package dynamo
