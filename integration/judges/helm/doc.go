// Package helm renders deploy/helm/kvatlas with Helm's own library, and holds it to deploy/kubernetes, to its schema of
// values, and to the programs' flags. It is a module of its own, so that nothing of Helm's library is among the
// requirements of kvatlas. `make judges` runs it:
//
//	cd integration/judges/helm && go test .
//
// The renderings in testdata, written by `go test . -update`, are what integration/judges/kubernetes checks against
// Kubernetes' schemas and runs.
package helm
