//go:build !linux

package bench

import "runtime"

// resident returns the memory of the Go runtime in bytes. On this system the result excludes the mappings of the index.
func resident() (int64, error) {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.Sys - m.HeapReleased), nil
}
