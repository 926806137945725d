package events

import "slices"

// blockSizes decides whether an engine's device blocks have the decoder's size. Engines also announce blocks of other
// sizes: the tail of a block (vLLM's aligned states), and blocks of a second main group. Such blocks are skipped and
// counted. After a device block of the right size, they do not indicate a wrong configuration.
//
// The zero value is an engine that has announced nothing.
type blockSizes struct {
	right []GroupIndex // main groups with device blocks of the decoder's size
	other []GroupIndex // main groups with device blocks of another size, tails not counted
	got   uint32       // the size in the last event of such a block
	n     uint64       // such events
	ends  map[groupBlock]uint32
}

// groupBlock names a block of one group.
type groupBlock struct {
	group GroupIndex
	name  BlockHash
}

const (
	// maxSizedGroups bounds right and other. Engines have fewer groups.
	maxSizedGroups = 64

	// maxTails bounds ends. After a reset of ends, chains of smaller blocks begin again.
	maxTails = 4096
)

// accept notes an event of a main group with device blocks of the decoder's size.
func (b *blockSizes) accept(group GroupIndex) {
	if addGroup(&b.right, group) {
		b.ends = nil
	}
}

// reject notes an event of a main group with blocks of another size, and returns the reason to skip it. want is the
// decoder's size.
func (b *blockSizes) reject(e *rawEvent, names []BlockHash, want uint32) Skip {
	device := e.tierOrDevice() == Device
	smaller := e.blockSize > 0 && e.blockSize < want
	switch {
	case smaller && (slices.Contains(b.right, e.group) || !device && len(b.right) > 0):
		return skipPartialBlock
	case !device: // lower tiers may use different units
		return SkipCopySize
	case smaller && !slices.Contains(b.other, e.group) && !b.fillsBlock(e, names, want):
		return skipPartialBlock
	}
	addGroup(&b.other, e.group)
	b.got = e.blockSize
	b.n++
	return SkipBlockSize
}

// fillsBlock reports whether a chain of smaller blocks has the tokens of a whole block. A tail has fewer: the engine
// announces a whole block instead once the tokens exist.
func (b *blockSizes) fillsBlock(e *rawEvent, names []BlockHash, want uint32) bool {
	end := uint32(0)
	if e.hasParent {
		end = b.ends[groupBlock{e.group, e.parent}]
	}
	if end+uint32(e.tokenCount) >= want {
		return true
	}
	for _, name := range names {
		if b.ends == nil || len(b.ends) >= maxTails {
			b.ends = map[groupBlock]uint32{}
		}
		end += e.blockSize
		b.ends[groupBlock{e.group, name}] = end
	}
	return false
}

// wrong reports whether all device blocks of the engine have another size.
func (b *blockSizes) wrong() bool { return b.n > 0 && len(b.right) == 0 }

// otherMains reports whether a main group has only blocks of another size, and another one has the decoder's.
func (b *blockSizes) otherMains() bool {
	return len(b.right) > 0 && slices.ContainsFunc(b.other, func(group GroupIndex) bool {
		return !slices.Contains(b.right, group)
	})
}

// addGroup adds a group to a list, and reports whether it was not there.
func addGroup(list *[]GroupIndex, group GroupIndex) bool {
	if slices.Contains(*list, group) || len(*list) >= maxSizedGroups {
		return false
	}
	*list = append(*list, group)
	return true
}
