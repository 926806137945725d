//go:build !race

package radix

const requestsByDefault = 1_000_000
