// Package randval makes random values for tests of decoders.
package randval

import "math/rand/v2"

// Value returns a random value of any MessagePack type in any width. depth is the depth of nesting.
func Value(r *rand.Rand, depth int) any {
	kinds := 12
	if depth > 4 {
		kinds = 9
	}
	switch r.IntN(kinds) {
	case 0:
		return nil
	case 1:
		return r.IntN(2) == 0
	case 2:
		return Int(r)
	case 3:
		return -int64(Int(r) >> 1)
	case 4:
		return Int(r)
	case 5:
		return r.NormFloat64()
	case 6:
		return float32(r.NormFloat64())
	case 7:
		return Bytes(r)
	case 8:
		return string(Bytes(r))
	case 9, 10:
		values := make([]any, r.IntN(20))
		for i := range values {
			values[i] = Value(r, depth+1)
		}
		return values
	default:
		values := map[string]any{}
		for range r.IntN(20) {
			values[string(Bytes(r))] = Value(r, depth+1)
		}
		return values
	}
}

// Int is a number of any size.
func Int(r *rand.Rand) uint64 { return r.Uint64() >> r.IntN(64) }

// Bytes returns a text that is usually short.
func Bytes(r *rand.Rand) []byte {
	n := r.IntN(40)
	switch r.IntN(30) {
	case 0:
		n = r.IntN(400)
	case 1:
		n = r.IntN(70_000)
	}
	b := make([]byte, n)
	for i := range b {
		b[i] = byte('a' + i%26)
	}
	return b
}

// AsInteger returns a decoded integer of any type modulo 2^64, and whether the value is negative.
func AsInteger(v any) (bits uint64, negative, ok bool) {
	switch v := v.(type) {
	case int8:
		return uint64(v), v < 0, true
	case int16:
		return uint64(v), v < 0, true
	case int32:
		return uint64(v), v < 0, true
	case int64:
		return uint64(v), v < 0, true
	case uint8:
		return uint64(v), false, true
	case uint16:
		return uint64(v), false, true
	case uint32:
		return uint64(v), false, true
	case uint64:
		return v, false, true
	}
	return 0, false, false
}
