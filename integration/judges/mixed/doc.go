// Package mixed runs the version before beside this one: in one cluster, and one after the other on the same log and
// snapshots. The version before is built from the history of the repository, which must be there. Build tag judges; see
// `make judges`.
package mixed
