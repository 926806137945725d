package events

import (
	"fmt"
	"math"
	"slices"
	"unsafe"

	"github.com/kvatlas/kvatlas/internal/base/littleendian"
	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// batchVersion is the format version of AppendBatch, and the highest version that DecodeBatch accepts.
const batchVersion = 1

// The minimum lengths of the format's arrays; see the package comment.
const (
	batchElements  = 8
	cursorElements = 4
	eventElements  = 8
)

// BatchHeader has the fields of a batch before its events.
type BatchHeader struct {
	Incarnation Incarnation
	FirstID     EventID
	Model       string
	BlockSize   uint32 // tokens
	Cursor      Cursor
	Shutdown    bool
	Events      int // the number of events that follow
}

// check returns an error for the first contradiction within an event.
func (e *Event) check() error {
	switch {
	case e.Kind < Stored || e.Kind > Cleared:
		return fmt.Errorf("kind %d", e.Kind)
	case e.Kind == Cleared && e.Tier > NumTiers, e.Kind != Cleared && !e.Tier.Valid():
		return fmt.Errorf("tier %d in an event of kind %d", e.Tier, e.Kind)
	case len(e.Blocks) > MaxBlocksPerEvent:
		return fmt.Errorf("%d blocks: at most %d", len(e.Blocks), MaxBlocksPerEvent)
	case e.Kind == Cleared && len(e.Blocks) > 0:
		return fmt.Errorf("%d blocks in a cleared event", len(e.Blocks))
	case e.Kind != Stored && len(e.Locals) > 0:
		return fmt.Errorf("local hashes in an event of kind %d", e.Kind)
	case len(e.Locals) > 0 && len(e.Locals) != len(e.Blocks) && !e.Own:
		return fmt.Errorf("%d local hashes for %d blocks", len(e.Locals), len(e.Blocks))
	case e.Lookahead > 0 && len(e.Locals) == 0:
		return fmt.Errorf("a lookahead of %d tokens in an event of kind %d without local hashes", e.Lookahead, e.Kind)
	case e.Session != 0 && !e.Places():
		return fmt.Errorf("a session in an event of kind %d that determines no places", e.Kind)
	case e.Kind != Stored && (e.Window > 0 || e.Drops):
		return fmt.Errorf("a window of %d tokens in an event of kind %d", e.Window, e.Kind)
	case e.Lookahead > MaxBlockSize:
		return fmt.Errorf("a lookahead of %d tokens: at most %d", e.Lookahead, MaxBlockSize)
	case e.Chunk > 0 || e.Own:
		return e.checkChunk()
	}
	return nil
}

func (e *Event) checkChunk() error {
	switch {
	case e.Kind != Stored || e.Tier == Device || e.Places():
		return fmt.Errorf("a chunk of %d blocks in an event of kind %d in tier %d", e.Chunk, e.Kind, e.Tier)
	case e.Own && (len(e.Blocks) != 1 || e.Chunk == 0 || uint64(len(e.Locals)) != uint64(e.Chunk)):
		return fmt.Errorf("%d local hashes and %d names of a chunk of %d blocks", len(e.Locals), len(e.Blocks), e.Chunk)
	case len(e.Locals) > MaxBlocksPerEvent:
		return fmt.Errorf("%d local hashes: at most %d", len(e.Locals), MaxBlocksPerEvent)
	}
	return nil
}

// encodedSize returns the number of bytes that AppendBatch will append.
func (b *Batch) encodedSize() int {
	h := b.header()
	size := headSize(&h, len(b.Events))
	for i := range b.Events {
		size += b.Events[i].EncodedSize()
	}
	return size
}

func (b *Batch) header() BatchHeader {
	return BatchHeader{Incarnation: b.Incarnation, FirstID: b.FirstID, Model: b.Model, BlockSize: b.BlockSize,
		Cursor: b.Cursor, Shutdown: b.Shutdown, Events: len(b.Events)}
}

// headSize returns the size of a batch of n events without these events.
func headSize(h *BatchHeader, n int) int {
	return 1 + 1 + msgp.UintSize(uint64(h.Incarnation)) + msgp.UintSize(uint64(h.FirstID)) + msgp.StrSize(len(h.Model)) +
		msgp.UintSize(uint64(h.BlockSize)) + h.Cursor.size() + 1 + msgp.ArrayHeadSize(n)
}

// appendHead appends a batch of n events without these events.
func appendHead(dst []byte, h *BatchHeader, n int) []byte {
	dst = msgp.AppendArrayHead(dst, batchElements)
	dst = msgp.AppendUint(dst, batchVersion)
	dst = msgp.AppendUint(dst, uint64(h.Incarnation))
	dst = msgp.AppendUint(dst, uint64(h.FirstID))
	dst = msgp.AppendStr(dst, h.Model)
	dst = msgp.AppendUint(dst, uint64(h.BlockSize))
	dst = msgp.AppendArrayHead(dst, cursorElements)
	dst = msgp.AppendBool(dst, h.Cursor.Known)
	dst = msgp.AppendUint(dst, uint64(h.Cursor.Seq))
	dst = msgp.AppendUint(dst, h.Cursor.Digest)
	dst = msgp.AppendUint(dst, uint64(h.Cursor.Partial))
	dst = msgp.AppendBool(dst, h.Shutdown)
	return msgp.AppendArrayHead(dst, n)
}

func (c *Cursor) size() int {
	return 1 + 1 + msgp.UintSize(uint64(c.Seq)) + msgp.UintSize(c.Digest) + msgp.UintSize(uint64(c.Partial))
}

// EncodedSize returns the number of bytes of the event in a batch.
func (e *Event) EncodedSize() int {
	size := 1 + msgp.UintSize(uint64(e.Kind)) + msgp.UintSize(uint64(e.Tier)) + msgp.UintSize(uint64(e.Group)) +
		msgp.UintSize(uint64(e.Attention)) + msgp.UintSize(uint64(e.Reason)) + 1 + 1 + 1
	if e.HasParent {
		size += msgp.UintSize(uint64(e.Parent)) - 1
	}
	if n := len(e.Blocks); n > 0 {
		size += msgp.BinSize(8*n) - 1
	}
	if n := len(e.Locals); n > 0 {
		size += msgp.BinSize(8*n) - 1
	}
	elements := e.elements()
	if elements == eventElements {
		return size
	}
	size += msgp.UintSize(uint64(e.Lookahead))
	if elements > eventElements+1 {
		size += msgp.UintSize(uint64(e.Window)) + 1
	}
	if elements > eventElements+3 {
		size += msgp.UintSize(uint64(e.Chunk)) + 1
	}
	if elements > eventElements+5 {
		size += msgp.UintSize(uint64(e.Session))
	}
	return size
}

// AppendBatch appends b to dst in format version 1 and returns the longer slice. If an event is invalid
// ([Event.Check]), it returns an error and dst unchanged.
func AppendBatch(dst []byte, b *Batch) ([]byte, error) {
	for i := range b.Events {
		if err := b.Events[i].check(); err != nil {
			return dst, fmt.Errorf("events: cannot encode batch: event %d: %w", i, err)
		}
	}
	dst = slices.Grow(dst, b.encodedSize())
	h := b.header()
	dst = appendHead(dst, &h, len(b.Events))
	for i := range b.Events {
		dst = appendEvent(dst, &b.Events[i])
	}
	return dst, nil
}

// elements returns the length of the event's array. Empty elements at the end are omitted.
func (e *Event) elements() int {
	switch {
	case e.Session != 0:
		return eventElements + 6
	case e.Lookahead|e.Window|e.Chunk == 0 && !e.Drops:
		return eventElements
	case e.Chunk > 0:
		return eventElements + 5
	case e.Window > 0 || e.Drops:
		return eventElements + 3
	}
	return eventElements + 1
}

func appendEvent(dst []byte, e *Event) []byte {
	elements := e.elements()
	dst = msgp.AppendArrayHead(dst, elements)
	dst = msgp.AppendUint(dst, uint64(e.Kind))
	dst = msgp.AppendUint(dst, uint64(e.Tier))
	dst = msgp.AppendUint(dst, uint64(e.Group))
	dst = msgp.AppendUint(dst, uint64(e.Attention))
	dst = msgp.AppendUint(dst, uint64(e.Reason))
	if e.HasParent {
		dst = msgp.AppendUint(dst, uint64(e.Parent))
	} else {
		dst = msgp.AppendNil(dst)
	}
	dst = appendHashes(dst, e.Blocks)
	if e.Own { // programs without support for chunks read a copy by name
		dst = msgp.AppendNil(dst)
	} else {
		dst = appendHashes(dst, e.Locals)
	}
	if elements == eventElements {
		return dst
	}
	dst = msgp.AppendUint(dst, uint64(e.Lookahead))
	if elements > eventElements+1 {
		dst = msgp.AppendUint(dst, uint64(e.Window))
		dst = msgp.AppendBool(dst, e.Drops)
	}
	if elements > eventElements+3 {
		dst = msgp.AppendUint(dst, uint64(e.Chunk))
		if e.Own {
			dst = appendHashes(dst, e.Locals)
		} else {
			dst = msgp.AppendNil(dst)
		}
	}
	if elements > eventElements+5 {
		dst = msgp.AppendUint(dst, uint64(e.Session))
	}
	return dst
}

// appendHashes appends hashes as one binary of little-endian u64, or nil if there are none.
func appendHashes[H ~uint64](dst []byte, hashes []H) []byte {
	if len(hashes) == 0 {
		return msgp.AppendNil(dst)
	}
	return littleendian.Append(msgp.AppendBinHead(dst, 8*len(hashes)), hashes)
}

// DecodeBatch decodes one batch into b. DecodeBatch overwrites b and reuses the memory, so repeated calls with the same
// Batch allocate nothing. Slices of b are valid until the next call. All hashes lie in one buffer with the size of the
// largest batch so far; see [Batch.Trim]. b does not refer to data afterwards.
//
// Errors wrap ErrVersion, for a batch of a later format, or ErrMalformed. After an error b has no events; the only
// valid use is another DecodeBatch. For any data, the memory taken is at most about ten times its size.
func DecodeBatch(data []byte, b *Batch) error {
	r := msgp.Reader{Data: data}
	events := b.Events[:cap(b.Events)]
	b.Events = b.Events[:0]
	n, more, err := decodeHead(&r, b)
	if err != nil {
		return err
	}
	hashes := b.hashes[:0]
	if most := r.Left() / 8; cap(hashes) < most {
		clear(events) // otherwise they would keep the old buffer alive
		hashes = make([]uint64, 0, max(most, min(2*cap(hashes), spareHashes)))
		b.hashes = hashes
	}
	events = slices.Grow(events, max(0, n-len(events)))[:n]
	for i := range events {
		if err := decodeEvent(&r, &events[i], &hashes); err != nil {
			return fmt.Errorf("event %d of %d: %w", i, n, err)
		}
	}
	if !r.SkipN(more) {
		return malformed(r.At, "batch: truncated after its events")
	}
	if r.Left() > 0 {
		return malformed(r.At, "batch: %d bytes after its end", r.Left())
	}
	b.Events = events
	return nil
}

// [Batch.Trim] keeps this much memory: enough for a batch of a shim's usual size (768 KiB) with at least ten hashes per
// event.
const (
	spareHashes = 128 << 10 // 1 MiB
	spareEvents = 32 << 10  // 2.3 MiB
)

// Trim frees an unusually large memory of b, so a reused Batch keeps at most 4 MiB between two batches.
// The content of b is lost in this case.
func (b *Batch) Trim() {
	if cap(b.hashes) > spareHashes || cap(b.Events) > spareEvents {
		b.Events, b.hashes = nil, nil
	}
}

// Clone returns a copy of b that shares no memory of events with it.
func (b *Batch) Clone() *Batch {
	c := *b
	n := 0
	for i := range b.Events {
		n += len(b.Events[i].Blocks) + len(b.Events[i].Locals)
	}
	c.Events, c.hashes = slices.Clone(b.Events), make([]uint64, 0, n)
	for i := range c.Events {
		e := &c.Events[i]
		e.Blocks, e.Locals = copyHashes(&c.hashes, e.Blocks), copyHashes(&c.hashes, e.Locals)
	}
	return &c
}

// copyHashes appends hashes to a buffer that has room for them, and returns the copy; nil if there are none.
func copyHashes[H ~uint64](buffer *[]uint64, hashes []H) []H {
	if len(hashes) == 0 {
		return nil
	}
	begin := len(*buffer)
	*buffer = (*buffer)[:begin+len(hashes)]
	into := unsafe.Slice((*H)(unsafe.Pointer(&(*buffer)[begin])), len(hashes))
	copy(into, hashes)
	return into
}

// MemoryBytes returns the size of b's memory, used or spare, if only DecodeBatch or Clone filled b.
func (b *Batch) MemoryBytes() int { return cap(b.Events)*int(unsafe.Sizeof(Event{})) + cap(b.hashes)*8 }

// decodeHead reads up to the first event. The results are the number of events, and of unknown elements after the
// events.
func decodeHead(r *msgp.Reader, b *Batch) (events, more int, err error) {
	elements, ok := r.Array()
	if !ok {
		return 0, 0, malformed(r.At, "batch: no array")
	}
	version, ok := r.Uint(math.MaxUint64)
	if !ok || version == 0 {
		return 0, 0, malformed(r.At, "batch: no format version")
	}
	if version > batchVersion {
		return 0, 0, fmt.Errorf("events: %w: a batch of version %d, and this program reads up to %d", ErrVersion,
			version, batchVersion)
	}
	if elements < batchElements {
		return 0, 0, malformed(r.At, "batch: %d elements, want %d or more", elements, batchElements)
	}
	incarnation, ok1 := r.Uint(math.MaxUint64)
	first, ok2 := r.Uint(math.MaxUint64)
	model, ok3 := r.Str()
	blockSize, ok4 := r.Uint(math.MaxUint32)
	if !ok1 || !ok2 || !ok3 || !ok4 {
		return 0, 0, malformed(r.At, "batch: no incarnation, first id, model and block size")
	}
	if err := decodeCursor(r, &b.Cursor); err != nil {
		return 0, 0, err
	}
	shutdown, ok := r.Bool()
	if !ok {
		return 0, 0, malformed(r.At, "batch: no shutdown flag")
	}
	// An event takes at least eventElements bytes of data, and several times as much memory. The data must have these
	// bytes before the memory is allocated.
	at := r.At
	events, ok = r.Array()
	if !ok || events > r.Left()/(1+eventElements) {
		return 0, 0, malformed(at, "batch: no array of events, or a truncated one")
	}
	b.Incarnation, b.FirstID, b.BlockSize, b.Shutdown = Incarnation(incarnation), EventID(first), uint32(blockSize),
		shutdown
	if b.Model != string(model) {
		b.Model = string(model)
	}
	return events, elements - batchElements, nil
}

func decodeCursor(r *msgp.Reader, c *Cursor) error {
	elements, ok := r.Array()
	if !ok || elements < cursorElements {
		return malformed(r.At, "batch: no cursor of %d elements", cursorElements)
	}
	known, ok1 := r.Bool()
	seq, ok2 := r.Uint(math.MaxUint64)
	digest, ok3 := r.Uint(math.MaxUint64)
	partial, ok4 := r.Uint(math.MaxUint32)
	if !ok1 || !ok2 || !ok3 || !ok4 || !r.SkipN(elements-cursorElements) {
		return malformed(r.At, "batch: incomplete cursor")
	}
	*c = Cursor{Known: known, Seq: EngineSeq(seq), Digest: digest, Partial: uint32(partial)}
	return nil
}

func decodeEvent(r *msgp.Reader, e *Event, hashes *[]uint64) error {
	begin := r.At
	elements, ok := r.Array()
	if !ok || elements < eventElements {
		return malformed(begin, "no array of %d elements", eventElements)
	}
	kind, ok1 := r.Uint(math.MaxUint8)
	tier, ok2 := r.Uint(math.MaxUint8)
	group, ok3 := r.Uint(math.MaxUint32)
	attention, ok4 := r.Uint(math.MaxUint8)
	reason, ok5 := r.Uint(math.MaxUint8)
	if !ok1 || !ok2 || !ok3 || !ok4 || !ok5 {
		return malformed(r.At, "incomplete event")
	}
	var parent uint64
	hasParent := !r.Null()
	if hasParent {
		if parent, ok = r.Uint(math.MaxUint64); !ok {
			return malformed(r.At, "no parent")
		}
	}
	blocks, ok := decodeHashes[BlockHash](r, hashes)
	if !ok {
		return malformed(r.At, "no binary of hashes")
	}
	locals, ok := decodeHashes[LocalHash](r, hashes)
	if !ok {
		return malformed(r.At, "no binary of local hashes")
	}
	more, lookahead := elements-eventElements, uint64(0)
	if more > 0 {
		more--
		if lookahead, ok = r.Uint(MaxBlockSize); !ok {
			return malformed(r.At, "no lookahead")
		}
	}
	window, drops := uint64(0), false
	if more > 1 {
		more -= 2
		var said bool
		window, ok = r.Uint(math.MaxUint32)
		if drops, said = r.Bool(); !ok || !said {
			return malformed(r.At, "no window")
		}
	}
	chunk, own := uint64(0), false
	if more > 1 {
		more -= 2
		if chunk, ok = r.Uint(math.MaxUint32); !ok {
			return malformed(r.At, "no chunk")
		}
		content, ok := decodeHashes[LocalHash](r, hashes)
		if !ok || len(content) > 0 && len(locals) > 0 {
			return malformed(r.At, "no binary of a chunk's local hashes")
		}
		if own = len(content) > 0; own {
			locals = content
		}
	}
	session := uint64(0)
	if more > 0 {
		more--
		if session, ok = r.Uint(math.MaxUint64); !ok {
			return malformed(r.At, "no session")
		}
	}
	if !r.SkipN(more) {
		return malformed(r.At, "truncated")
	}
	*e = Event{
		Kind: Kind(kind), Tier: Tier(tier), Group: GroupIndex(group), Attention: Attention(attention),
		Reason: Reason(reason), HasParent: hasParent, Parent: BlockHash(parent), Blocks: blocks, Locals: locals,
		Lookahead: uint32(lookahead), Window: uint32(window), Drops: drops,
		Chunk: uint32(chunk), Own: own, Session: SessionHash(session),
	}
	if err := e.check(); err != nil {
		return malformed(begin, "%s", err)
	}
	return nil
}

// decodeHashes decodes the output of appendHashes and appends the hashes to the buffer. The buffer has enough capacity.
func decodeHashes[H ~uint64](r *msgp.Reader, buffer *[]uint64) ([]H, bool) {
	if r.Null() {
		return nil, true
	}
	at := r.At
	bytes, ok := r.Bin()
	if !ok || len(bytes)%8 != 0 || len(bytes) > 8*MaxBlocksPerEvent {
		r.At = at
		return nil, false
	}
	n := len(bytes) / 8
	if n == 0 {
		return nil, true
	}
	begin := len(*buffer)
	*buffer = (*buffer)[:begin+n]
	into := (*buffer)[begin:]
	littleendian.Read(into, bytes)
	return unsafe.Slice((*H)(unsafe.Pointer(&into[0])), n), true
}
