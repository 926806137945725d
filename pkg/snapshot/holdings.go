package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"

	"github.com/kvatlas/kvatlas/internal/base/littleendian"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Flags of a holding's record. The rare flags come last, so that the number usually fits into a byte.
const (
	holdTier      = 3 << 0 // the tier minus 1
	holdWhole     = 1 << 2 // the lead is the length of the run
	holdForm      = 3 << 3 // form of the bits
	holdCopies    = 1 << 5
	holdNames     = 1 << 6
	holdGroup     = 1 << 7 // the group is not 0
	holdAlso      = 1 << 8
	holdContinues = 1 << 9 // extends the previous record, with the same run, tier and group
	holdFlags     = 1<<10 - 1

	formNone  = 0 << 3
	formWords = 1 << 3 // position of the first word, number of words
	formHeld  = 2 << 3 // the held blocks
	formHoles = 3 << 3 // the last held block, and the missing blocks before

	// maxItems is the maximum number of words, copies, names or further names in a record. A second record continues a
	// longer list, so that a record always fits into a section.
	maxItems = 2048
)

// checkHolding returns an error if a holding of a run of n blocks is invalid.
func checkHolding(h *events.Holding, n int) error {
	switch {
	case !h.Tier.Valid():
		return fmt.Errorf("unknown tier %d", h.Tier)
	case int64(h.Lead) > int64(n):
		return fmt.Errorf("a lead of %d", h.Lead)
	case len(h.Bits) > (n+63)/64:
		return fmt.Errorf("%d words of bits", len(h.Bits))
	}
	for i, w := range h.Bits {
		if w == 0 {
			continue
		}
		if low := 64*i + bits.TrailingZeros64(w); low < int(h.Lead) {
			return fmt.Errorf("block %d is in the lead and in the bits", low)
		}
		if high := 64*i + bits.Len64(w) - 1; high >= n {
			return fmt.Errorf("holds block %d", high)
		}
	}
	next := 0
	for _, c := range h.Copies {
		if int(c.Block) < next || int64(c.Block) >= int64(n) {
			return fmt.Errorf("copies of block %d are out of order or beyond the end", c.Block)
		}
		if c.Count < 2 {
			return fmt.Errorf("%d copies of block %d", c.Count, c.Block)
		}
		next = int(c.Block) + 1
	}
	next = 0
	for _, b := range h.Names {
		if int(b.Block) < next || int64(b.Block) >= int64(n) {
			return fmt.Errorf("own name of block %d is out of order or beyond the end", b.Block)
		}
		next = int(b.Block) + 1
	}
	next = 0
	for _, b := range h.Also {
		if int(b.Block) < next || int64(b.Block) >= int64(n) {
			return fmt.Errorf("further name of block %d is out of order or beyond the end", b.Block)
		}
		if b.Count == 0 {
			return fmt.Errorf("no copy of block %d under a further name", b.Block)
		}
		next = int(b.Block)
	}
	return nil
}

// blockCount returns the number of blocks in a holding.
func blockCount(h *events.Holding) uint64 { return uint64(h.Lead) + uint64(popcount(h.Bits)) }

// appendHolding writes a rank's holding of a run of n blocks. before is the run of the previous record. rest is the
// part that does not fit into the record.
func appendHolding(fields, words []byte, h *events.Holding, run, before events.RunID, n uint32, continues bool) (f,
	w []byte, rest *events.Holding) {
	part, rest := cutHolding(h)
	form := uint64(formNone)
	if part.first < part.last {
		form = bitsForm(h.Bits[min(int(h.Lead)/64, part.first):part.last], part.last-part.first, continues)
	}
	flags := part.flags(n, continues) | form
	fields = appendUint(fields, flags)
	fields = appendNear(fields, uint32(run), uint32(before))
	if h.Group != 0 {
		fields = appendUint(fields, uint64(h.Group))
	}
	if flags&(holdWhole|holdContinues) == 0 {
		fields = appendUint(fields, uint64(h.Lead))
	}
	switch form {
	case formWords:
		fields = appendUint(fields, uint64(part.first))
		fields = appendUint(fields, uint64(part.last-part.first))
		words = littleendian.Append(words, h.Bits[part.first:part.last])
	case formHeld:
		fields = appendHeld(fields, h, part.first, part.last)
	case formHoles:
		fields = appendHoles(fields, h, part.last)
	}
	fields, words = part.appendLists(fields, words)
	return fields, words, rest
}

