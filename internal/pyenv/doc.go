// Package pyenv answers one question, for tests only: where is a Python that has what our tests of real third-party
// components need?
//
// [Python] gives an interpreter with the packages of integration/python/requirements.txt. The first call on a machine makes
// a virtual environment for it in the user's cache folder, with the machine's own package settings; later calls find it.
// Test packages that run at the same time wait for each other by a file lock, and an environment appears under its name only
// when it is complete.
//
// [StartPublisher] starts integration/python/publisher.py, an engine's event publisher on real libzmq, and drives it.
//
// A machine without python3 fails the test and says what to install. Under go test -short, tests that need Python are
// left out, each with a sentence that says so.
package pyenv
