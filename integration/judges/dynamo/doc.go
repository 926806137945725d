// Package dynamo puts NVIDIA Dynamo's indexer, hash function and mocker beside ours: the same requests and events go to
// both, and what differs is named in testdata/dynamo-differences.md. Build tag judges; see `make judges`.
package dynamo
