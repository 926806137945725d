package events

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// Bounds of an engine's input.
const (
	// maxPayload bounds the bytes of one engine message.
	maxPayload = 64 << 20

	// maxEventTokens bounds the tokens, and the blocks, of one engine event.
	maxEventTokens = 1 << 20
)

// Engine is a family of engines with the same format of messages.
type Engine uint8

// The engines. TensorRT-LLM's ZMQ publisher, Dynamo's mocker and llm-d's simulator write vLLM's events.
const (
	VLLM   Engine = 1
	SGLang Engine = 2

	// AnyEngine is an engine to be identified by the messages.
	AnyEngine Engine = 3
)

var engineNames = [...]string{"", "vLLM", "SGLang", "engine"}

func (e Engine) String() string {
	if e.valid() {
		return engineNames[e]
	}
	return fmt.Sprintf("engine(%d)", uint8(e))
}

func (e Engine) valid() bool { return e >= VLLM && e <= AnyEngine }

// EngineOf translates an engine's name, in any case; "auto" is AnyEngine.
func EngineOf(name string) (Engine, error) {
	for e := VLLM; e <= SGLang; e++ {
		if strings.EqualFold(name, engineNames[e]) {
			return e, nil
		}
	}
	if strings.EqualFold(name, "auto") {
		return AnyEngine, nil
	}
	return 0, fmt.Errorf("events: unknown engine %q: want vllm, sglang or auto", name)
}

// blockSizeOptions are the command-line options that set an engine's block size.
var blockSizeOptions = map[Engine]string{VLLM: "--block-size", SGLang: "--page-size"}

// DecoderConfig describes the engine of a decoder. Engine and BlockSize are required.
type DecoderConfig struct {
	Engine    Engine
	BlockSize uint32      // tokens: the size that all of the engine's blocks must have
	Groups    []GroupSpec // by number: the kinds of the engine's groups, used where events lack them

	// Store is true if the worker has registered a store that vLLM's MooncakeStoreConnector fills. The decoder then skips
	// the connector's announcements of copies, in the form of any version.
	Store bool

	// UnnamedAdapters is set if the engine serves adapters without names in events: SGLang before 0.5.23, unless
	// 0.5.22 publishes in the format dynamo. Blocks without an adapter may be an adapter's then, and are skipped.
	UnnamedAdapters bool
}

// Message is one decoded engine message.
type Message struct {
	Timestamp float64 // seconds since 1970 by the engine's clock; 0 if the message has none
	Rank      Rank    // the data-parallel rank, if HasRank
	HasRank   bool
	Events    []Event // in the engine's order; there may be none
}

// Decoder turns one rank's engine messages into events. A decoder belongs to one goroutine.
//
// A decoder keeps two facts between messages: the salts of stored blocks, since an engine announces a salt only
// with a prompt's first block; and whether a block has the name 0. Both are bounded. A forgotten fact never credits a
// block to a wrong prompt.
type Decoder struct {
	engine Engine
	asked  Engine // the configured engine
	why    string // the sign that identified the engine, if the configuration is AnyEngine
	block  uint32
	groups []GroupSpec
	store  bool // see DecoderConfig
	unsure bool // blocks without an adapter may be an adapter's: DecoderConfig.UnnamedAdapters

	salts salts
	zero  bool // a block has the name 0, so a parent 0 is a block and not the absence of a parent

	standIns uint32 // the number for an image's first token; 0 until events show it (tensorrt.go)

	sizes  blockSizes
	counts SkipCounts

	// Buffers of the part that was decoded last.
	events []Event
	blocks []BlockHash
	locals []LocalHash

	envelope envelope   // the current message
	removing longRemove // the current removed event, if it has very many blocks
	bound    partBound

	// Buffers of the current event.
	raw     rawEvent
	tokens  []uint32
	digests []digest // among the tokens
	media   perBlock[BlockMedia]
	beyond  perBlock[uint32]
	window  []uint32
	digits  [20]byte
	scratch blockScratch
	names   nameSet
}

// NewDecoder returns a decoder for one rank.
func NewDecoder(cfg DecoderConfig) (*Decoder, error) {
	if !cfg.Engine.valid() {
		return nil, fmt.Errorf("events: decoder: unknown engine %d", cfg.Engine)
	}
	if cfg.BlockSize == 0 || cfg.BlockSize > MaxBlockSize {
		return nil, fmt.Errorf("events: decoder: a block size of %d tokens: want 1 to %d", cfg.BlockSize, MaxBlockSize)
	}
	d := Decoder{asked: cfg.Engine, block: cfg.BlockSize, groups: cfg.Groups, store: cfg.Store,
		unsure: cfg.UnnamedAdapters}
	return d.Blank(), nil
}

