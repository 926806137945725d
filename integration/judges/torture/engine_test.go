//go:build judges

package torture

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/pyenv"
	"github.com/kvatlas/kvatlas/tools/twin"
	"github.com/zeebo/xxh3"
)

const (
	families   = 5 // of prompts with common prefixes
	deepest    = 12
	branchEach = 3 // number of depths with branches in a family
)

// path is a prompt as a series of choices: the family, then a branch for every block.
type path string

func (p path) blocks() int { return len(p) - 1 }

// tokens returns the tokens of the path's blocks from from up to to. Blocks at the same depth with the same branch
// number have the same tokens in all prompts of a family. Only the path distinguishes such blocks.
func (p path) tokens(from, to int) (out []uint32) {
	for i := from; i < to; i++ {
		for j := range uint32(harness.BlockSize) {
			out = append(out, uint32(p[0])<<16|uint32(i)<<8|uint32(p[i+1])<<5|j)
		}
	}
	return out
}

// randomPath returns a path of a random family and length.
func randomPath(rng *rand.Rand) path {
	p := []byte{byte('a' + rng.IntN(families))}
	for i := range 1 + rng.IntN(deepest) {
		branch := 0
		if i%branchEach == 1 {
			branch = rng.IntN(2)
		}
		p = append(p, byte(branch))
	}
	return path(p)
}

// allPaths are the longest paths of every family.
func allPaths() (all []path) {
	for f := range families {
		list := []path{path([]byte{byte('a' + f)})}
		for i := range deepest {
			for _, p := range list[:len(list):len(list)] {
				list = append(list, p+"\x00")
				if i%branchEach == 1 {
					list = append(list, p+"\x01")
				}
			}
			list = slices.DeleteFunc(list, func(p path) bool { return p.blocks() <= i })
		}
		all = append(all, list...)
	}
	return all
}

// heldCopy is an announced copy of a block.
type heldCopy struct {
	path path
	host bool
}

// tortured is an engine with a publisher and the true state.
type tortured struct {
	name   string
	pub    *pyenv.Publisher
	rng    *rand.Rand
	hasher *events.Hasher

	life    int
	truth   *twin.Rank
	copies  []heldCopy
	next    uint64 // of the messages
	base    uint64 // the engine was empty before this message
	lost    uint64 // the index may lack events of messages before this message
	gone    uint64 // messages before this message cannot be replayed
	drops   []bool // the fate of the next messages: dropped, and kept or not
	events  int
	dropped int // for good

	changed func() // called after every event; may be nil
}

func (e *tortured) exact() bool { return e.lost <= e.base }

// replayable reports whether a replay from the start has all held blocks.
func (e *tortured) replayable() bool { return e.exact() && e.gone <= e.base }

// hash returns the engine's hash of a block in this life.
func (e *tortured) hash(p path) uint64 {
	return xxh3.HashString(fmt.Sprintf("%s/%d/%s", e.name, e.life, string(p)))
}

func medium(host bool) (string, events.Tier) {
	if host {
		return "CPU", events.Host
	}
	return "GPU", events.Device
}

// store returns the store event of a path's blocks from from on.
func (e *tortured) store(p path, from int, host bool) (pyenv.Event, events.Event) {
	name, tier := medium(host)
	said := pyenv.Event{Op: "store", Tokens: p.tokens(from, p.blocks()), Medium: name}
	meant := events.Event{Kind: events.Stored, Tier: tier, Locals: e.hasher.Hash(nil, said.Tokens)}
	if from > 0 {
		parent := e.hash(p[:from+1])
		said.Parent, meant.HasParent, meant.Parent = &parent, true, events.BlockHash(parent)
	}
	for i := from; i < p.blocks(); i++ {
		h := e.hash(p[:i+2])
		said.Hashes, meant.Blocks = append(said.Hashes, h), append(meant.Blocks, events.BlockHash(h))
		e.copies = append(e.copies, heldCopy{p[:i+2], host})
	}
	return said, meant
}

func (e *tortured) remove(copies ...heldCopy) (pyenv.Event, events.Event) {
	name, tier := medium(copies[0].host)
	said := pyenv.Event{Op: "remove", Medium: name}
	meant := events.Event{Kind: events.Removed, Tier: tier}
	for _, c := range copies {
		h := e.hash(c.path)
		said.Hashes, meant.Blocks = append(said.Hashes, h), append(meant.Blocks, events.BlockHash(h))
		if i := slices.Index(e.copies, c); i >= 0 {
			e.copies = slices.Delete(e.copies, i, i+1)
		}
	}
	return said, meant
}

// announce publishes a message of random events.
func (e *tortured) announce() {
	var said []pyenv.Event
	var meant []events.Event
	take := func(s pyenv.Event, m events.Event) { said, meant = append(said, s), append(meant, m) }
	clear := -1
	for range 1 + e.rng.IntN(4) {
		switch n := e.rng.IntN(100); {
		case n < 40: // a prompt, or the continuation of a held part
			p := randomPath(e.rng)
			from := 0
			for from < p.blocks()-1 && slices.Contains(e.copies, heldCopy{p[:from+2], false}) {
				from++
			}
			take(e.store(p, from, false))
		case n < 50: // a repeated prompt, a part from the middle, or a part with an unannounced parent
			p := randomPath(e.rng)
			take(e.store(p, e.rng.IntN(p.blocks()), e.rng.IntN(4) == 0))
		case n < 62 && len(e.copies) > 0: // a copy in host memory
			c := e.copies[e.rng.IntN(len(e.copies))]
			take(e.store(c.path, c.path.blocks()-1, true))
		case n < 94 && len(e.copies) > 0: // any held block: this also makes holes
			some := []heldCopy{e.copies[e.rng.IntN(len(e.copies))]}
			for range e.rng.IntN(4) {
				if c := e.copies[e.rng.IntN(len(e.copies))]; c.host == some[0].host && !slices.Contains(some, c) {
					some = append(some, c)
				}
			}
			take(e.remove(some...))
		case n < 97: // perhaps a missing block
			take(e.remove(heldCopy{randomPath(e.rng), e.rng.IntN(3) == 0}))
		case n == 97 && e.rng.IntN(3) == 0:
			take(pyenv.Event{Op: "clear"}, events.Event{Kind: events.Cleared})
			e.copies = nil
			clear = len(meant) - 1
		}
	}
	if len(said) > 0 {
		e.publish(said, meant, clear >= 0)
	}
}

