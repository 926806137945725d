//go:build unix && !linux

package corpus

// adviseHuge does nothing: there is no such advice here.
func adviseHuge([]byte) {}