// Counts returns the number of skips by reason since the decoder was created.
func (d *Decoder) Counts() SkipCounts { return d.counts }

// Diagnosis is a *BlockSizeError while all device blocks that the engine has announced are of another size, and nil
// otherwise. The first block of the right size ends the diagnosis, and so does Reset. The result may change within a
// message.
func (d *Decoder) Diagnosis() error {
	if !d.sizes.wrong() {
		return nil
	}
	return &BlockSizeError{Engine: d.engine, Want: d.block, Got: d.sizes.got, Events: d.sizes.n}
}

// Reset prepares the decoder for a new engine process: all state about the old process is dropped. Counts stay.
func (d *Decoder) Reset() {
	d.salts.clear()
	d.zero, d.standIns, d.sizes = false, 0, blockSizes{}
	d.engine, d.why = d.asked, ""
	d.close()
}

// Cleared reports a clear of the rank's blocks in the log. The decoder's state does not depend on these blocks.
func (d *Decoder) Cleared() {}

// Blank returns a new decoder of the same configuration, without state.
func (d *Decoder) Blank() *Decoder {
	return &Decoder{engine: d.asked, asked: d.asked, block: d.block, groups: d.groups, store: d.store,
		unsure: d.unsure}
}

// Adopt replaces d's state from earlier messages with that of another decoder of the same configuration. The caller
// must not use the other decoder afterwards. Counts and diagnosis of d stay.
func (d *Decoder) Adopt(other *Decoder) {
	d.salts, d.zero, d.standIns = other.salts, other.zero, other.standIns
	d.engine, d.why = other.engine, other.why
}

// Decode decodes one message. The returned events are valid until the next call.
//
// No event makes a message fail: an unusable event is skipped and counted. ErrMalformed means an unreadable
// message; Decode then returns no events and leaves the decoder unchanged.
//
// Decode returns all events at once. A message of the smallest events takes 40 times its size; see [Decoder.Begin].
func (d *Decoder) Decode(payload []byte) (Message, error) {
	m, _, err := d.begin(payload, partBound{math.MaxInt, math.MaxInt})
	return m, err
}

// Begin decodes the first part of a message. While more is set, [Decoder.Continue] returns the next part. Memory is
// thus bounded by the size of a part. The parts together equal the result of Decode. Errors are those of Decode: Begin
// checks the whole message before the first part is returned.
//
// The caller must not change payload until the last part is returned. The returned events are valid until the next
// call. Another Begin or a Reset abandons the rest of the message.
func (d *Decoder) Begin(payload []byte) (m Message, more bool, err error) {
	return d.begin(payload, usualPart)
}

func (d *Decoder) begin(payload []byte, bound partBound) (m Message, more bool, err error) {
	if d.envelope.r.Data != nil {
		d.close()
	}
	if len(payload) > maxPayload {
		return m, false, malformed(0, "%s message of %d bytes: at most %d", d.engine, len(payload), maxPayload)
	}
	d.bound = bound
	d.emptyPart()
	if d.engine == AnyEngine {
		d.detectEngine(payload)
	}
	v := &d.envelope
	v.r = msgp.Reader{Data: payload}
	done := false
	if err = v.open(d); err == nil {
		done, err = d.fill()
	}
	if err == nil && !done {
		err = d.checkRest()
	}
	if err != nil {
		d.events = d.events[:0]
		d.close()
		return m, false, err
	}
	m = v.message
	m.Events, more = d.part(done)
	return m, more, nil
}

// Continue decodes the next part of Begin's message, and reports whether more parts follow.
func (d *Decoder) Continue() (part []Event, more bool) {
	if !d.envelope.opened {
		return nil, false
	}
	d.nextPart()
	done, err := d.fill() // checkRest has checked the whole message
	return d.part(done || err != nil)
}

// part returns the decoded events. The last event of an unfinished message is withheld, so that more is exact.
func (d *Decoder) part(done bool) (part []Event, more bool) {
	if done {
		d.close()
		return d.events, false
	}
	return d.events[:len(d.events)-1], true
}

// close drops the current message.
func (d *Decoder) close() {
	d.envelope = envelope{}
	if d.removing.names.Data != nil {
		d.removing = longRemove{}
	}
	e := &d.raw // of the last event
	e.data, e.lora, e.loraID, e.salt = nil, nil, nil, nil
	clear(d.digests)
}

