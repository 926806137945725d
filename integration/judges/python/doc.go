// Package python builds clients/python, the Python package kvatlas, offline, checks its types, and runs its tests
// against real indexers: over HTTP and NATS, with a token and TLS, and while a node is killed. Build tag judges; see
// `make judges`.
package python
