// Package keda applies the YAML of docs/scaling.md to KEDA's own scale handler, which asks a real indexer for the
// waiting work. The package is a separate module, so kvatlas does not depend on KEDA and its SDKs of all clouds.
// `make keda` runs the tests, once a day, because the first build is long.
//
// The objects of the page are in the in-memory client of controller-runtime, in place of an API server. KEDA resolves
// the secret, builds the scaler and requests the metric as in its operator.
package keda