func (d *Decoder) emptyPart() {
	clear(d.events)
	d.events, d.blocks, d.locals = recycle(d.events), recycle(d.blocks), recycle(d.locals)
}

// nextPart empties the decoder's buffers, apart from the withheld event.
func (d *Decoder) nextPart() {
	kept := d.events[len(d.events)-1]
	blocks, locals := kept.Blocks, kept.Locals
	d.emptyPart()
	if d.blocks = append(d.blocks, blocks...); len(blocks) > 0 {
		kept.Blocks = d.blocks[:len(blocks):len(blocks)]
	}
	if d.locals = append(d.locals, locals...); len(locals) > 0 {
		kept.Locals = d.locals[:len(locals):len(locals)]
	}
	d.events = append(d.events, kept)
}

// partBound is the size of a complete part. A stored event may exceed the bound by maxEventTokens blocks.
type partBound struct{ events, blocks int }

// usualPart takes 2 MiB. A message of usual size is one part.
var usualPart = partBound{events: 4096, blocks: 64 << 10}

func (d *Decoder) full() bool {
	return len(d.events) > 1 && (len(d.events) > d.bound.events || len(d.blocks) > d.bound.blocks)
}

// fill decodes events until the part is full, or the message is done.
func (d *Decoder) fill() (done bool, err error) {
	v := &d.envelope
	for !d.full() {
		switch {
		case d.removing.left > 0:
			d.removeMore()
		case v.left > 0:
			begin := v.r.At
			v.left--
			if d.event(&v.r); v.r.Broken {
				return false, v.cutOff(d, begin)
			}
		default:
			return true, v.end(d)
		}
	}
	return false, nil
}

// checkRest reads the rest of the message without decoding it. Errors are thus found before the first part is returned.
// The rank follows the events, so checkRest sets the message's rank.
func (d *Decoder) checkRest() error {
	counts := d.counts
	rest := d.envelope
	for broken := false; rest.left > 0 && !broken; rest.left-- {
		broken = !rest.r.Skip()
	}
	if !rest.r.Broken && rest.end(d) == nil {
		d.counts = counts
		d.envelope.message = rest.message
		return nil
	}
	d.counts = counts
	for { // the events before the error leave the same traces as in a message of one part
		d.nextPart()
		switch done, err := d.fill(); {
		case err != nil:
			return err
		case done:
			return malformed(d.envelope.r.At, "%s message: not MessagePack", d.engine)
		}
	}
}

// envelope reads the frame of the events: [ts, events, rank] or a map of the same fields. Old builds omit the rank, and
// later ones may have further elements.
type envelope struct {
	r       msgp.Reader
	opened  bool // the list of events is reached
	pairs   int  // left in a map
	more    int  // elements behind the events in an array
	events  int  // in the list
	left    int  // of these, still to be read
	message Message
}

// open reads the message up to the first event.
func (v *envelope) open(d *Decoder) error {
	r := &v.r
	if n, ok := r.Array(); ok {
		if n < 2 {
			return malformed(r.At, "%s message: an array of %d elements, want [ts, events, rank]", d.engine, n)
		}
		d.timestamp(r, &v.message)
		v.more = n - 2
		return v.list(d)
	}
	n, ok := r.Map()
	if !ok {
		return malformed(r.At, "%s message: neither array nor map", d.engine)
	}
	v.pairs = n
	if err := v.fields(d); err != nil || v.opened {
		return err
	}
	if !r.Broken {
		return malformed(r.At, "%s message: a map without events", d.engine)
	}
	return v.broken(d)
}

// fields reads a map's pairs up to the events, or to the end.
func (v *envelope) fields(d *Decoder) error {
	r := &v.r
	for ; v.pairs > 0 && !r.Broken; v.pairs-- {
		key, isStr := r.Str()
		switch string(key) {
		case "ts":
			d.timestamp(r, &v.message)
		case "data_parallel_rank", "attn_dp_rank":
			d.rank(r, &v.message)
		case "events":
			if v.opened {
				return malformed(r.At, "%s message: events twice", d.engine)
			}
			v.pairs--
			return v.list(d)
		default:
			if !isStr {
				r.Skip()
			}
			r.Skip()
		}
	}
	return nil
}

func (v *envelope) list(d *Decoder) error {
	n, ok := v.r.Array()
	if !ok {
		return malformed(v.r.At, "%s message: no array of events", d.engine)
	}
	v.opened, v.events, v.left = true, n, n
	return nil
}

