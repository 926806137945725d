package events

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// randomValue is a value of any type that MessagePack has, in every width.
func randomValue(r *rand.Rand, depth int) any {
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
		return randomInt(r)
	case 3:
		return -int64(randomInt(r) >> 1)
	case 4:
		return randomInt(r)
	case 5:
		return r.NormFloat64()
	case 6:
		return float32(r.NormFloat64())
	case 7:
		return randomBytes(r)
	case 8:
		return string(randomBytes(r))
	case 9, 10:
		values := make([]any, r.IntN(20))
		for i := range values {
			values[i] = randomValue(r, depth+1)
		}
		return values
	default:
		values := map[string]any{}
		for range r.IntN(20) {
			values[string(randomBytes(r))] = randomValue(r, depth+1)
		}
		return values
	}
}

func randomInt(r *rand.Rand) uint64 { return r.Uint64() >> r.IntN(64) }

func randomBytes(r *rand.Rand) []byte {
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

// readAny reads whatever comes next with the reader's own methods, in the types that the other library has.
func readAny(r *reader) (any, bool) {
	switch r.next() {
	case formNil:
		return nil, r.null()
	case formBool:
		return r.bool()
	case formInt:
		v, negative, ok := r.integer()
		if negative {
			return int64(v), ok
		}
		return v, ok
	case formFloat:
		return r.float()
	case formStr:
		b, ok := r.str()
		return string(b), ok
	case formBin:
		b, ok := r.bin()
		return slices.Clone(b), ok
	case formArray:
		n, ok := r.array()
		values := make([]any, n)
		for i := range values {
			if values[i], ok = readAny(r); !ok {
				return nil, false
			}
		}
		return values, ok
	case formMap:
		n, ok := r.mapping()
		values := map[string]any{}
		for range n {
			key, keyOK := r.str()
			if !keyOK {
				return nil, false
			}
			if values[string(key)], ok = readAny(r); !ok {
				return nil, false
			}
		}
		return values, ok
	}
	return nil, false
}

func sameValue(a, b any) bool {
	switch a := a.(type) {
	case []any:
		b, ok := b.([]any)
		return ok && slices.EqualFunc(a, b, sameValue)
	case map[string]any:
		b, ok := b.(map[string]any)
		if !ok || len(a) != len(b) {
			return false
		}
		for k, v := range a {
			w, ok := b[k]
			if !ok || !sameValue(v, w) {
				return false
			}
		}
		return true
	case []byte:
		b, ok := b.([]byte)
		return ok && bytes.Equal(a, b)
	case float32:
		return sameValue(float64(a), b)
	case float64:
		b, ok := b.(float64)
		return ok && math.Float64bits(a) == math.Float64bits(b)
	default:
		x, xNegative, xOK := asInteger(a)
		y, yNegative, yOK := asInteger(b)
		if xOK || yOK {
			return xOK && yOK && x == y && xNegative == yNegative
		}
		return a == b
	}
}

// asInteger is a decoded integer of whatever type modulo 2^64, and whether it is below zero.
func asInteger(v any) (bits uint64, negative, ok bool) {
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

// The reader reads what another library writes, as that library reads it; it passes over it as a whole; and cut off
// anywhere it says so.
func TestReaderTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for i := range 1500 {
		var encoded writeBuffer
		e := msgpack.NewEncoder(&encoded)
		e.UseCompactInts(i%2 == 0)
		e.UseCompactFloats(false)
		value := randomValue(r, 0)
		if err := e.Encode(value); err != nil {
			t.Fatal(err)
		}
		var want any
		if err := msgpack.Unmarshal(encoded, &want); err != nil {
			t.Fatal(err)
		}
		one := reader{data: encoded}
		if got, ok := readAny(&one); !ok || !sameValue(want, got) || one.left() != 0 || one.broken {
			t.Fatalf("%x: read %v (%v), want %v", encoded, got, ok, want)
		}
		two := reader{data: encoded}
		if !two.skip() || two.left() != 0 || two.broken {
			t.Fatalf("%x: passed over %d of %d bytes", encoded, two.at, len(encoded))
		}
		if len(encoded) == 0 {
			continue
		}
		cut := reader{data: encoded[:r.IntN(len(encoded))]}
		if cut.skip() || !cut.broken {
			t.Fatalf("%x, cut to %d bytes, is passed over", encoded, len(cut.data))
		}
	}
}

// What is written is read by another library as the same.
func TestWriterTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 3000 {
		v, s, flag, n := randomInt(r), string(randomBytes(r)), r.IntN(2) == 0, r.IntN(100_000)
		var b []byte
		b = appendArrayHead(b, 5)
		b = appendUint(b, v)
		b = appendStr(b, s)
		b = appendBool(b, flag)
		b = appendNil(b)
		b = appendArrayHead(b, n)
		if size := 1 + uintSize(v) + strSize(len(s)) + 1 + 1 + arrayHeadSize(n); size != len(b) {
			t.Fatalf("size %d, is %d", size, len(b))
		}
		d := msgpack.NewDecoder(bytes.NewReader(b))
		if got, err := d.DecodeArrayLen(); err != nil || got != 5 {
			t.Fatal(got, err)
		}
		if got, err := d.DecodeUint64(); err != nil || got != v {
			t.Fatalf("%d, %v, want %d", got, err, v)
		}
		if got, err := d.DecodeString(); err != nil || got != s {
			t.Fatalf("%q, %v, want %q", got, err, s)
		}
		if got, err := d.DecodeBool(); err != nil || got != flag {
			t.Fatal(got, err)
		}
		if err := d.DecodeNil(); err != nil {
			t.Fatal(err)
		}
		if got, err := d.DecodeArrayLen(); err != nil || got != n {
			t.Fatalf("%d, %v, want %d", got, err, n)
		}
	}
}