// publish sends a message and records the true states after every event, because a query may run between two events.
func (e *tortured) publish(said []pyenv.Event, meant []events.Event, clears bool) {
	seq, _ := e.pub.Publish(said...)
	e.sent(seq, clears)
	for i := range meant {
		e.truth.Apply(1, meant[i:i+1])
		e.tell()
	}
	e.events += len(meant)
}

func (e *tortured) tell() {
	if e.changed != nil {
		e.changed()
	}
}

func (e *tortured) sent(seq uint64, clears bool) {
	e.next = seq + 1
	kept := true
	if len(e.drops) > 0 {
		kept, e.drops = e.drops[0], e.drops[1:]
	}
	switch {
	case kept && clears:
		e.base = seq
	case !kept:
		e.lost, e.dropped = seq+1, e.dropped+1
	}
}

// clear empties the engine with a separate message.
func (e *tortured) clear() {
	e.copies = nil
	e.publish([]pyenv.Event{{Op: "clear"}}, []events.Event{{Kind: events.Cleared}}, true)
}

// flush sends messages until no message is dropped, so that earlier drops are detected as a gap.
func (e *tortured) flush() {
	for len(e.drops) > 0 {
		e.announce()
	}
}

// mark announces a new block and returns the local hash. An index with the mark has all earlier events.
func (e *tortured) mark(number uint64) events.LocalHash {
	e.flush()
	t := make([]uint32, harness.BlockSize)
	for i := range t {
		t[i] = 1<<31 | uint32(number)
	}
	local := e.hasher.Hash(nil, t)
	h := xxh3.Hash(binary.LittleEndian.AppendUint64([]byte(e.name), number))
	e.publish([]pyenv.Event{{Op: "store", Tokens: t, Hashes: []uint64{h}}},
		[]events.Event{{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{events.BlockHash(h)},
			Locals: local}}, false)
	return local[0]
}

// drop makes the next messages a gap.
func (e *tortured) drop(n int, keep bool) {
	e.pub.Drop(n, keep)
	for range n {
		e.drops = append(e.drops, keep)
	}
}

// forget keeps only the last messages for replay. The test cannot know how many of the removed messages the shim has
// received.
func (e *tortured) forget(keep int) {
	e.pub.Forget(keep)
	if n := uint64(keep); e.next > n {
		e.gone = max(e.gone, e.next-n)
		e.lost = max(e.lost, e.gone)
	}
}

// restart begins a new life of the engine. Subscribers detect a closed connection if seen is set.
func (e *tortured) restart(seen bool) {
	if seen {
		e.pub.Restart()
	} else {
		e.pub.RestartUnseen()
	}
	e.life++
	e.truth, e.copies, e.drops = harness.NewTruth(), nil, nil
	e.next, e.base, e.lost, e.gone = 0, 0, 0, 0
	e.tell()
	e.announceSome() // a message that is not dropped, so that subscribers detect the change
}

func (e *tortured) announceSome() {
	p := randomPath(e.rng)
	s, m := e.store(p, 0, false)
	e.publish([]pyenv.Event{s}, []events.Event{m}, false)
}

// burst sends many messages of many blocks at once.
func (e *tortured) burst(n, blocks int, first uint32) {
	e.flush()
	b := e.pub.Burst(n, blocks, first)
	t := make([]uint32, b.Tokens)
	for i := range t {
		t[i] = first + uint32(i)
	}
	locals := e.hasher.Hash(nil, t)
	for i := range n {
		ev := events.Event{Kind: events.Stored, Tier: events.Device, Locals: locals[i*blocks : (i+1)*blocks]}
		for _, h := range b.Hashes[i*blocks : (i+1)*blocks] {
			ev.Blocks = append(ev.Blocks, events.BlockHash(h))
		}
		if i > 0 {
			ev.HasParent, ev.Parent = true, events.BlockHash(b.Hashes[i*blocks-1])
		}
		e.truth.Apply(1, []events.Event{ev})
	}
	e.next = b.LastSeq + 1
	e.events += n
}

// judge compares the index's answer for a prompt with the truth. It returns the difference, or "".
func (e *tortured) judge(locals []events.LocalHash, got [events.NumTiers]uint32) string {
	want := e.truth.Match(locals)
	if got == want {
		return ""
	}
	if e.exact() {
		return fmt.Sprintf("%s holds %v of the prompt, the index has %v", e.name, want, got)
	}
	var seq events.SeqHash
	i := 0
	for t, n := range got {
		for range n {
			seq = twin.Next(seq, i == 0, locals[i])
			if !e.truth.Holds(events.Tier(t+1), seq) {
				return fmt.Sprintf(
					"%s has lost events and holds %v of the prompt, the index has %v: block %d is not in tier %s", e.name,
					want, got, i, events.Tier(t+1))
			}
			i++
		}
	}
	return ""
}
