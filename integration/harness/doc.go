// Package harness starts our programs, NATS servers and simulated engines for tests, and waits for their output. The
// tests of integration and of integration/judges share it; nothing else uses it.
//
// A package of such tests has a TestMain that calls [Main]. [Start] runs a program until the test ends, [Run] runs one
// to its end, [StartIndexer] runs an indexer with a server of its own, [StartSimEngine] and [StartSimShim] run an
// engine and the shim beside it. Every wait has [Patience].
package harness
