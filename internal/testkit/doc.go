// Package testkit has helpers for the tests of several packages. The product does not import the package.
//
// [Eventually] waits for a condition, in real time or in a bubble of testing/synctest. [Main] runs waiting tests
// concurrently, and [Group] their subtests. [Rounds] shortens random tests unless [Whole] is true, and more under the
// race detector. [Sequential] skips sequential tests there. Package integration/harness starts programs.
//
// Packages of this folder:
//
//   - logtest passes log lines to tests
//   - natskit starts NATS servers in the process of a test
//   - simnet simulates a network of state machines in virtual time
package testkit
