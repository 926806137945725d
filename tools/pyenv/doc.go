// Package pyenv answers one question, for tests and benchmarks only: where is a Python that has what our tests of real
// third-party components need, and where are those components?
//
// Fetching and using are apart. [FetchEnvironment], [FetchWheels], [FetchLibraries] and [FetchProgram] put what is
// pinned into the user's cache folder, with the machine's own package settings, and tell what they do; `make judges`
// runs them first (integration/judges/fetch). Processes that want the same thing wait for each other by a file lock,
// and it appears under its name only when it is complete. Tests use what is there: where it is missing they fail, and
// name the command that fetches it. No test fetches anything, and none is left out.
//
// [Python] gives an interpreter with the packages of integration/python/requirements.txt, [PythonWith] one with those
// of another file there. Such a file names every package with its version: nothing is resolved.
//
// [Wheel] gives a wheel that is pinned with its hash in integration/python/wheels.txt. It is not installed: scripts
// import single modules out of it and answer what those import in turn with stubs, so that an engine's own code runs
// without the engine.
//
// [Program] gives a Rust program that was built from crates pinned in its Cargo.lock: another component's own code with
// a main of ours around it.
//
// [StartEngine] starts integration/python/engine.py, an engine's own publisher and, of vLLM, its own cache manager.
// [StartPublisher] starts integration/python/publisher.py, an event publisher of ours on real libzmq that can make
// every kind of trouble. Both are driven by their methods.
package pyenv
