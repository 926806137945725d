//go:build race

package radix

import "math"

// usualLimits keep arrays on the heap for the race detector. Some tests map arrays nevertheless.
var usualLimits = limits{mapped: math.MaxInt}