// end reads the fields after the events.
func (v *envelope) end(d *Decoder) error {
	if v.more > 0 {
		d.rank(&v.r, &v.message)
		v.r.SkipN(v.more - 1)
		v.more = 0
	}
	if err := v.fields(d); err != nil {
		return err
	}
	return v.broken(d)
}

func (v *envelope) broken(d *Decoder) error {
	if v.r.Broken {
		return malformed(v.r.At, "%s message: truncated or not MessagePack", d.engine)
	}
	return nil
}

// cutOff returns the error of the last event, which begins at this byte.
func (v *envelope) cutOff(d *Decoder, begin int) error {
	return malformed(v.r.At, "%s message: event %d of %d, from byte %d on: truncated or not MessagePack", d.engine,
		v.events-v.left-1, v.events, begin)
}

func (d *Decoder) timestamp(r *msgp.Reader, m *Message) {
	if v, ok := r.Float(); ok {
		m.Timestamp = v
	} else {
		d.ignore(r)
	}
}

func (d *Decoder) rank(r *msgp.Reader, m *Message) {
	if v, ok := r.Uint(math.MaxUint32); ok {
		m.Rank, m.HasRank = Rank(v), true
	} else {
		d.ignore(r)
	}
}

// ignore skips the value of an optional field with a wrong type, and counts values other than nil.
func (d *Decoder) ignore(r *msgp.Reader) {
	if !r.Null() {
		d.counts[skipField]++
		r.Skip()
	}
}

func (d *Decoder) event(r *msgp.Reader) {
	d.raw = rawEvent{data: r.Data, blocks: len(d.blocks), locals: len(d.locals), skip: notSkipped, skipStored: notSkipped}
	d.tokens, d.digests = d.tokens[:0], d.digests[:0]
	d.readEvent(r)
	if r.Broken {
		return
	}
	if skip := d.accept(&d.raw); skip != notSkipped {
		d.counts[skip]++
		d.blocks, d.locals = d.blocks[:d.raw.blocks], d.locals[:d.raw.locals]
	}
}

// notSkipped means that an event is not skipped.
const notSkipped Skip = math.MaxUint8

func (d *Decoder) accept(e *rawEvent) Skip {
	switch e.kind {
	case typeNone:
		return skipMalformed
	case typeUnknown:
		return skipUnknownType
	case typeCleared:
		// A clear is applied with any values in other fields.
		return d.cleared(Event{Kind: Cleared, Tier: AllTiers, Reason: ReasonEngine})
	}
	if e.skip != notSkipped {
		return e.skip
	}
	switch e.kind {
	case typeTierCleared:
		return d.cleared(Event{Kind: Cleared, Tier: e.tier, Reason: ReasonEngine}) // without a medium: all tiers
	case typeRemoved:
		return d.removed(e)
	}
	return d.stored(e)
}

func (d *Decoder) cleared(e Event) Skip {
	if e.Tier == AllTiers {
		d.salts.clear()
	}
	d.events = append(d.events, e)
	return notSkipped
}

// longRemove is the rest of a removed event with more than maxEventTokens blocks.
type longRemove struct {
	names msgp.Reader
	left  int   // names still to be read
	event Event // without blocks
	bad   bool  // a name was unreadable, and was counted
}

// removeMore decodes the next blocks of a long removed event.
func (d *Decoder) removeMore() {
	l := &d.removing
	begin := len(d.blocks)
	for ; l.left > 0 && len(d.blocks)-begin < MaxBlocksPerEvent; l.left-- {
		name, ok := d.readHash(&l.names)
		switch {
		case ok:
			d.blocks = append(d.blocks, name)
		default:
			l.names.Skip()
			if !l.bad {
				l.bad = true
				d.counts[skipHash]++
			}
		}
	}
	if n := len(d.blocks); n > begin {
		e := l.event
		e.Blocks = d.blocks[begin:n:n]
		d.events = append(d.events, e)
	}
}

