// Package torture runs deployments of real processes under load with all kinds of faults. The engines are publishers on
// real libzmq. Build tag judges; see `make judges`.
package torture
