// Package kube runs kvatlas on a real Kubernetes: the chart, the manifests and every YAML block of docs/kubernetes.md
// and docs/scaling.md. Build tag kube. `make kube` first builds the programs of the cluster (fetch), in separate
// modules (parts).
//
//	make kube
//	go test -tags kube -count 1 -v ./integration/judges/kube -run 'TestChart$'
//
// cluster.sh runs the control plane and three nodes in namespaces of this machine. The tests need root. They change
// nothing outside of the namespaces, and all processes end with the test process. Engines are simulated (engine),
// because the machine has no GPU. All other parts are real, including NetworkPolicies.
package kube
