// Package kubernetes holds deploy/kubernetes, and what the chart deploy/helm makes, to Kubernetes' own schemas, and
// runs the programs with their arguments. Build tag judges; see `make judges`.
package kubernetes
