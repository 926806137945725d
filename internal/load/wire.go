package load

import "github.com/kvatlas/kvatlas/internal/msgp"

// appendState appends a state in the one form that it has.
func appendState(b []byte, s *state) []byte {
	b = msgp.AppendArrayHead(b, 5)
	b = msgp.AppendBool(msgp.AppendBool(b, s.done), s.gone)
	b = msgp.AppendArrayHead(b, 2*len(s.outs))
	for _, o := range s.outs {
		b = msgp.AppendUint(msgp.AppendUint(b, o.origin), uint64(o.n))
	}
	if s.mark.after == 0 {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendUint(msgp.AppendArrayHead(b, 3), uint64(s.mark.after))
		b = msgp.AppendUint(msgp.AppendUint(b, s.mark.origin), s.mark.weight)
	}
	b = msgp.AppendArrayHead(b, 2*len(s.runs))
	for _, r := range s.runs {
		b = msgp.AppendUint(msgp.AppendUint(b, uint64(r.from)), r.weight)
	}
	return b
}
