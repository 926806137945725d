// Package kubernetes holds deploy/kubernetes to Kubernetes' own schemas. Build tag judges; see `make judges`.
package kubernetes