func TestReaderTokens(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for range 3000 {
		want := make([]uint32, r.IntN(60))
		for i := range want {
			want[i] = uint32(randomInt(r))
		}
		var encoded []byte
		for _, v := range want {
			switch r.IntN(8) {
			case 0: // as wide as no engine writes it
				encoded = append(encoded, mpUint64, 0, 0, 0, 0, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
			case 1:
				encoded = append(encoded, mpUint32, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
			default:
				encoded = appendUint(encoded, uint64(v))
			}
		}
		one := reader{data: encoded}
		if got, ok := one.tokens([]uint32{9}, len(want)); !ok || !slices.Equal(got[1:], want) || one.left() != 0 {
			t.Fatalf("%d (%v), want %d", got, ok, want)
		}
		// One that is no token stops it just there.
		bad := r.IntN(len(want) + 1)
		var broken []byte
		for _, v := range want[:bad] {
			broken = appendUint(broken, uint64(v))
		}
		at := len(broken)
		broken = append(broken, [][]byte{{mpNil}, {0xff}, {mpFixStr}, {mpUint64, 0, 0, 0, 1, 0, 0, 0, 0},
			{mpInt8, 0x80}}[r.IntN(5)]...)
		broken = append(broken, encoded...)
		two := reader{data: broken}
		if got, ok := two.tokens(nil, len(want)+1); ok || !slices.Equal(got, want[:bad]) || two.at != at || two.broken {
			t.Fatalf("%d (%v) at %d, want %d at %d", got, ok, two.at, want[:bad], at)
		}
	}
}

// Depth and great numbers cost no more than their bytes.
func TestReaderSkipsWhatIsHostile(t *testing.T) {
	deep := append(bytes.Repeat([]byte{mpFixArray | 1}, 1<<20), mpNil)
	r := reader{data: deep}
	if !r.skip() || r.left() != 0 {
		t.Error("a deep value is not passed over")
	}
	wide := bytes.Repeat([]byte{mpFixArray | 15}, 1<<20)
	r = reader{data: wide}
	if r.skip() || !r.broken {
		t.Error("arrays that promise more than there is are passed over")
	}
	for _, head := range [][]byte{
		{mpArray32, 0xff, 0xff, 0xff, 0xff}, {mpMap32, 0xff, 0xff, 0xff, 0xff}, {mpMap16, 0, 3, 1, 1, 1, 1},
		{mpBin32, 0xff, 0xff, 0xff, 0xff}, {mpStr32, 0x80, 0, 0, 0}, {mpExt32, 0xff, 0xff, 0xff, 0xff,
			1}, {mpNever}, {},
	} {
		r := reader{data: head}
		if r.skip() || !r.broken {
			t.Errorf("%x is passed over", head)
		}
		if r.next() != formNone {
			t.Errorf("%x: something follows", head)
		}
	}
	for _, ext := range [][]byte{{mpFixExt1, 1, 2}, {mpFixExt16, 16: 0, 17: 0}, {mpExt8, 1, 7, 9}, {mpExt8, 0, 7},
		{mpExt32, 0, 0, 0, 2, 7, 1, 1}, {mpExt8 + 1, 0, 1, 7, 1}} {
		r := reader{data: ext}
		if !r.skip() || r.left() != 0 {
			t.Errorf("extension %x: %d bytes left", ext, r.left())
		}
	}
}
