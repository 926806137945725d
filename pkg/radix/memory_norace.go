//go:build !race

package radix

// usualLimits are the default limits of an index.
var usualLimits = mappedLimits
