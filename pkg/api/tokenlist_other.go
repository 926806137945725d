//go:build !amd64

package api

// shortNumbers appends to dst, up to its capacity, the numbers of at most seven digits at the front of data that each
// have a comma behind them, with a blank after it or none. It returns their length with these.
func shortNumbers(dst []uint32, data []byte) ([]uint32, int) { return wordNumbers(dst, data) }
