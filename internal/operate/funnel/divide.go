package funnel

import (
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Request is a query or a choice, with its answer. Depths are in blocks. The slices of a request must not change.
type Request struct {
	At        time.Time // time of the answer
	Model     string
	BlockSize uint32

	// Tokens, with their Space and images, or the local hashes of the blocks. No field is set for a text with unknown
	// tokens.
	Tokens []uint32
	Space  events.Space
	Media  []events.MediaItem
	Hashes []uint64

	Unsupported bool // a field of the request prevented the look-up

	ISL uint64 // tokens of the prompt; 0: the number follows from the fields above

	BlockSizes []uint32 // of the model's workers

	Tenant   string // empty: none
	Lowered  bool   // a quota has lowered the priority
	rejected bool   // see [Tracker.Reject]

	Held       uint32 // the deepest holding of any worker,
	HeldIn     Tiers  // and its tiers
	Shared     uint32 // depth of the shared store from the start
	Incomplete bool   // the answer lacked partitions
	Restricted bool   // the request excludes workers

	Routed     bool
	ID         string          // id of the request in reports
	Worker     events.WorkerID // the chosen worker; empty without a choice
	Known      uint32          // the deepest holding of any worker that is or was registered
	Registered uint32          // the deepest holding of a registered worker
	Eligible   uint32          // the deepest holding of an eligible worker
	Selected   uint32          // the holding of the chosen worker,
	SelectedIn Tiers           // and its tiers
	Pinned     bool            // the request or its session determines the worker
	Bypass     bool            // the decode worker computes the prompt without an eligible prefill worker's blocks
}

// Tiers contains a number for each tier: device, host, disk, external. A prefix uses the tiers in this order.
type Tiers [events.NumTiers]uint64

// NewTiers returns the blocks of a prefix by tier.
func NewTiers(device, host, disk, external uint32) Tiers {
	return Tiers{uint64(device), uint64(host), uint64(disk), uint64(external)}
}

// Blocks returns the sum of all tiers.
func (t Tiers) Blocks() (n uint32) {
	for _, of := range t {
		n += uint32(of)
	}
	return n
}

// tokens returns the tokens of the first blocks, by tier. Blocks without a tier count for the device.
func (t Tiers) tokens(blocks int, size uint64) (tokens Tiers) {
	left := uint64(blocks)
	for i, of := range t {
		of = min(of, left)
		tokens[i] = of * size
		left -= of
	}
	tokens[0] += left * size
	return tokens
}

// Outcomes of choices.
const (
	outcomeBest     = "best"
	outcomeLoad     = "lost_to_load"
	outcomeBypass   = "bypass"
	outcomeCold     = "cold"
	outcomePinned   = "pinned"
	outcomeNoIndex  = "no_index"
	outcomeNoWorker = "no_worker"
)

// outcome returns the result of the choice.
func (r *Request) outcome() string {
	switch {
	case r.Worker == "":
		return outcomeNoWorker
	case r.Incomplete && r.Held == 0:
		return outcomeNoIndex
	case r.Held == 0:
		return outcomeCold
	case r.Selected >= r.Eligible:
		return outcomeBest
	case r.Pinned:
		return outcomePinned
	case r.Bypass:
		return outcomeBypass
	}
	return outcomeLoad
}

// prompt contains the block names of a request's prompt.
type prompt struct {
	names []Name
	plain []Name   // names without the LoRA, in the space of prompts with a LoRA; empty if no prompt has a LoRA
	bare  []Name   // names without the LoRA, in the space of prompts without a LoRA; empty without a LoRA
	other [][]Name // names in other block sizes
	sizes []uint32 // sizes of other
	own   []events.LocalHash

	locals []events.LocalHash // scratch memory, as is seq
	seq    []events.SeqHash
}

// read computes the names of a request's blocks in reused memory, also without a LoRA if any prompt has a LoRA. All
// names include the request's salt. A salt separates tenants, so results for a salt must not depend on prompts with
// another salt.
func (p *prompt) read(r *Request, adapted bool) {
	p.names, p.plain, p.bare, p.other, p.sizes = p.names[:0], p.plain[:0], p.bare[:0], p.other[:0], p.sizes[:0]
	p.locals, p.own = p.locals[:0], p.own[:0]
	if r.Tokens == nil {
		for _, h := range r.Hashes {
			p.locals = append(p.locals, events.LocalHash(h))
		}
		p.own = append(p.own, p.locals...)
		p.names = p.appendNames(p.names, r.Model, r.BlockSize)
		return
	}
	p.names = p.hash(p.names, r, r.BlockSize, r.Space)
	p.own = append(p.own, p.locals...)
	bare := p.names
	if r.Space.LoRA != "" {
		p.bare = p.hash(p.bare, r, r.BlockSize, events.Space{Salt: r.Space.Salt})
		bare = p.bare
	}
	if adapted || r.Space.LoRA != "" {
		for _, n := range bare {
			p.plain = append(p.plain, n^plain)
		}
	}
	for _, size := range r.BlockSizes {
		if size != r.BlockSize {
			p.other = append(p.other, p.hash(nil, r, size, r.Space))
			p.sizes = append(p.sizes, size)
		}
	}
}

// hash appends the names of a request's tokens in blocks of a size.
func (p *prompt) hash(names []Name, r *Request, size uint32, in events.Space) []Name {
	hasher, err := events.NewHasher(size, in)
	if err != nil {
		return names
	}
	p.locals = hasher.HashItems(p.locals[:0], r.Tokens, r.Media)
	return p.appendNames(names, r.Model, size)
}

// appendNames appends the names of p.locals.
func (p *prompt) appendNames(names []Name, model string, size uint32) []Name {
	p.seq = events.SeqHashes(p.seq[:0], p.locals)
	in := space(model, size)
	for _, s := range p.seq {
		names = append(names, Name(uint64(s)^in))
	}
	return names
}

// known combines the histories of the nodes.
type known struct {
	history *History
	others  map[Name]peerapi.BlockPast
}

func (k known) past(n Name) (peerapi.BlockPast, bool) {
	a, here := k.history.Block(n)
	b, there := k.others[n]
	return join(a, b), here || there
}

// seen returns the number of leading blocks that were requested or stored before a time.
func (k known) seen(names []Name, before int64) int {
	for i := len(names) - 1; i >= 0; i-- {
		p, _ := k.history.blocks.get(uint64(names[i]))
		if earlier(p.asked, p.stored, before) {
			return i + 1
		}
		if len(k.others) > 0 {
			if p := k.others[names[i]]; earlier(p.Asked, p.Stored, before) {
				return i + 1
			}
		}
	}
	return 0
}

func earlier(asked, stored, before int64) bool {
	return asked != 0 && asked <= before || stored != 0 && stored < before
}

// loss contains a request's tokens that a cause has lost.
type loss struct {
	step   api.FunnelStep // the first step without the tokens
	cause  api.FunnelCause
	tokens uint64
	worker events.WorkerID
	tier   events.Tier
	age    int64 // microseconds; for tokens with a worker
}

// share is the part of one request in the funnel.
type share struct {
	asked, seen, held, selected uint64
	heldIn, selectedIn          Tiers // held and selected by tier, in tokens
	lost                        []loss
}

func (s *share) lose(l loss) {
	if l.tokens == 0 {
		return
	}
	if n := len(s.lost); n > 0 {
		if last := &s.lost[n-1]; last.step == l.step && last.cause == l.cause && last.worker == l.worker &&
			last.tier == l.tier && last.age == l.age {
			last.tokens += l.tokens
			return
		}
	}
	s.lost = append(s.lost, l)
}

// divide assigns a request's lost tokens to causes. elsewhere reports whether the prompts that a worker has stored
// since a time have different beginnings than all requests.
func divide(r *Request, p *prompt, k known, elsewhere func(events.WorkerID, int64) bool) (s share) {
	now, size := r.At.UnixMicro(), uint64(r.BlockSize)
	whole := uint64(len(p.names)) * size
	s.asked = max(r.ISL, uint64(len(r.Tokens)), whole)
	if r.Tokens == nil && r.Hashes == nil {
		cause := api.CauseNotTokenized
		if r.Unsupported {
			cause = api.CauseUnsupported
		}
		s.lose(loss{step: api.StepSeen, cause: cause, tokens: s.asked})
		return s
	}
	held := min(int(r.Held), len(p.names))
	seen := max(k.seen(p.names, now), held)
	s.seen, s.held, s.heldIn = uint64(seen)*size, uint64(held)*size, r.HeldIn.tokens(held, size)

	// From asked to seen.
	otherLoRA, otherSize := s.seen, s.seen
	for _, list := range [][]Name{p.plain, p.bare} {
		otherLoRA = max(otherLoRA, uint64(k.seen(list, now))*size)
	}
	for i, list := range p.other {
		otherSize = max(otherSize, min(whole, uint64(k.seen(list, now))*uint64(p.sizes[i])))
	}
	s.lose(loss{step: api.StepSeen, cause: api.CauseOtherSpace, tokens: otherLoRA - s.seen})
	if otherSize > otherLoRA {
		s.lose(loss{step: api.StepSeen, cause: api.CauseOtherBlockSize, tokens: otherSize - otherLoRA})
	}
	s.lose(loss{step: api.StepSeen, cause: api.CauseNew, tokens: whole - max(otherLoRA, otherSize)})
	s.lose(loss{step: api.StepSeen, cause: api.CausePartialBlock, tokens: s.asked - whole})

	// From seen to held.
	last := loss{step: api.StepHeld, tokens: size}
	for i := held; i < seen; i++ {
		b, known := k.past(p.names[i])
		last = lostBlock(r, i, b, known, last, k.history.from)
		if i == 0 && last.cause == api.CauseNeverStored && b.Sent != "" && elsewhere(b.Sent, b.SentAt) {
			last.cause, last.worker = api.CauseTokens, b.Sent
		}
		s.lose(last)
	}

	// From held to selected.
	if !r.Routed {
		s.lose(loss{step: api.StepSelected, cause: api.CauseNotRouted, tokens: s.held})
		return s
	}
	selected := min(int(r.Selected), held)
	eligible := min(max(selected, int(r.Eligible)), held)
	registered := min(max(eligible, int(r.Registered)), held)
	known := min(max(registered, int(r.Known)), held)
	s.selected, s.selectedIn = uint64(selected)*size, r.SelectedIn.tokens(selected, size)
	s.lose(loss{step: api.StepSelected, cause: api.CauseWorkerUnknown, tokens: uint64(held-known) * size})
	s.lose(loss{step: api.StepSelected, cause: api.CauseWorkerGone, tokens: uint64(known-registered) * size})
	s.lose(loss{step: api.StepSelected, cause: api.CauseNotEligible, tokens: uint64(registered-eligible) * size})
	cause := api.CauseLoad
	switch {
	case r.Pinned || r.Worker == "":
		cause = api.CauseNotEligible
	case r.Bypass:
		cause = api.CauseBypass
	}
	s.lose(loss{step: api.StepSelected, cause: cause, tokens: uint64(eligible-selected) * size})
	return s
}

// lostBlock returns the reason why a seen block is not held; before is the reason for the previous block.
func lostBlock(r *Request, i int, b peerapi.BlockPast, known bool, before loss, from int64) loss {
	l := loss{step: api.StepHeld, tokens: before.tokens}
	now := r.At.UnixMicro()
	switch {
	case i < int(r.Shared):
		l.cause = api.CauseUncountedTier
	case r.Incomplete:
		l.cause = api.CauseIndexIncomplete
	case known && b.Lost != 0 && b.Lost >= b.Last:
		l.cause, l.worker, l.tier, l.age = b.Why, b.Worker, b.Tier, max(0, now-b.Lost)
	case before.cause != "" && before.cause != api.CauseNeverStored && before.cause != api.CauseTokens &&
		(!known || b.Stored != 0 && b.Stored < now):
		return before // the block may be held behind a missing block
	case known && b.Stored != 0 && b.Stored < now && r.Restricted:
		l.cause = api.CauseNotAllowed
	case before.cause == api.CauseTokens && !(known && b.Stored != 0 && b.Stored < now):
		return before
	case known && b.Asked >= from && !b.Held && (b.Stored == 0 || b.Stored >= now):
		l.cause = api.CauseNeverStored
	default:
		l.cause = api.CauseUnexplained
	}
	return l
}
