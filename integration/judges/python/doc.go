// Package python builds clients/python, the Python package kvatlas, offline, checks the types, and runs the tests
// against real indexers: over HTTP and NATS, with a token and TLS, and during the kill of a node. Ray Serve's and
// LiteLLM's own packages load the adapters. Build tag judges; see `make judges`.
package python
