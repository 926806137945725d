// Package pyenv answers one question, for tests and benchmarks only: where is a Python that has what our tests of real third-party
// components need, and where are those components?
//
// [Python] gives an interpreter with the packages of integration/python/requirements.txt, [PythonWith] one with those of another file
// there; [Find] is the same outside of tests. Such a file names every package with its version: nothing is resolved. The first call on a machine makes
// a virtual environment for it in the user's cache folder, with the machine's own package settings; later calls find it.
// Test packages that run at the same time wait for each other by a file lock, and an environment appears under its name only
// when it is complete.
//
// [Wheel] gives a wheel that is pinned with its hash in integration/python/wheels.txt. It is not installed: scripts import
// single modules out of it and answer what those import in turn with stubs, so that an engine's own code runs without the engine.
//
// [StartEngine] starts integration/python/engine.py, an engine's own publisher and, of vLLM, its own cache manager.
// [StartPublisher] starts integration/python/publisher.py, an event publisher of ours on real libzmq that can make every kind
// of trouble. Both are driven by their methods.
//
// A machine without python3 fails the test and says what to install. Under go test -short, tests that need Python are
// left out, each with a sentence that says so.
package pyenv
