//go:build unix && !linux

package corpus

// adviseHuge does nothing on this system.
func adviseHuge([]byte) {}
