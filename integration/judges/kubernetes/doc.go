// Package kubernetes checks deploy/kubernetes and the output of the chart deploy/helm with Kubernetes' own schemas, and
// runs the programs with their arguments. Build tag judges; see `make judges`.
package kubernetes
