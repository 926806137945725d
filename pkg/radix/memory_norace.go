//go:build !race

package radix

// usualLimits are those of an index that says nothing else.
var usualLimits = mappedLimits
