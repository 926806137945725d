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
	families   = 5 // of prompts that share their beginnings
	deepest    = 12
	branchEach = 3 // depths at which a family's prompts part
)

// path is a prompt as the choices that its blocks stand for: the family, then one branch for each block.
type path string

func (p path) blocks() int { return len(p) - 1 }

// tokens of the path's blocks from one to another. Blocks at the same depth on the same branch number have the same
// tokens, in whatever prompt of a family: only the path tells them apart.
func (p path) tokens(from, to int) (out []uint32) {
	for i := from; i < to; i++ {
		for j := range uint32(harness.BlockSize) {
			out = append(out, uint32(p[0])<<16|uint32(i)<<8|uint32(p[i+1])<<5|j)
		}
	}
	return out
}

// randomPath is one of the paths of a family, of any length from 1 on.
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

// heldCopy is one copy of a block that the engine has announced.
type heldCopy struct {
	path path
	host bool
}

// tortured is an engine whose events a publisher announces, and what is true of it.
type tortured struct {
	name   string
	pub    *pyenv.Publisher
	rng    *rand.Rand
	hasher *events.Hasher

	life    int
	truth   *twin.Rank
	copies  []heldCopy
	next    uint64 // of the messages
	base    uint64 // the engine held nothing before this message
	lost    uint64 // what messages before this one said may not be known to the index
	gone    uint64 // what messages before this one said cannot be replayed
	drops   []bool // what becomes of the next messages: dropped, and kept or not
	events  int
	dropped int // for good

	changed func() // called after each event; may be nil
}

func (e *tortured) exact() bool { return e.lost <= e.base }

// replayable reports whether a replay from the start gives all that the engine holds.
func (e *tortured) replayable() bool { return e.exact() && e.gone <= e.base }

// hash is what the engine calls a block in this life.
func (e *tortured) hash(p path) uint64 {
	return xxh3.HashString(fmt.Sprintf("%s/%d/%s", e.name, e.life, string(p)))
}

func medium(host bool) (string, events.Tier) {
	if host {
		return "CPU", events.Host
	}
	return "GPU", events.Device
}

// store makes the event that a path's blocks from one on are stored.
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

// announce publishes one message of random events.
func (e *tortured) announce() {
	var said []pyenv.Event
	var meant []events.Event
	take := func(s pyenv.Event, m events.Event) { said, meant = append(said, s), append(meant, m) }
	clear := -1
	for range 1 + e.rng.IntN(4) {
		switch n := e.rng.IntN(100); {
		case n < 40: // a prompt, or what follows a part of it that is there
			p := randomPath(e.rng)
			from := 0
			for from < p.blocks()-1 && slices.Contains(e.copies, heldCopy{p[:from+2], false}) {
				from++
			}
			take(e.store(p, from, false))
		case n < 50: // the same once more, or from the middle on, or of a parent that was never announced
			p := randomPath(e.rng)
			take(e.store(p, e.rng.IntN(p.blocks()), e.rng.IntN(4) == 0))
		case n < 62 && len(e.copies) > 0: // a copy in host memory
			c := e.copies[e.rng.IntN(len(e.copies))]
			take(e.store(c.path, c.path.blocks()-1, true))
		case n < 94 && len(e.copies) > 0: // any that are held: the first hole is anywhere
			some := []heldCopy{e.copies[e.rng.IntN(len(e.copies))]}
			for range e.rng.IntN(4) {
				if c := e.copies[e.rng.IntN(len(e.copies))]; c.host == some[0].host && !slices.Contains(some, c) {
					some = append(some, c)
				}
			}
			take(e.remove(some...))
		case n < 97: // one that may not be there
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

// publish sends one message and notes what is true from then on, after each of its events: an answer may come between
// any two.
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

// clear empties the engine in a message of its own.
func (e *tortured) clear() {
	e.copies = nil
	e.publish([]pyenv.Event{{Op: "clear"}}, []events.Event{{Kind: events.Cleared}}, true)
}

// flush sends what nobody drops, so that what was dropped before shows as a gap.
func (e *tortured) flush() {
	for len(e.drops) > 0 {
		e.announce()
	}
}

// mark announces a block that nobody has announced before, and returns its local hash: who sees it has seen all before
// it.
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

// forget leaves the last messages only for replay. How much of what goes has been heard, nobody knows.
func (e *tortured) forget(keep int) {
	e.pub.Forget(keep)
	if n := uint64(keep); e.next > n {
		e.gone = max(e.gone, e.next-n)
		e.lost = max(e.lost, e.gone)
	}
}

// restart begins a new life of the engine. Readers of its sockets see the connection end, or nothing.
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
	e.announceSome() // a message that is not dropped: whoever listens notices
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

// judge compares what the index says of a prompt with the truth. It returns what is wrong, or "".
func (e *tortured) judge(locals []events.LocalHash, got [events.NumTiers]uint32) string {
	want := e.truth.Match(locals)
	if got == want {
		return ""
	}
	if e.exact() {
		return fmt.Sprintf("%s holds %v of it, the index says %v", e.name, want, got)
	}
	var seq events.SeqHash
	i := 0
	for t, n := range got {
		for range n {
			seq = twin.Next(seq, i == 0, locals[i])
			if !e.truth.Holds(events.Tier(t+1), seq) {
				return fmt.Sprintf(
					"%s has lost events and holds %v of it, the index says %v: block %d is not in its tier %s", e.name,
					want, got, i, events.Tier(t+1))
			}
			i++
		}
	}
	return ""
}
