package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvatlas/kvatlas/internal/base/littleendian"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Records of a rank's state. Wire constants.
const (
	stateClock      = 1
	stateGroup      = 2
	statePending    = 3
	stateTombstones = 4
	stateSet        = 5
)

// Kinds of a group record from 0xf0 on hold attributes of an earlier group and are no groups. Older programs read such
// a record as a group of an unknown kind and ignore it, because no engine uses the number. Therefore further kinds are
// compatible additions.
const (
	windowKind      = 0xf0
	windowKindDrops = 0xf1
	windowFlag      = 1 << 31 // in the record's number, above the group's number and the window
	windowBits      = 20
	maxWindow       = 1<<windowBits - 1
	maxWindowGroup  = 1<<(31-windowBits) - 1

	// A window above maxWindow has two records with a half each. Older programs ignore these records too.
	windowKindWide = 0xf2
	wideBits       = 16
	wideHalf       = 1<<wideBits - 1
	wideDrops      = 1 << wideBits         // in the number of the high half
	wideHigh       = 1 << (windowBits - 1) // marks the high half

	// Another record has the settings for loading copies: the number of blocks, and two flags.
	loadingKind = 0xf3
	loadingTold = 1 << 29
	loadingOwn  = 1 << 30
	maxLoading  = loadingTold - 1
)

// Flags of a pending event.
const (
	pendingHasParent = 1 << 0
	pendingLocals    = 1 << 1
	pendingChunk     = 1 << 2 // Event.Chunk and Event.Own follow; older programs reject the snapshot
)

// maxPendingBlocks limits the event of a pending record, so that the record fits into a chunk. Events have at most
// events.MaxBlocksPerEvent blocks.
const maxPendingBlocks = 8 * events.MaxBlocksPerEvent

func encodeState(s *sections, img *events.RankImage) error {
	if img.Clock != 0 {
		s.fields = append(s.fields, stateClock)
		s.fields = appendInt(s.fields, int64(img.Clock))
	}
	for _, g := range img.Groups {
		s.fields = append(s.fields, stateGroup, byte(g.Kind))
		s.fields = appendUint(s.fields, uint64(g.Group))
		encodeWindow(s, &g)
		s.cutIfFull()
	}
	if l := img.Loading; l != (events.Loading{}) {
		number := uint64(windowFlag | min(l.Blocks, maxLoading))
		if l.Told {
			number |= loadingTold
		}
		if l.Own {
			number |= loadingOwn
		}
		s.fields = append(s.fields, stateGroup, loadingKind)
		s.fields = appendUint(s.fields, number)
	}
	for i := range img.Pending {
		if err := encodePending(s, &img.Pending[i]); err != nil {
			return fmt.Errorf("pending event %d: %w", i, err)
		}
		s.cutIfFull()
	}
	for rest := img.Tombstones; len(rest) > 0; {
		part := rest[:min(len(rest), maxItems)]
		rest = rest[len(part):]
		s.fields = append(s.fields, stateTombstones)
		s.fields = appendUint(s.fields, uint64(len(part)))
		var before events.Tombstone
		for _, m := range part {
			s.fields = appendNear(s.fields, uint32(m.Run), uint32(before.Run))
			s.fields = appendNear(s.fields, m.Block, before.Block)
			s.fields = appendInt(s.fields, int64(m.Since)-int64(before.Since))
			s.words = binary.LittleEndian.AppendUint64(s.words, uint64(m.Name))
			before = m
		}
		s.cutIfFull()
	}
	for i := range img.Sets {
		set := &img.Sets[i]
		if len(set.Blocks) != len(set.Counts) {
			return fmt.Errorf("set %d has %d blocks and %d counts", i, len(set.Blocks), len(set.Counts))
		}
		for from := 0; from == 0 || from < len(set.Blocks); from += maxItems {
			to := min(from+maxItems, len(set.Blocks))
			continues := byte(0)
			if from > 0 {
				continues = 1
			}
			s.fields = append(s.fields, stateSet, continues, byte(set.Tier))
			s.fields = appendUint(s.fields, uint64(set.Group))
			s.fields = appendUint(s.fields, uint64(to-from))
			for _, n := range set.Counts[from:to] {
				s.fields = appendUint(s.fields, uint64(n))
			}
			s.words = littleendian.Append(s.words, set.Blocks[from:to])
			s.cutIfFull()
		}
	}
	return nil
}

