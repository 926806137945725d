// Package top has tmux, a real terminal, show indexer top beside simulated engines, and compares what it shows with
// what indexer workers and loads print: with keys, two sizes of the terminal, and a NATS server that goes and comes
// back. Build tag judges; see `make judges`.
package top
