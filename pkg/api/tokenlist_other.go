//go:build !amd64

package api

// shortNumbers appends to dst, up to its capacity, the numbers of at most seven digits at the front of data that have a
// comma after each, with at most one blank after the comma. It returns the length of the numbers and separators.
func shortNumbers(dst []uint32, data []byte) ([]uint32, int) { return wordNumbers(dst, data) }