// holdingPart is the part of a holding that fits into one record: the words of its bits from first to last, without
// zero words at both ends, and at most maxItems elements of each list.
type holdingPart struct {
	*events.Holding
	first, last int
	copies      []events.BlockCount
	names       []events.BlockName
	also        []events.NamedCount
}

// cutHolding returns the part of a holding that fits into one record, and the rest; nil if there is none.
func cutHolding(h *events.Holding) (part holdingPart, rest *events.Holding) {
	more := func() *events.Holding {
		if rest == nil {
			rest = &events.Holding{Tier: h.Tier, Group: h.Group}
		}
		return rest
	}
	first, last := 0, len(h.Bits)
	for first < last && h.Bits[first] == 0 {
		first++
	}
	for last > first && h.Bits[last-1] == 0 {
		last--
	}
	if last-first > maxItems {
		more().Bits = make([]uint64, last)
		copy(rest.Bits[first+maxItems:], h.Bits[first+maxItems:last])
		last = first + maxItems
	}
	part = holdingPart{h, first, last, h.Copies, h.Names, h.Also}
	if len(h.Copies) > maxItems {
		part.copies, more().Copies = h.Copies[:maxItems], h.Copies[maxItems:]
	}
	if len(h.Names) > maxItems {
		part.names, more().Names = h.Names[:maxItems], h.Names[maxItems:]
	}
	if len(h.Also) > maxItems {
		part.also, more().Also = h.Also[:maxItems], h.Also[maxItems:]
	}
	return part, rest
}

// flags returns the flags of the record of a run of n blocks, without the form of its bits.
func (p *holdingPart) flags(n uint32, continues bool) uint64 {
	flags := uint64(p.Tier - 1)
	if continues {
		flags |= holdContinues
	} else if p.Lead == n {
		flags |= holdWhole
	}
	if len(p.copies) > 0 {
		flags |= holdCopies
	}
	if len(p.names) > 0 {
		flags |= holdNames
	}
	if len(p.also) > 0 {
		flags |= holdAlso
	}
	if p.Group != 0 {
		flags |= holdGroup
	}
	return flags
}

// appendHeld writes the blocks after the lead as a list of those that are held.
func appendHeld(fields []byte, h *events.Holding, first, last int) []byte {
	fields = appendUint(fields, uint64(popcount(h.Bits[first:last])))
	next := int(h.Lead)
	for i := first; i < last; i++ {
		for w := h.Bits[i]; w != 0; w &= w - 1 {
			block := 64*i + bits.TrailingZeros64(w)
			fields = appendUint(fields, uint64(block-next))
			next = block + 1
		}
	}
	return fields
}

// appendHoles writes the blocks after the lead as their end, and a list of those before it that are not held.
func appendHoles(fields []byte, h *events.Holding, last int) []byte {
	end := 64*(last-1) + bits.Len64(h.Bits[last-1])
	fields = appendUint(fields, uint64(end)-uint64(h.Lead))
	at := len(fields)
	next, holes := int(h.Lead), 0
	fields = grow(fields, 4)
	for i := int(h.Lead) / 64; i < last; i++ {
		w := ^h.Bits[i]
		if i == int(h.Lead)/64 {
			w &= ^uint64(0) << (h.Lead % 64)
		}
		for ; w != 0; w &= w - 1 {
			block := 64*i + bits.TrailingZeros64(w)
			if block >= end {
				break
			}
			fields = appendUint(fields, uint64(block-next))
			next = block + 1
			holes++
		}
	}
	binary.LittleEndian.PutUint32(fields[at:], uint32(holes))
	return fields
}

