// Package mixed runs the previous version beside the current version, in the same cluster and in sequence on the same
// log and snapshots. The history of the repository must contain the previous version. Build tag judges; see `make
// judges`.
package mixed
