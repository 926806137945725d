// Package helm renders deploy/helm/kvatlas with Helm's own library, and compares the result with deploy/kubernetes, the
// schema of values and the programs' flags. The package is a separate module, so kvatlas does not depend on Helm's
// library. `make judges` runs the tests:
//
//	cd integration/judges/helm && go test .
//
// `go test . -update` writes the renderings in testdata. integration/judges/kubernetes checks them against Kubernetes'
// schemas and runs them.
package helm