// appendLists writes the lists that the part has, each with its length.
func (p *holdingPart) appendLists(fields, words []byte) (f, w []byte) {
	if len(p.copies) > 0 {
		fields = appendUint(fields, uint64(len(p.copies)))
		next := uint32(0)
		for _, c := range p.copies {
			fields = appendUint(fields, uint64(c.Block-next))
			fields = appendUint(fields, uint64(c.Count-2))
			next = c.Block + 1
		}
	}
	if len(p.names) > 0 {
		fields = appendUint(fields, uint64(len(p.names)))
		next := uint32(0)
		for _, b := range p.names {
			fields = appendUint(fields, uint64(b.Block-next))
			words = binary.LittleEndian.AppendUint64(words, uint64(b.Name))
			next = b.Block + 1
		}
	}
	if len(p.also) > 0 {
		fields = appendUint(fields, uint64(len(p.also)))
		next := uint32(0)
		for _, b := range p.also {
			fields = appendUint(fields, uint64(b.Block-next))
			fields = appendUint(fields, uint64(b.Count-1))
			words = binary.LittleEndian.AppendUint64(words, uint64(b.Name))
			next = b.Block
		}
	}
	return fields, words
}

// bitsForm returns the shortest form for the bits after the lead: words, or a list of blocks.
func bitsForm(b []uint64, words int, continues bool) uint64 {
	if continues {
		return formWords
	}
	ones := popcount(b)
	holes := 64*len(b) - ones + 4 // about a byte for each, and the length of the list
	switch {
	case 8*words <= min(ones, holes):
		return formWords
	case ones <= holes:
		return formHeld
	}
	return formHoles
}

func popcount(b []uint64) (n int) {
	for _, w := range b {
		n += bits.OnesCount64(w)
	}
	return n
}

// holdingHead is the start of a holding's record.
type holdingHead struct {
	flags uint64
	run   events.RunID
	group events.GroupIndex
}

func (c *cursor) holdingHead(before events.RunID) (head holdingHead) {
	head.flags = c.uint()
	head.run = events.RunID(c.near(uint32(before)))
	if head.flags&holdGroup != 0 {
		head.group = events.GroupIndex(c.uint32())
	}
	if head.flags&^holdFlags != 0 {
		c.fail(errHolding)
	}
	return head
}

func (h holdingHead) tier() events.Tier { return events.Tier(h.flags&holdTier) + 1 }

func (h holdingHead) continues() bool { return h.flags&holdContinues != 0 }

// skipHolding skips the part of a record after the head.
func (c *cursor) skipHolding(head holdingHead) {
	if head.flags&(holdWhole|holdContinues) == 0 {
		c.uint()
	}
	switch head.flags & holdForm {
	case formWords:
		c.uint()
		c.wordBytes(c.uint())
	case formHeld:
		c.skipList(1)
	case formHoles:
		c.uint()
		if b := c.bytes(4); b != nil {
			for n := binary.LittleEndian.Uint32(b); n > 0 && c.err == nil; n-- {
				c.uint()
			}
		}
	}
	if head.flags&holdCopies != 0 {
		c.skipList(2)
	}
	if head.flags&holdNames != 0 {
		c.wordBytes(uint64(c.skipList(1)))
	}
	if head.flags&holdAlso != 0 {
		c.wordBytes(uint64(c.skipList(2)))
	}
}

func (c *cursor) skipList(each int) int {
	n := c.count()
	for range n * each {
		c.uint()
	}
	return n
}

// holdingArena is the memory of the holdings of a run.
type holdingArena struct {
	bits   []uint64
	copies []events.BlockCount
	names  []events.BlockName
	also   []events.NamedCount
}

func (a *holdingArena) reset() {
	a.bits, a.copies, a.names, a.also = a.bits[:0], a.copies[:0], a.names[:0], a.also[:0]
}

var errHolding = errors.New("names a block beyond the end, or one twice")

