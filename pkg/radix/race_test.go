//go:build race

package radix

const requestsByDefault = 100_000
