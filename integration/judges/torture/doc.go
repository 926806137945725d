// Package torture keeps deployments of real processes under load while whatever can fail does. Its engines are
// publishers on real libzmq. Build tag judges; see `make judges`.
package torture
