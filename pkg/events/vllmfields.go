package events

import (
	"bytes"
	"encoding/binary"
	"strconv"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// This file reads the fields of an event into a rawEvent. Unreadable fields mark the event or are counted.

func (d *Decoder) readParent(r *msgp.Reader) {
	e := &d.raw
	if e.hasParent = !r.Null(); e.hasParent {
		var ok bool
		if e.parent, ok = d.readHash(r); !ok {
			e.passStored(skipHash)
			r.Skip()
		}
	}
}

// readLocality passes an event about blocks outside the engine's host.
func (d *Decoder) readLocality(r *msgp.Reader) {
	if r.Null() {
		return
	}
	where, ok := r.Str()
	if !ok {
		r.Skip()
	}
	if !bytes.EqualFold(where, local) {
		d.raw.pass(skipRemote)
	}
}

var local = []byte("LOCAL")

// skipSpan skips a value and returns its beginning and end.
func skipSpan(r *msgp.Reader) [2]int {
	begin := r.At
	r.Skip()
	return [2]int{begin, r.At}
}

func (d *Decoder) readType(r *msgp.Reader) {
	name, ok := r.Str()
	if !ok {
		d.raw.kind = typeNone
		r.Skip()
		return
	}
	switch string(name) {
	case "BlockStored":
		d.raw.kind = typeStored
	case "BlockRemoved":
		d.raw.kind = typeRemoved
	case "AllBlocksCleared":
		d.raw.kind = typeCleared
	case "TierBlocksCleared":
		d.raw.kind = typeTierCleared
	default:
		d.raw.kind = typeUnknown
	}
}

func (d *Decoder) readBlocks(r *msgp.Reader) {
	e := &d.raw
	d.blocks, e.longNames = d.blocks[:e.blocks], 0
	n, ok := r.Array()
	if !ok {
		if !r.Null() {
			e.pass(skipMalformed)
			r.Skip()
		}
		return
	}
	if n > maxEventTokens {
		e.longNames, e.namesAt = n, r.At
		r.SkipN(n)
		return
	}
	for ; n > 0; n-- {
		if b := r.Data[r.At:]; len(b) >= 9 && b[0] == msgp.CodeUint64 { // nearly all names
			d.blocks = append(d.blocks, BlockHash(binary.BigEndian.Uint64(b[1:])))
			r.At += 9
			continue
		}
		if h, ok := d.readHash(r); ok {
			d.blocks = append(d.blocks, h)
		} else if e.badNames = true; !r.Skip() {
			return
		}
	}
}

// readHash reads a block's name: an integer of either sign, the bytes of a digest, or either as digits.
func (d *Decoder) readHash(r *msgp.Reader) (BlockHash, bool) {
	before := r.At
	switch r.Next() {
	case msgp.Int:
		if v, _, ok := r.Int(); ok {
			return BlockHash(v), true
		}
	case msgp.Bin:
		if digest, ok := r.Bin(); ok && len(digest) > 0 {
			if len(digest) > 8 {
				digest = d.engine.digestPart(digest, 8)
			}
			var v uint64
			for _, c := range digest {
				v = v<<8 | uint64(c)
			}
			return BlockHash(v), true
		}
	case msgp.Str:
		if digits, ok := r.Str(); ok {
			if v, ok := d.engine.hashOfDigits(digits); ok {
				return v, true
			}
		}
	}
	if !r.Broken {
		r.At = before
	}
	return 0, false
}

// digestPart returns the n bytes of a digest that the engine itself uses as a name: vLLM the last bytes, SGLang the
// first.
func (e Engine) digestPart(digest []byte, n int) []byte {
	if e == SGLang {
		return digest[:n]
	}
	return digest[len(digest)-n:]
}

// maxDigits bounds a block's name in digits. Parsing a number copies its text.
const maxDigits = 256

func (e Engine) hashOfDigits(digits []byte) (BlockHash, bool) {
	if len(digits) > maxDigits {
		return 0, false
	}
	if v, err := strconv.ParseUint(string(digits), 10, 64); err == nil {
		return BlockHash(v), true
	}
	if v, err := strconv.ParseInt(string(digits), 10, 64); err == nil {
		return BlockHash(v), true
	}
	digits = bytes.TrimPrefix(digits, []byte("0x"))
	if len(digits) > 16 {
		for _, c := range digits {
			if hexDigit(c) < 0 {
				return 0, false
			}
		}
		digits = e.digestPart(digits, 16)
	}
	v, err := strconv.ParseUint(string(digits), 16, 64)
	return BlockHash(v), err == nil
}

func (d *Decoder) readTokens(r *msgp.Reader) {
	e := &d.raw
	d.tokens, d.digests, e.tokenCount = d.tokens[:0], d.digests[:0], 0
	n, ok := r.Array()
	if !ok {
		if !r.Null() {
			e.passStored(skipMalformed)
			r.Skip()
		}
		return
	}
	if n > maxEventTokens {
		e.passStored(skipTooLarge)
		r.SkipN(n)
		return
	}
	e.tokenCount = n
	if n > 0 && r.Next() == msgp.Array {
		d.readTokenPairs(r, n)
	} else if d.tokens, ok = r.Uint32s(d.tokens, n); !ok {
		d.readDigests(r, n)
	}
}

func (d *Decoder) readMedium(r *msgp.Reader) {
	medium, ok := r.Str()
	if !ok {
		if !r.Null() {
			d.raw.pass(skipMedium)
			r.Skip()
		}
		return
	}
	switch string(medium) {
	case "GPU":
		d.raw.tier = Device
	case "CPU", "CPU_PINNED":
		d.raw.tier = Host
	case "cpu":
		d.raw.tier, d.raw.inStore = Host, true
	default:
		if d.raw.tier, ok = tierOfMedium(string(medium[:min(len(medium), maxMedium+1)])); !ok {
			d.raw.pass(skipMedium)
		}
	}
}

// readSpaceName reads a field of the blocks' space. An event with an unreadable field is skipped, so the blocks of a
// tenant never count as another tenant's.
func (d *Decoder) readSpaceName(r *msgp.Reader) []byte {
	name, ok := r.Str()
	if !ok && !r.Null() {
		d.raw.passStored(skipSpace)
		r.Skip()
	}
	return name
}

// readSession reads the session of the request that stored the blocks. The field only describes, so an unreadable id or
// an id of more than maxSession bytes counts as absent.
func (d *Decoder) readSession(r *msgp.Reader) SessionHash {
	id, ok := r.Str()
	switch {
	case !ok:
		d.ignore(r)
	case len(id) > maxSession:
		d.counts[skipField]++
	case len(id) > 0:
		return hashSession(id)
	}
	return 0
}
