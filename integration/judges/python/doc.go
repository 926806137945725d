// Package python builds clients/python, the Python package kvatlas, offline, checks its types, and runs its tests
// against real indexers: over HTTP and NATS, with a token and TLS, and while a node is killed. Ray Serve's and
// LiteLLM's own packages load the adapters. Build tag judges; see `make judges`.
package python
