package node

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// sessionWorld applies the same events to a machine and to a naive model of a rank.
type sessionWorld struct {
	t      testing.TB
	index  radix.Config
	m      *Machine
	next   events.EventID
	seq    events.StreamSeq
	parent map[events.BlockHash]events.BlockHash // 0: none
	local  map[events.BlockHash]events.LocalHash
	copies [events.NumTiers]map[events.BlockHash]int
	ends   map[events.SessionHash]events.BlockHash

	log    []jetstream.Message
	bucket map[string][]byte // the last snapshot
}

func newSessionWorld(t testing.TB, index radix.Config) *sessionWorld {
	w := &sessionWorld{t: t, index: index, m: NewMachine(radix.New(index), 1), next: 1,
		parent: map[events.BlockHash]events.BlockHash{}, local: map[events.BlockHash]events.LocalHash{},
		ends: map[events.SessionHash]events.BlockHash{}}
	for i := range w.copies {
		w.copies[i] = map[events.BlockHash]int{}
	}
	w.m.Begin(0, 0, 0)
	return w
}

func (w *sessionWorld) apply(evs ...events.Event) {
	b := events.Batch{Incarnation: 1, FirstID: w.next, Model: "m", BlockSize: 16, Events: evs}
	data, err := events.AppendBatch(nil, &b)
	if err != nil {
		w.t.Fatal(err)
	}
	w.next, w.seq = w.next+events.EventID(len(evs)), w.seq+1
	w.log = append(w.log, jetstream.Message{Seq: w.seq, Time: events.Millis(w.seq), Key: events.RankKey{Instance: "w"},
		Data: data})
	w.m.Apply(0, w.log[len(w.log)-1:])
}

// chain returns the names of the blocks up to a block.
func (w *sessionWorld) chain(to events.BlockHash) (names []events.BlockHash) {
	for ; to != 0; to = w.parent[to] {
		names = append(names, to)
	}
	slices.Reverse(names)
	return names
}

// name returns the name of a block after parent; names are functions of the path, as an engine's.
func (w *sessionWorld) name(parent events.BlockHash, local events.LocalHash) events.BlockHash {
	name := (parent*31+events.BlockHash(local))*0x9e3779b97f4a7c15 | 1
	w.parent[name], w.local[name] = parent, local
	return name
}

// store announces blocks after parent; 0: at the start of a prompt.
func (w *sessionWorld) store(session events.SessionHash, parent events.BlockHash,
	locals []events.LocalHash) events.BlockHash {
	e := events.Event{Kind: events.Stored, Tier: events.Device, HasParent: parent != 0, Parent: parent, Locals: locals,
		Session: session}
	for _, l := range locals {
		parent = w.name(parent, l)
		e.Blocks = append(e.Blocks, parent)
		w.copies[0][parent]++
	}
	w.apply(e)
	if session != 0 && !slices.Contains(w.chain(w.ends[session]), parent) {
		w.ends[session] = parent
	}
	return parent
}