// encodeWindow writes the attributes that the group's first record lacks.
func encodeWindow(s *sections, g *events.GroupKind) {
	says := func(kind byte, number uint32) {
		s.fields = append(s.fields, stateGroup, kind)
		s.fields = appendUint(s.fields, windowFlag|uint64(g.Group)<<windowBits|uint64(number))
	}
	switch {
	case g.Window == 0 && !g.Drops, g.Group > maxWindowGroup:
	case g.Window > maxWindow:
		high := wideHigh | g.Window>>wideBits
		if g.Drops {
			high |= wideDrops
		}
		says(windowKindWide, g.Window&wideHalf)
		says(windowKindWide, high)
	case g.Drops:
		says(windowKindDrops, g.Window)
	default:
		says(windowKind, g.Window)
	}
}

func encodePending(s *sections, p *events.Pending) error {
	e := &p.Event
	if e.Places() && len(e.Locals) != len(e.Blocks) {
		return fmt.Errorf("%d blocks, %d local hashes", len(e.Blocks), len(e.Locals))
	}
	if len(e.Blocks) > maxPendingBlocks {
		return fmt.Errorf("%d blocks; an event has at most %d", len(e.Blocks), events.MaxBlocksPerEvent)
	}
	flags := byte(0)
	if e.HasParent {
		flags |= pendingHasParent
	}
	if len(e.Locals) > 0 {
		flags |= pendingLocals
	}
	if e.Chunk > 0 {
		flags |= pendingChunk
	}
	s.fields = append(s.fields, statePending, flags, byte(e.Kind), byte(e.Tier), byte(e.Attention), byte(e.Reason))
	s.fields = appendInt(s.fields, int64(p.Since))
	s.fields = appendUint(s.fields, uint64(e.Group))
	s.fields = appendUint(s.fields, uint64(len(e.Blocks)))
	s.fields = appendUint(s.fields, uint64(len(p.Cancelled)))
	if e.Chunk > 0 {
		own := byte(0)
		if e.Own {
			own = 1
		}
		s.fields = append(appendUint(s.fields, uint64(e.Chunk)), own)
	}
	next := uint32(0)
	for _, at := range p.Cancelled {
		if at < next || int(at) >= len(e.Blocks) {
			return fmt.Errorf("cancelled copy of block %d is out of order or beyond the end", at)
		}
		s.fields = appendUint(s.fields, uint64(at-next))
		next = at
	}
	s.words = binary.LittleEndian.AppendUint64(s.words, uint64(e.Parent))
	s.words = littleendian.Append(s.words, e.Blocks)
	s.words = littleendian.Append(s.words, e.Locals)
	return nil
}

// decodeGroup adds the content of a group record to the image.
func decodeGroup(img *events.RankImage, kind byte, number uint32) {
	if kind == loadingKind && number >= windowFlag {
		img.Loading = events.Loading{Blocks: number & maxLoading, Told: number&loadingTold != 0,
			Own: number&loadingOwn != 0}
		return
	}
	if kind < windowKind || kind > windowKindWide || number < windowFlag {
		img.Groups = append(img.Groups, events.GroupKind{Group: events.GroupIndex(number),
			Kind: events.Attention(kind)})
		return
	}
	group := events.GroupIndex(number &^ windowFlag >> windowBits)
	for i := range img.Groups {
		g := &img.Groups[i]
		switch {
		case g.Group != group:
		case kind != windowKindWide:
			g.Window, g.Drops = number&maxWindow, kind == windowKindDrops
		case number&wideHigh == 0:
			g.Window = g.Window&^wideHalf | number&wideHalf
		default:
			g.Window, g.Drops = g.Window&wideHalf|number&wideHalf<<wideBits, number&wideDrops != 0
		}
	}
}

