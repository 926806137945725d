//go:build race

package radix

import "math"

// usualLimits keep arrays on the heap, where the race detector sees them. Tests map some all the same.
var usualLimits = limits{mapped: math.MaxInt}