// held returns the names with a copy in a tier, in order.
func (w *sessionWorld) held(tier int) (names []events.BlockHash) {
	for name, n := range w.copies[tier] {
		if n > 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// holding is the naive answer for a session; ok is false if the session is not known.
func (w *sessionWorld) holding(session events.SessionHash) (h api.SessionHolding, ok bool) {
	end, ok := w.ends[session]
	counts := [events.NumTiers]uint32{}
	for _, name := range w.chain(end) {
		h.Blocks++
		for t := range counts {
			if w.copies[t][name] > 0 {
				counts[t]++
			}
		}
	}
	h.Device, h.Host, h.Disk, h.External = counts[0], counts[1], counts[2], counts[3]
	return h, ok
}

// found is the machine's answer.
func (w *sessionWorld) found(session events.SessionHash) (h api.SessionHolding, ok bool) {
	served := w.m.View().Models["m"][0]
	locals, _ := w.m.sessions.get(sessionOfRank{served.Ranks[0].ID, session})
	h.Blocks = uint32(len(locals))
	countHeld(&h, w.m.index, served.Space, served.Ranks[0].ID, locals)
	return h, locals != nil
}

// lost reports whether the machine marks a session as possibly forgotten.
func (w *sessionWorld) lost(session events.SessionHash) bool {
	_, lost := w.m.sessions.get(sessionOfRank{w.m.View().Models["m"][0].Ranks[0].ID, session})
	return lost
}

// snapshot writes a snapshot, and calls between during the export.
func (w *sessionWorld) snapshot(between func()) {
	w.bucket = map[string][]byte{}
	save(w.t, w.m, w.bucket, nil, between)
}

// restart replaces the machine by one with the last snapshot, and replays the later events.
func (w *sessionWorld) restart() {
	w.m = NewMachine(radix.New(w.index), 1)
	load(w.t, w.m, w.bucket)
	w.m.Apply(0, w.log[w.m.Applied(0):])
	w.m.publishView()
}

// step applies a random event.
func (w *sessionWorld) step(r *rand.Rand) {
	on := w.held(0)
	switch kind := r.IntN(20); {
	case kind < 11 || len(on) == 0:
		parent := events.BlockHash(0)
		if len(on) > 0 && r.IntN(6) > 0 {
			parent = on[r.IntN(len(on))]
		}
		locals := make([]events.LocalHash, 1+r.IntN(4))
		for i := range locals {
			locals[i] = events.LocalHash(1 + r.IntN(3))
		}
		w.store(events.SessionHash(r.IntN(5)), parent, locals)
	case kind < 17:
		tier := r.IntN(events.NumTiers)
		if held := w.held(tier); len(held) > 0 {
			name := held[r.IntN(len(held))]
			w.copies[tier][name]--
			w.apply(events.Event{Kind: events.Removed, Tier: events.Tier(tier + 1), Blocks: []events.BlockHash{name}})
		}
	case kind < 19:
		name, tier := on[r.IntN(len(on))], 1+r.IntN(events.NumTiers-1)
		w.copies[tier][name]++
		e := events.Event{Kind: events.Stored, Tier: events.Tier(tier + 1), Blocks: []events.BlockHash{name}}
		if r.IntN(2) == 0 {
			e.HasParent, e.Parent = w.parent[name] != 0, w.parent[name]
			e.Locals, e.Session = []events.LocalHash{w.local[name]}, events.SessionHash(1+r.IntN(4))
			if e.HasParent && w.copies[0][e.Parent] == 0 {
				e.HasParent, e.Parent, e.Locals, e.Session = false, 0, nil, 0
			}
		}
		w.apply(e)
	default:
		if r.IntN(3) == 0 {
			tier := r.IntN(events.NumTiers + 1)
			for i := range w.copies {
				if tier == 0 || i == tier-1 {
					clear(w.copies[i])
				}
			}
			w.apply(events.Event{Kind: events.Cleared, Tier: events.Tier(tier), Reason: events.ReasonEngine})
		}
	}
}

// The blocks of sessions and their tiers equal the naive model after any events: shared prefixes, branches, removals of
// any blocks, copies below the device with and without a session, clears, and restarts from a snapshot with later
// events, some of them from the time of the export. The index forgets the place of a removed block at once, after some
// removals, or never.
func TestSessionBlocksTwin(t *testing.T) {
	for seed := range uint64(testkit.Rounds(60)) {
		r := rand.New(rand.NewPCG(17, seed))
		w := newSessionWorld(t, radix.Config{MaxTombstones: []int{-1, 3, 0}[seed%3]})
		for step := range 150 {
			if w.seq > 0 && r.IntN(15) == 0 {
				w.snapshot(func() {
					for range r.IntN(3) {
						w.step(r)
					}
				})
			}
			if w.bucket != nil && r.IntN(15) == 0 {
				w.restart()
			}
			if w.step(r); w.seq == 0 {
				continue
			}
			for s := events.SessionHash(1); s <= 4; s++ {
				got, known := w.found(s)
				want, wantKnown := w.holding(s)
				if got != want || known != wantKnown {
					t.Fatalf("seed %d, step %d, session %d: %+v %t, want %+v %t", seed, step, s, got, known, want, wantKnown)
				}
				if w.lost(s) {
					t.Fatalf("seed %d, step %d: session %d is marked as possibly lost", seed, step, s)
				}
			}
		}
	}
}

// The chains of a shard are bounded. A forgotten session is counted and not known, until its next block. A session
// after an unknown parent is not known either.
func TestSessionBlocksAreBounded(t *testing.T) {
	w := newSessionWorld(t, radix.Config{})
	w.m.sessions = newSessionChains(400)
	prompt := []events.LocalHash{1, 2, 3, 4}
	first := w.store(1, 0, prompt)
	for s := events.SessionHash(2); s < 100; s++ {
		w.store(s, first, []events.LocalHash{events.LocalHash(100 + s)})
		of := w.m.sessions
		size := 0
		for _, c := range of.young {
			size += c.size()
		}
		if size != of.size || size > of.most {
			t.Fatalf("%d hashes in the younger generation, counted as %d, limit %d", size, of.size, of.most)
		}
	}
	known := 0
	for s := events.SessionHash(1); s < 100; s++ {
		if _, ok := w.found(s); ok {
			known++
		}
	}
	if forgotten := w.m.counts.SessionsForgotten; known == 0 || uint64(known)+forgotten != 99 {
		t.Errorf("%d sessions are known and %d forgotten, of 99", known, forgotten)
	}
	if _, ok := w.found(1); ok {
		t.Error("the session without use for the longest time is known")
	}
	w.store(1, first, []events.LocalHash{9})
	if h, ok := w.found(1); !ok || h.Blocks != 5 || h.Device != 5 {
		t.Errorf("after the next block: %+v, %t", h, ok)
	}
	w.apply(events.Event{Kind: events.Stored, Tier: events.Device, HasParent: true, Parent: 77,
		Blocks: []events.BlockHash{78}, Locals: []events.LocalHash{78}, Session: 1})
	if h, ok := w.found(1); ok {
		t.Errorf("after a block of unknown place: %+v", h)
	}
}

// A snapshot has a limited number of sessions of a rank, and of hashes of removed blocks: the last used sessions. A
// snapshot of an earlier build has none. Both mark the rank as partly known.
func TestSessionsInSnapshots(t *testing.T) {
	w := newSessionWorld(t, radix.Config{})
	const sessions = maxSavedSessions + 50
	for s := events.SessionHash(1); s <= sessions; s++ {
		w.store(s, 0, []events.LocalHash{events.LocalHash(s)})
	}
	w.store(1, w.ends[1], []events.LocalHash{7})
	if w.lost(sessions + 1) {
		t.Error("a rank is partly known without a loss")
	}
	states := w.m.capture(0).ranks
	bucket := map[string][]byte{}
	save(t, w.m, bucket, nil, func() {})
	w.m = NewMachine(radix.New(radix.Config{}), 1)
	load(t, w.m, bucket)
	w.m.publishView()
	for s := events.SessionHash(1); s <= sessions; s++ {
		h, known := w.found(s)
		want := s == 1 || s > sessions-maxSavedSessions+1
		if known != want || w.lost(s) == want || known && h.Blocks != h.Device {
			t.Errorf("session %d: %+v, known: %t, want %t; marked: %t", s, h, known, want, w.lost(s))
		}
	}
	long := newSessionWorld(t, radix.Config{MaxTombstones: -1})
	var locals []events.LocalHash
	for i := range maxSavedHashes {
		locals = append(locals, events.LocalHash(i+1))
	}
	for s, tail := range []int{1, maxSavedHashes - 1, 10} { // of sessions from 1; the last used is saved first
		session := events.SessionHash(s + 1)
		held := long.store(session, 0, []events.LocalHash{events.LocalHash(10_000 + s)})
		long.store(session, held, locals[:tail])
		for _, name := range long.chain(long.ends[session])[1:] {
			long.copies[0][name]--
			long.apply(events.Event{Kind: events.Removed, Tier: events.Device, Blocks: []events.BlockHash{name}})
		}
	}
	long.snapshot(func() {})
	long.restart()
	for s := events.SessionHash(1); s <= 3; s++ {
		got, known := long.found(s)
		want, _ := long.holding(s)
		if saved := s == 3; known != saved || long.lost(s) == saved || saved && got != want {
			t.Errorf("session %d with removed blocks: %+v %t, want %+v; marked: %t", s, got, known, want, long.lost(s))
		}
	}
	states[0].Sessions, states[0].SessionsCut = nil, false
	of, id := w.m.sessions, w.m.addRank(0, 16)
	if of.restore(w.m.index, id, &states[0]); !of.ranks[id] {
		t.Error("a snapshot without sessions leaves no mark")
	}
	if w.m.dropRank(id); len(of.ranks) != 1 {
		t.Errorf("%d ranks after the end of one", len(of.ranks))
	}
	if of.mark(id); len(of.ranks) != 1 {
		t.Error("a rank that is gone has a mark")
	}
}

// Events without a session leave the chains alone and allocate nothing for them.
func BenchmarkApplySessions(b *testing.B) {
	for _, tagged := range []bool{false, true} {
		b.Run(fmt.Sprintf("session=%t", tagged), func(b *testing.B) {
			w := newSessionWorld(b, radix.Config{})
			evs := make([]events.Event, 2)
			for i := range evs {
				for j := range 64 {
					evs[i].Blocks = append(evs[i].Blocks, events.BlockHash(1+j))
				}
			}
			evs[0].Kind, evs[0].Tier, evs[1].Kind, evs[1].Tier = events.Stored, events.Device, events.Removed, events.Device
			for j := range 64 {
				evs[0].Locals = append(evs[0].Locals, events.LocalHash(j))
			}
			if tagged {
				evs[0].Session = 5
			}
			b.ReportAllocs()
			for b.Loop() {
				w.apply(evs...)
			}
		})
	}
}
