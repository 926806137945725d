//go:build !linux

package bench

import "runtime"

// resident is what the Go runtime has from the system: here this does not see what the index maps by itself.
func resident() (int64, error) {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.Sys - m.HeapReleased), nil
}
