// Package mooncake stores pages in a real Mooncake master and looks them up. Build tag judges; see `make judges`.
package mooncake
