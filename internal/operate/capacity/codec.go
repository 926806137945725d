package capacity

import (
	"encoding/binary"
	"errors"

	"github.com/kvatlas/kvatlas/internal/operate/funnel"
)

// ErrMalformed is returned by Decode for bytes that Encode has not written.
var ErrMalformed = errors.New("malformed samples")

// Encode returns the references as bytes: for each, the name in 8 bytes, and varints of the time since the previous
// reference, the place, the rest, the blocks before, and the worker.
func Encode(refs []Ref) []byte {
	b := make([]byte, 0, 18*len(refs))
	at := int64(0)
	for i := range refs {
		r := &refs[i]
		b = binary.LittleEndian.AppendUint64(b, uint64(r.Name))
		b = binary.AppendVarint(b, r.At-at)
		for _, n := range []uint32{r.Place, r.Rest, r.Before, r.Worker} {
			b = binary.AppendUvarint(b, uint64(n))
		}
		at = r.At
	}
	return b
}

// Decode reads the bytes of Encode. The error is ErrMalformed.
func Decode(b []byte) (refs []Ref, err error) {
	at := int64(0)
	for len(b) > 0 {
		if len(b) < 8 {
			return nil, ErrMalformed
		}
		r := Ref{Name: funnel.Name(binary.LittleEndian.Uint64(b))}
		delta, n := binary.Varint(b[8:])
		if n <= 0 || delta < 0 {
			return nil, ErrMalformed
		}
		b = b[8+n:]
		at += delta
		r.At = at
		for _, to := range []*uint32{&r.Place, &r.Rest, &r.Before, &r.Worker} {
			v, n := binary.Uvarint(b)
			if n <= 0 || v > 1<<32-1 {
				return nil, ErrMalformed
			}
			*to, b = uint32(v), b[n:]
		}
		refs = append(refs, r)
	}
	return refs, nil
}