// decodeHolding decodes the part of a record after the head into h. If the record continues another, h has the earlier
// part. The slices point into the arena.
func (c *cursor) decodeHolding(head holdingHead, h *events.Holding, n uint32, a *holdingArena) {
	if !head.continues() {
		*h = events.Holding{Rank: h.Rank, Tier: head.tier(), Group: head.group}
		if h.Lead = n; head.flags&holdWhole == 0 {
			if h.Lead = c.uint32(); h.Lead > n {
				c.fail(errHolding)
			}
		}
	}
	form := head.flags & holdForm
	if form != formNone && c.err == nil {
		size := (int(n) + 63) / 64
		if h.Bits == nil {
			at := len(a.bits)
			a.bits = grow(a.bits, size)
			h.Bits = a.bits[at : at+size : at+size]
			clear(h.Bits)
		}
		c.decodeBits(form, h, n)
	}
	// The earlier part of a continued holding is at the end of the arena, because a holding is complete before the
	// next.
	if head.flags&holdCopies != 0 {
		at := len(a.copies) - len(h.Copies)
		least, next := uint64(0), uint64(0)
		if k := len(h.Copies); k > 0 {
			least = uint64(h.Copies[k-1].Block) + 1
		}
		for range c.count() {
			block, count := next+c.uint(), c.uint()
			if block < max(least, next) || block >= uint64(n) || count > math.MaxUint32-2 {
				c.fail(errHolding)
				return
			}
			a.copies = append(a.copies, events.BlockCount{Block: uint32(block), Count: uint32(count) + 2})
			next = block + 1
		}
		h.Copies = a.copies[at:len(a.copies):len(a.copies)]
	}
	if head.flags&holdNames != 0 {
		at := len(a.names) - len(h.Names)
		least, next := uint64(0), uint64(0)
		if k := len(h.Names); k > 0 {
			least = uint64(h.Names[k-1].Block) + 1
		}
		for range c.count() {
			block, name := next+c.uint(), c.word()
			if block < max(least, next) || block >= uint64(n) {
				c.fail(errHolding)
				return
			}
			a.names = append(a.names, events.BlockName{Block: uint32(block), Name: events.BlockHash(name)})
			next = block + 1
		}
		h.Names = a.names[at:len(a.names):len(a.names)]
	}
	if head.flags&holdAlso != 0 {
		at := len(a.also) - len(h.Also)
		least, next := uint64(0), uint64(0)
		if k := len(h.Also); k > 0 {
			least = uint64(h.Also[k-1].Block)
		}
		for range c.count() {
			block, count, name := next+c.uint(), c.uint(), c.word()
			if block < max(least, next) || block >= uint64(n) || count > math.MaxUint32-1 {
				c.fail(errHolding)
				return
			}
			a.also = append(a.also, events.NamedCount{Block: uint32(block), Name: events.BlockHash(name),
				Count: uint32(count) + 1})
			next = block
		}
		h.Also = a.also[at:len(a.also):len(a.also)]
	}
}

func (c *cursor) decodeBits(form uint64, h *events.Holding, n uint32) {
	switch form {
	case formWords:
		first, count := c.uint(), c.uint()
		b := c.wordBytes(count)
		if first+count < first || first+count > uint64(len(h.Bits)) {
			c.fail(errHolding)
			return
		}
		for i := range b[:len(b)/8] {
			w := binary.LittleEndian.Uint64(b[8*i:])
			at := first + uint64(i)
			if h.Bits[at]&w != 0 {
				c.fail(errHolding)
				return
			}
			h.Bits[at] |= w
		}
		// No bit is in the lead or beyond the end.
		for i := 0; i < len(h.Bits) && i <= int(h.Lead)/64; i++ {
			below := ^uint64(0)
			if i == int(h.Lead)/64 {
				below = 1<<(h.Lead%64) - 1
			}
			if h.Bits[i]&below != 0 {
				c.fail(errHolding)
			}
		}
		if n%64 != 0 && h.Bits[len(h.Bits)-1]>>(n%64) != 0 {
			c.fail(errHolding)
		}
	case formHeld:
		next := uint64(h.Lead)
		for range c.count() {
			block := next + c.uint()
			if block < next || block >= uint64(n) {
				c.fail(errHolding)
				return
			}
			h.Bits[block/64] |= 1 << (block % 64)
			next = block + 1
		}
	case formHoles:
		end := uint64(h.Lead) + c.uint()
		b := c.bytes(4)
		if b == nil || end < uint64(h.Lead) || end > uint64(n) {
			c.fail(errHolding)
			return
		}
		next := uint64(h.Lead)
		for range binary.LittleEndian.Uint32(b) {
			hole := next + c.uint()
			if hole < next || hole >= end {
				c.fail(errHolding)
				return
			}
			setBits(h.Bits, next, hole)
			next = hole + 1
		}
		setBits(h.Bits, next, end)
	}
}

// setBits sets bits [from, to).
func setBits(b []uint64, from, to uint64) {
	for from < to {
		upto := min(to, from/64*64+64)
		mask := ^uint64(0) >> (64 - (upto - from)) << (from % 64)
		b[from/64] |= mask
		from = upto
	}
}