var errState = errors.New("unknown kind of record, or one out of place")

// decodeState adds the records of a section to the image, in new memory.
func (c *cursor) decodeState(img *events.RankImage) {
	for len(c.fields) > 0 && c.err == nil {
		switch c.byte() {
		case stateClock:
			img.Clock = events.Millis(c.int())
		case stateGroup:
			decodeGroup(img, c.byte(), c.uint32())
		case statePending:
			c.decodePending(img)
		case stateTombstones:
			n := c.count()
			var m events.Tombstone
			for range n {
				m.Run = events.RunID(c.near(uint32(m.Run)))
				m.Block = c.near(m.Block)
				m.Since += events.Millis(c.int())
				m.Name = events.BlockHash(c.word())
				if c.err != nil {
					return
				}
				img.Tombstones = append(img.Tombstones, m)
			}
		case stateSet:
			c.decodeSet(img)
		default:
			c.fail(errState)
		}
	}
}

func (c *cursor) decodePending(img *events.RankImage) {
	flags := c.byte()
	e := events.Event{Kind: events.Kind(c.byte()), Tier: events.Tier(c.byte()), Attention: events.Attention(c.byte()),
		Reason: events.Reason(c.byte())}
	since := events.Millis(c.int())
	e.Group = events.GroupIndex(c.uint32())
	n := c.uint()
	var cancelled []uint32
	at := uint64(0)
	cancels := c.count()
	hashes := n // local hashes
	if flags&pendingChunk != 0 {
		if e.Chunk, e.Own = c.uint32(), c.byte() != 0; e.Own {
			hashes = uint64(e.Chunk)
		}
	}
	for range cancels {
		if at += c.uint(); at >= n {
			c.fail(errState)
			return
		}
		cancelled = append(cancelled, uint32(at))
	}
	e.HasParent = flags&pendingHasParent != 0
	e.Parent = events.BlockHash(c.word())
	blocks := c.wordBytes(n)
	var locals []byte
	if flags&pendingLocals != 0 {
		locals = c.wordBytes(hashes)
	}
	if flags&^(pendingHasParent|pendingLocals|pendingChunk) != 0 {
		c.fail(errState)
	}
	if c.err != nil {
		return
	}
	if len(blocks) > 0 {
		e.Blocks = getWords[events.BlockHash](nil, blocks)
	}
	if len(locals) > 0 {
		e.Locals = getWords[events.LocalHash](nil, locals)
	}
	img.Pending = append(img.Pending, events.Pending{Since: since, Event: e, Cancelled: cancelled})
}

func (c *cursor) decodeSet(img *events.RankImage) {
	continues := c.byte()
	tier, group := events.Tier(c.byte()), events.GroupIndex(c.uint32())
	n := c.count()
	counts := make([]uint32, 0, n)
	for range n {
		counts = append(counts, c.uint32())
	}
	blocks := c.wordBytes(uint64(n))
	switch {
	case c.err != nil:
	case continues == 0:
		img.Sets = append(img.Sets, events.GroupSet{Tier: tier, Group: group, Blocks: getWords[events.BlockHash](nil,
			blocks), Counts: counts})
	case continues == 1 && len(img.Sets) > 0:
		last := &img.Sets[len(img.Sets)-1]
		if last.Tier != tier || last.Group != group {
			c.fail(errState)
			return
		}
		last.Blocks = getWords(last.Blocks, blocks)
		last.Counts = append(last.Counts, counts...)
	default:
		c.fail(errState)
	}
}
