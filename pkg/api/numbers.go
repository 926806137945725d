package api

import "github.com/kvatlas/kvatlas/internal/base/littleendian"

// Tokens are token ids. JSON: an array of numbers. MessagePack: the same, or a bin of little-endian u32.
type Tokens []uint32

// Hashes are local hashes of blocks. JSON: an array of unsigned numbers, of negative numbers for clients with signed
// 64-bit numbers, or of text in decimal digits for clients that round numbers above 2^53. MessagePack: the same, or a
// bin of little-endian u64.
type Hashes []uint64

// IsZero reports whether the list is nil. An empty list is a prompt without a whole block.
func (t Tokens) IsZero() bool { return t == nil }

// IsZero reports whether the list is nil. An empty list is a prompt without a whole block.
func (h Hashes) IsZero() bool { return h == nil }

// ReadTokens reads an array in JSON. Errors contain the name. null becomes nil.
func ReadTokens(name string, data []byte) (t Tokens, err error) {
	switch s := (&jsonSource{data: data}); s.kind() {
	case kindNull:
	case kindList:
		t, err = s.tokens(name)
	default:
		err = Errorf(CodeBadTokens, "%s is %s, not an array, each of it %s", name, s.shown(), wantToken)
	}
	return t, err
}

// ReadHashes reads an array in JSON. Errors contain the name. null becomes nil.
func ReadHashes(name string, data []byte) (h Hashes, err error) {
	switch s := (&jsonSource{data: data}); s.kind() {
	case kindNull:
	case kindList:
		h, err = s.hashes(name)
	default:
		err = Errorf(CodeMalformed, "%s is %s, not an array, each of it %s", name, s.shown(), wantHash)
	}
	return h, err
}

// UnmarshalJSON reads an array. The error names the first element that is no token.
func (t *Tokens) UnmarshalJSON(data []byte) (err error) {
	*t, err = ReadTokens("tokens", data)
	return err
}

// UnmarshalJSON reads an array. The error names the first element that is no hash.
func (h *Hashes) UnmarshalJSON(data []byte) (err error) {
	*h, err = ReadHashes("hashes", data)
	return err
}

// readTokens reads little-endian u32.
func readTokens(b []byte) Tokens {
	t := make(Tokens, len(b)/4)
	littleendian.Read(t, b)
	return t
}

// readHashes reads little-endian u64.
func readHashes(b []byte) Hashes {
	h := make(Hashes, len(b)/8)
	littleendian.Read(h, b)
	return h
}
