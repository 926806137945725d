// Package mooncake puts pages into a real Mooncake master and asks for them. Build tag judges; see `make judges`.
package mooncake
