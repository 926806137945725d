// Package kube runs kvatlas on a real Kubernetes: the chart, the manifests and every YAML block of docs/kubernetes.md.
// Build tag kube; `make kube` builds the programs of the cluster first (fetch), in modules of their own (parts).
//
//	make kube
//	go test -tags kube -count 1 -v ./integration/judges/kube -run 'TestChart$'
//
// cluster.sh runs the control plane and three nodes in namespaces of this machine, for which the tests need root.
// Nothing outside these namespaces changes, and everything ends with the test process. Engines are stand-ins (engine),
// as no GPU is there; everything else is real, NetworkPolicies included.
package kube
