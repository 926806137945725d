package msgp

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/tools/randval"
	"github.com/vmihailenco/msgpack/v5"
)

// readAny reads the next value with the reader's methods, in the types of the other library.
func readAny(r *Reader) (any, bool) {
	switch r.Next() {
	case Nil:
		return nil, r.Null()
	case Bool:
		return r.Bool()
	case Int:
		v, negative, ok := r.Int()
		if negative {
			return int64(v), ok
		}
		return v, ok
	case Float:
		return r.Float()
	case Str:
		b, ok := r.Str()
		return string(b), ok
	case Bin:
		b, ok := r.Bin()
		return slices.Clone(b), ok
	case Array:
		n, ok := r.Array()
		values := make([]any, n)
		for i := range values {
			if values[i], ok = readAny(r); !ok {
				return nil, false
			}
		}
		return values, ok
	case Map:
		n, ok := r.Map()
		values := map[string]any{}
		for range n {
			key, keyOK := r.Str()
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
		x, xNegative, xOK := randval.AsInteger(a)
		y, yNegative, yOK := randval.AsInteger(b)
		if xOK || yOK {
			return xOK && yOK && x == y && xNegative == yNegative
		}
		return a == b
	}
}

// TestReaderTwin: the reader reads the output of another library with the same result, skips whole values, and detects
// any truncation.
func TestReaderTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for i := range testkit.Rounds(1500) {
		var buffer bytes.Buffer
		e := msgpack.NewEncoder(&buffer)
		e.UseCompactInts(i%2 == 0)
		e.UseCompactFloats(false)
		value := randval.Value(r, 0)
		if err := e.Encode(value); err != nil {
			t.Fatal(err)
		}
		encoded := buffer.Bytes()
		var want any
		if err := msgpack.Unmarshal(encoded, &want); err != nil {
			t.Fatal(err)
		}
		one := Reader{Data: encoded}
		if got, ok := readAny(&one); !ok || !sameValue(want, got) || one.Left() != 0 || one.Broken {
			t.Fatalf("%x: read %v (%v), want %v", encoded, got, ok, want)
		}
		two := Reader{Data: encoded}
		if !two.Skip() || two.Left() != 0 || two.Broken {
			t.Fatalf("%x: skipped %d of %d bytes", encoded, two.At, len(encoded))
		}
		if len(encoded) == 0 {
			continue
		}
		cut := Reader{Data: encoded[:r.IntN(len(encoded))]}
		if cut.Skip() || !cut.Broken {
			t.Fatalf("%x: Skip accepted %d bytes of it", encoded, len(cut.Data))
		}
	}
}

// TestWriterTwin: another library reads the output of this package with the same result.
func TestWriterTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range testkit.Rounds(3000) {
		v, s, flag, n := randval.Int(r), string(randval.Bytes(r)), r.IntN(2) == 0, r.IntN(100_000)
		var b []byte
		b = AppendArrayHead(b, 5)
		b = AppendUint(b, v)
		b = AppendStr(b, s)
		b = AppendBool(b, flag)
		b = AppendNil(b)
		b = AppendArrayHead(b, n)
		if size := 1 + UintSize(v) + StrSize(len(s)) + 1 + 1 + ArrayHeadSize(n); size != len(b) {
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
	for range testkit.Rounds(3000) {
		want := make([]uint32, r.IntN(60))
		for i := range want {
			want[i] = uint32(randval.Int(r))
		}
		var encoded []byte
		for _, v := range want {
			switch r.IntN(8) {
			case 0: // wider than any engine writes it
				encoded = append(encoded, CodeUint64, 0, 0, 0, 0, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
			case 1:
				encoded = append(encoded, codeUint32, byte(v>>24), byte(v>>16), byte(v>>8), byte(v))
			default:
				encoded = AppendUint(encoded, uint64(v))
			}
		}
		one := Reader{Data: encoded}
		if got, ok := one.Uint32s([]uint32{9}, len(want)); !ok || !slices.Equal(got[1:], want) || one.Left() != 0 {
			t.Fatalf("%d (%v), want %d", got, ok, want)
		}
		// A value that is not a token stops the reader at that value.
		bad := r.IntN(len(want) + 1)
		var broken []byte
		for _, v := range want[:bad] {
			broken = AppendUint(broken, uint64(v))
		}
		at := len(broken)
		bads := [][]byte{{CodeNil}, {0xff}, {codeFixStr}, {CodeUint64, 0, 0, 0, 1, 0, 0, 0, 0}, {codeInt8, 0x80}}
		broken = append(broken, bads[r.IntN(5)]...)
		broken = append(broken, encoded...)
		two := Reader{Data: broken}
		if got, ok := two.Uint32s(nil, len(want)+1); ok || !slices.Equal(got, want[:bad]) || two.At != at || two.Broken {
			t.Fatalf("%d (%v) at %d, want %d at %d", got, ok, two.At, want[:bad], at)
		}
	}
}

// TestReaderSkipsHostileInput: depth and large counts cost no more than the bytes.
func TestReaderSkipsHostileInput(t *testing.T) {
	deep := append(bytes.Repeat([]byte{codeFixArray | 1}, 1<<20), CodeNil)
	r := Reader{Data: deep}
	if !r.Skip() || r.Left() != 0 {
		t.Error("Skip fails for a deep value")
	}
	wide := bytes.Repeat([]byte{codeFixArray | 15}, 1<<20)
	r = Reader{Data: wide}
	if r.Skip() || !r.Broken {
		t.Error("Skip accepts arrays with missing elements")
	}
	for _, head := range [][]byte{
		{codeArray32, 0xff, 0xff, 0xff, 0xff}, {codeMap32, 0xff, 0xff, 0xff, 0xff}, {codeMap16, 0, 3, 1, 1, 1, 1},
		{codeBin32, 0xff, 0xff, 0xff, 0xff}, {codeStr32, 0x80, 0, 0, 0}, {codeExt32, 0xff, 0xff, 0xff, 0xff, 1},
		{codeNever}, {},
	} {
		r := Reader{Data: head}
		if r.Skip() || !r.Broken {
			t.Errorf("Skip accepts %x", head)
		}
		if r.Next() != None {
			t.Errorf("%x: something follows", head)
		}
	}
	for _, ext := range [][]byte{
		{codeFixExt1, 1, 2}, {codeFixExt16, 16: 0, 17: 0}, {codeExt8, 1, 7, 9}, {codeExt8, 0, 7},
		{codeExt32, 0, 0, 0, 2, 7, 1, 1}, {codeExt8 + 1, 0, 1, 7, 1},
	} {
		r := Reader{Data: ext}
		if !r.Skip() || r.Left() != 0 {
			t.Errorf("extension %x: %d bytes left", ext, r.Left())
		}
	}
}
