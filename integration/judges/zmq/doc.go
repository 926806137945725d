// Package zmq tests the whole path, from a publisher on real libzmq to a user's answer. Build tag judges; see `make
// judges`.
package zmq