// removed appends the readable names. No block can have been stored under an unreadable one.
func (d *Decoder) removed(e *rawEvent) Skip {
	if e.longNames > 0 {
		d.removing = longRemove{names: msgp.Reader{Data: e.data, At: e.namesAt}, left: e.longNames,
			event: Event{Kind: Removed, Tier: e.tierOrDevice(), Group: e.group}}
		return notSkipped
	}
	if e.badNames {
		d.counts[skipHash]++
	}
	blocks := d.blocks[e.blocks:]
	if len(blocks) == 0 && !e.badNames {
		return skipEmpty
	}
	for len(blocks) > 0 {
		n := min(len(blocks), MaxBlocksPerEvent)
		d.events = append(d.events, Event{Kind: Removed, Tier: e.tierOrDevice(), Group: e.group,
			Blocks: blocks[:n:n]})
		blocks = blocks[n:]
	}
	return notSkipped
}

func (d *Decoder) stored(e *rawEvent) Skip {
	blocks := d.blocks[e.blocks:]
	if e.badNames || e.longNames > 0 && !d.readable(e) {
		e.passStored(skipHash)
	}
	d.complete(e)
	switch {
	case e.skipStored != notSkipped:
		return e.skipStored
	case e.longNames > 0:
		return skipTooLarge
	// a group without blocks of the prompt: only the group's existence matters
	case len(blocks) == 0 && e.attention.Bounds():
		d.events = append(d.events, Event{
			Kind: Stored, Tier: e.tierOrDevice(), Group: e.group, Attention: e.attention, Window: e.window,
			Drops: e.drops,
		})
		return notSkipped
	case len(blocks) == 0:
		return skipEmpty
	case d.isStoreCopy(e):
		return skipStore
	}
	if d.isBareCopy(e) && e.attention.Main() {
		if len(d.digests) > 0 {
			return skipToken
		}
		return d.bareCopy(e, blocks)
	}
	if e.hasParent && e.parent == 0 && !d.zero {
		e.hasParent = false
	}
	hashed, skip := d.hashable(e, blocks)
	if skip != notSkipped {
		return skip
	}
	if !hashed {
		e.hasParent = false
	} else {
		if d.names.repeats(blocks, e.parent, e.hasParent) {
			return skipRepeated
		}
		if skip := d.hash(e, blocks); skip != notSkipped {
			return skip
		}
		if n := len(d.locals) - e.locals; n < len(blocks) {
			d.counts[skipToken]++
			blocks = blocks[:n]
		}
		if e.attention.Main() && e.tierOrDevice() == Device {
			d.sizes.accept(e.group)
		}
	}
	d.zero = d.zero || slices.Contains(blocks, 0)

	d.appendStored(e, blocks, hashed)
	return notSkipped
}

// hashable reports whether the tokens of a stored event name its blocks.
func (d *Decoder) hashable(e *rawEvent, blocks []BlockHash) (bool, Skip) {
	if len(d.tokens) == 0 {
		return false, notSkipped
	}
	fits := uint64(len(blocks))*uint64(e.blockSize) == uint64(e.tokenCount)
	switch {
	case !e.attention.Main() && (e.blockSize != d.block || !fits):
		// A group that is no part of the prefix needs only names.
		d.counts[skipGroupTokens]++
		return false, notSkipped
	case e.blockSize != d.block:
		return false, d.sizes.reject(e, blocks, d.block)
	case !fits:
		return false, skipLength
	case d.unsure && len(e.lora) == 0 && len(e.loraID) == 0:
		return false, SkipAdapter
	}
	return true, notSkipped
}

// appendStored adds events with the blocks, each with at most [MaxBlocksPerEvent].
func (d *Decoder) appendStored(e *rawEvent, blocks []BlockHash, hashed bool) {
	s := Event{
		Kind: Stored, Tier: e.tierOrDevice(), Group: e.group, Attention: e.attention,
		HasParent: e.hasParent, Parent: e.parent, Lookahead: e.ahead, Window: e.window, Drops: e.drops && e.ahead == 0,
	}
	if !s.HasParent {
		s.Parent = 0
	}
	if hashed {
		s.Session = e.session
	}
	locals := d.locals[e.locals:]
	for len(blocks) > 0 {
		n := min(len(blocks), MaxBlocksPerEvent)
		s.Blocks, blocks = blocks[:n:n], blocks[n:]
		if hashed {
			s.Locals, locals = locals[:n:n], locals[n:]
		}
		d.events = append(d.events, s)
		s.HasParent, s.Parent = hashed, 0
		if hashed {
			s.Parent = s.Blocks[n-1]
		}
	}
}

// readable reports whether all names of a long event are readable.
func (d *Decoder) readable(e *rawEvent) bool {
	r := msgp.Reader{Data: e.data, At: e.namesAt}
	for range e.longNames {
		if _, ok := d.readHash(&r); !ok {
			return false
		}
	}
	return true
}
