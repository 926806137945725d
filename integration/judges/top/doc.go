// Package top runs indexer top in tmux, a real terminal, with simulated engines, and compares the screen with the
// output of indexer workers and loads. It uses keys, two sizes of the terminal, and an outage of the NATS server. Build
// tag judges; see `make judges`.
package top
