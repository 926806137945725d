// Package pyenv provides Python environments and real third-party components for tests and benchmarks.
//
// Downloads and uses are separate. [FetchEnvironment], [FetchWheels], [FetchLibraries] and [FetchProgram] put pinned
// components into the user's cache folder, with the machine's own package settings, and print their progress. `make
// judges` calls them first (integration/judges/fetch). A file lock serializes processes with the same target, and a
// complete component gets its final name at the end. Tests only use present components. With a missing component, a
// test fails and names the command for the download. No test downloads or skips.
//
// [Python] returns an interpreter with the packages of integration/python/requirements.txt. [PythonWith] does the same
// for another file in that folder. The files pin every package with a version, so pip resolves nothing.
//
// [Wheel] returns a wheel that integration/python/wheels.txt pins with a hash. Wheels are not installed. Scripts import
// single modules from a wheel and replace further imports by stubs, so an engine's own code runs without the engine.
//
// [Program] returns a Rust program with another component's own code and a main function of this project. Cargo.lock
// pins the crates.
//
// [StartEngine] starts integration/python/engine.py: an engine's own publisher and, for vLLM, the cache manager.
// [StartPublisher] starts integration/python/publisher.py, a publisher on real libzmq that can produce every kind of
// fault. Go methods control both.
package pyenv
