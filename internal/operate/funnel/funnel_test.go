package funnel

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/corpus"
)

// naive stores every prompt, by its local hashes as text, without a bound.
type naive struct {
	asked, stored, last, lost map[string]int64
	by                        map[string]events.WorkerID
}

func text(locals []events.LocalHash) string { return fmt.Sprint(locals) }

// TestHistoryAgainstNaive: workers store and remove blocks of prompts with shared prefixes, and requests arrive.
func TestHistoryAgainstNaive(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		h := NewHistory(1<<16, 0)
		twin := naive{map[string]int64{}, map[string]int64{}, map[string]int64{}, map[string]int64{},
			map[string]events.WorkerID{}}
		ids := map[int]events.EventID{}
		prompts := map[string][]events.LocalHash{}
		now := int64(1)
		for range 400 {
			now += 1 + rng.Int64N(100)
			var locals []events.LocalHash
			for range 1 + rng.IntN(6) {
				locals = append(locals, events.LocalHash(rng.IntN(3)+10))
			}
			seq := events.SeqHashes(nil, locals)
			names := (&prompt{locals: locals}).appendNames(nil, "m", 16)
			for i := range locals {
				prompts[text(locals[:i+1])] = locals[:i+1]
			}
			w := rng.IntN(3)
			worker := events.WorkerID(fmt.Sprint("w", w))
			key := events.RankKey{Instance: worker}
			e := events.Event{Tier: events.Device}
			for _, s := range seq {
				e.Blocks = append(e.Blocks, events.BlockHash(s)+7) // the engine's hash
			}
			switch rng.IntN(3) {
			case 0:
				h.Asked(names, 0, "", now)
				for i := range locals {
					if s := text(locals[:i+1]); twin.asked[s] == 0 {
						twin.asked[s] = now
					}
				}
				continue
			case 1:
				e.Kind, e.Locals = events.Stored, locals
				for i := range locals {
					s := text(locals[:i+1])
					if twin.stored[s] == 0 {
						twin.stored[s] = now
					}
					twin.last[s] = now
				}
			default:
				e.Kind = events.Removed
				e.Blocks = e.Blocks[len(e.Blocks)-1:]
				if s := text(locals); twin.stored[s] != 0 {
					twin.lost[s], twin.by[s] = now, worker
				}
			}
			ids[w]++
			b := &events.Batch{Incarnation: 1, FirstID: ids[w], Model: "m", BlockSize: 16, Events: []events.Event{e}}
			h.Apply(key, b, now)
			h.Apply(key, b, now) // again, as for a log that is read twice
		}
		for s, locals := range prompts {
			seq := events.SeqHashes(nil, locals)
			got, _ := h.Block(Name(uint64(seq[len(seq)-1]) ^ space("m", 16)))
			want := peerapi.BlockPast{Asked: twin.asked[s], Stored: twin.stored[s], Last: twin.last[s], Lost: twin.lost[s]}
			if want.Lost != 0 {
				want.Why, want.Worker, want.Tier = api.CauseEvicted, twin.by[s], events.Device
			}
			if got != want {
				t.Fatalf("seed %d: %s is %+v, want %+v", seed, s, got, want)
			}
		}
	}
}

// TestHistoryIsBounded: deleted blocks are counted, and the history's start moves.
func TestHistoryIsBounded(t *testing.T) {
	h := NewHistory(64, 5)
	for i := range 1000 {
		h.Asked([]Name{Name(i + 1)}, 0, "", int64(i+10))
	}
	if n := h.blocks.young.n + h.blocks.old.n; n > 64 {
		t.Errorf("the history has %d blocks", n)
	}
	if h.blocks.lost < 1000-64 || h.from <= 5 {
		t.Errorf("%d blocks were deleted; the history is complete since %d", h.blocks.lost, h.from)
	}
	if p, ok := h.Block(1000); !ok || p.Asked != 1009 {
		t.Errorf("the last one is %+v", p)
	}
	if _, ok := h.Block(1); ok {
		t.Error("the first block is still in the history")
	}
}

// TestRanksAreBounded: the history keeps the newest of many ranks. A deleted rank is added again by a new event.
func TestRanksAreBounded(t *testing.T) {
	h := NewHistory(64, 0)
	name := func(i int) events.RankKey { return events.RankKey{Instance: events.WorkerID(fmt.Sprint(i))} }
	message := func(block uint64) *events.Batch {
		e := events.Event{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{events.BlockHash(block)},
			Locals: []events.LocalHash{events.LocalHash(block)}}
		return &events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: 16, Events: []events.Event{e}}
	}
	h.Apply(name(0), message(7), 1)
	for i := range maxRanks + 10 {
		h.Apply(name(i+1), message(9), int64(i+2))
	}
	if len(h.ranks) > maxRanks || len(h.of) > maxRanks || h.rankOf(h.of[name(0)]) != nil {
		t.Errorf("the history has %d and %d ranks", len(h.ranks), len(h.of))
	}
	h.Apply(name(0), message(9), maxRanks+20)
	p, _ := h.Block(Name(uint64(events.SeqHashes(nil, []events.LocalHash{9})[0]) ^ space("m", 16)))
	if r := h.rankOf(h.of[name(0)]); r == nil || len(r.roots) != 1 || p.Last != maxRanks+20 {
		t.Errorf("%+v, %+v", r, p)
	}
}

// TestDivide covers each step and cause for combinations of answers and histories.
func TestDivide(t *testing.T) {
	at := time.UnixMicro(1_000_000)
	tokens := make([]uint32, 4*10+3)
	request := func(change func(*Request)) *Request {
		r := &Request{At: at, Model: "m", BlockSize: 4, Tokens: tokens}
		change(r)
		return r
	}
	names := request(func(*Request) {}).names()
	everything := func(p peerapi.BlockPast) map[Name]peerapi.BlockPast {
		known := map[Name]peerapi.BlockPast{}
		for _, n := range names {
			known[n] = p
		}
		return known
	}
	gone := peerapi.BlockPast{Asked: 1, Stored: 2, Last: 2, Lost: 400_000, Why: api.CauseEvicted, Worker: "w",
		Tier: events.Host}
	mixed := everything(gone) // the last three were never stored; the second is held, the first is not
	for _, n := range names[7:] {
		mixed[n] = peerapi.BlockPast{Asked: 1}
	}
	mixed[names[1]] = peerapi.BlockPast{Asked: 1, Stored: 2, Last: 2}
	for _, c := range []struct {
		name  string
		r     *Request
		known map[Name]peerapi.BlockPast
		from  int64
		want  share
	}{
		{"new", request(func(*Request) {}), nil, 0, share{asked: 43, lost: []loss{
			{step: api.StepSeen, cause: api.CauseNew, tokens: 40},
			{step: api.StepSeen, cause: api.CausePartialBlock, tokens: 3}}}},
		{"evicted", request(func(r *Request) { r.Held = 2 }), everything(gone), 0, share{
			asked: 43, seen: 40, held: 8, heldIn: Tiers{8},
			lost: []loss{{step: api.StepSeen, cause: api.CausePartialBlock, tokens: 3},
				{api.StepHeld, api.CauseEvicted, 32, "w", events.Host, 600_000},
				{step: api.StepSelected, cause: api.CauseNotRouted, tokens: 8}}}},
		{"mixed", request(func(*Request) {}), mixed, 0, share{asked: 43, seen: 40, lost: []loss{
			{step: api.StepSeen, cause: api.CausePartialBlock, tokens: 3},
			{api.StepHeld, api.CauseEvicted, 28, "w", events.Host, 600_000},
			{step: api.StepHeld, cause: api.CauseNeverStored, tokens: 12}}}},
		{"forgotten", request(func(*Request) {}), everything(peerapi.BlockPast{Asked: 1}), 2, share{asked: 43, seen: 40,
			lost: []loss{{step: api.StepSeen, cause: api.CausePartialBlock, tokens: 3},
				{step: api.StepHeld, cause: api.CauseUnexplained, tokens: 40}}}},
		{"incomplete", request(func(r *Request) { r.Incomplete = true }), everything(gone), 0, share{asked: 43, seen: 40,
			lost: []loss{{step: api.StepSeen, cause: api.CausePartialBlock, tokens: 3},
				{step: api.StepHeld, cause: api.CauseIndexIncomplete, tokens: 40}}}},
		{"shared store", request(func(r *Request) { r.Shared = 5 }), everything(gone), 0, share{asked: 43, seen: 40,
			lost: []loss{{step: api.StepSeen, cause: api.CausePartialBlock, tokens: 3},
				{step: api.StepHeld, cause: api.CauseUncountedTier, tokens: 20},
				{api.StepHeld, api.CauseEvicted, 20, "w", events.Host, 600_000}}}},
		{"chosen", request(func(r *Request) {
			r.Routed, r.Worker, r.Held, r.Registered, r.Eligible, r.Selected = true, "w", 10, 8, 7, 3
			r.Known, r.HeldIn, r.SelectedIn = 9, NewTiers(5, 9, 0, 0), NewTiers(1, 0, 1, 2)
		}), nil, 0, share{asked: 43, seen: 40, held: 40, selected: 12, heldIn: Tiers{20, 20}, selectedIn: Tiers{4, 0, 4, 4},
			lost: []loss{
				{step: api.StepSeen, cause: api.CausePartialBlock, tokens: 3},
				{step: api.StepSelected, cause: api.CauseWorkerUnknown, tokens: 4},
				{step: api.StepSelected, cause: api.CauseWorkerGone, tokens: 4},
				{step: api.StepSelected, cause: api.CauseNotEligible, tokens: 4},
				{step: api.StepSelected, cause: api.CauseLoad, tokens: 16}}}},
		{"a bypass", request(func(r *Request) {
			r.Routed, r.Worker, r.Held, r.Registered, r.Eligible, r.Selected = true, "w", 10, 10, 10, 3
			r.Known, r.HeldIn, r.SelectedIn, r.Bypass = 10, NewTiers(10, 0, 0, 0), NewTiers(3, 0, 0, 0), true
		}), nil, 0, share{asked: 43, seen: 40, held: 40, selected: 12, heldIn: Tiers{40}, selectedIn: Tiers{12},
			lost: []loss{
				{step: api.StepSeen, cause: api.CausePartialBlock, tokens: 3},
				{step: api.StepSelected, cause: api.CauseBypass, tokens: 28}}}},
		{"no tokens", &Request{At: at, Model: "m", BlockSize: 4, ISL: 50}, nil, 0, share{asked: 50, lost: []loss{
			{step: api.StepSeen, cause: api.CauseNotTokenized, tokens: 50}}}},
		{"an unsupported field", &Request{At: at, Model: "m", BlockSize: 4, ISL: 50, Unsupported: true}, nil, 0,
			share{asked: 50, lost: []loss{{step: api.StepSeen, cause: api.CauseUnsupported, tokens: 50}}}},
	} {
		p := c.r.prompt(false)
		got := divide(c.r, p, known{NewHistory(1, c.from), c.known},
			func(events.WorkerID, int64) bool { return false })
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s:\n%+v\nwant\n%+v", c.name, got, c.want)
		}
	}
}

// TestImagesDistinguishPrompts: prompts with equal tokens and different images differ from the first image on.
func TestImagesDistinguishPrompts(t *testing.T) {
	names := func(image uint64) []Name {
		r := &Request{Model: "m", BlockSize: 4, Tokens: make([]uint32, 12),
			Media: []events.MediaItem{{Hash: image, Offset: 5, Length: 2}}}
		return r.names()
	}
	a, b := names(1), names(2)
	if a[0] != b[0] || a[1] == b[1] || a[2] == b[2] {
		t.Errorf("%x and %x", a, b)
	}
}

// prompt returns a new prompt of the request.
func (r *Request) prompt(adapted bool) *prompt {
	p := new(prompt)
	p.read(r, adapted)
	return p
}

func (r *Request) names() []Name { p := r.prompt(false); return p.names }

// TestStepsAndLossesAddUp: for every request and history, a step and its losses add up to the step before.
func TestStepsAndLossesAddUp(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	for range 5000 {
		some := func() uint32 { return uint32(rng.IntN(14)) }
		r := &Request{At: time.UnixMicro(1000), Model: "m", BlockSize: 4, Tokens: make([]uint32, rng.IntN(60)),
			BlockSizes: []uint32{4, 8}, ISL: uint64(rng.IntN(2) * 80), Held: some(), Shared: some() / 4,
			Incomplete: rng.IntN(8) == 0, Restricted: rng.IntN(3) == 0, Routed: rng.IntN(2) == 0, Registered: some(),
			Known: some(), HeldIn: NewTiers(some(), some(), 0, some()),
			SelectedIn: NewTiers(some(), some(), some(), 0),
			Eligible:   some(), Selected: some(), Pinned: rng.IntN(4) == 0}
		if rng.IntN(2) == 0 {
			r.Space.Salt = "s"
		}
		if rng.IntN(4) > 0 {
			r.Worker = "w"
		}
		others := map[Name]peerapi.BlockPast{}
		p := r.prompt(true)
		for _, list := range append([][]Name{p.names, p.plain, p.bare}, p.other...) {
			for _, n := range list {
				if rng.IntN(3) > 0 {
					at := func() int64 { return max(0, rng.Int64N(1500)-300) }
					others[n] = peerapi.BlockPast{Asked: at(), Stored: at(), Last: at(), Lost: at(), Why: api.CauseCleared,
						Worker: "v"}
				}
			}
		}
		s := divide(r, p, known{NewHistory(1, 0), others},
			func(events.WorkerID, int64) bool { return rng.IntN(2) == 0 })
		for _, of := range []struct {
			sum uint64
			in  Tiers
		}{{s.held, s.heldIn}, {s.selected, s.selectedIn}} {
			if of.in[0]+of.in[1]+of.in[2]+of.in[3] != of.sum {
				t.Fatalf("%+v\n%+v: %d tokens are not the tiers' %d", r, s, of.sum, of.in)
			}
		}
		left := map[api.FunnelStep]uint64{api.StepSeen: s.asked - s.seen, api.StepHeld: s.seen - s.held,
			api.StepSelected: s.held - s.selected}
		for _, l := range s.lost {
			left[l.step] -= l.tokens
		}
		for step, n := range left {
			if n != 0 {
				t.Fatalf("%+v\n%+v: %d tokens before %s have no cause", r, s, int64(n), step)
			}
		}
	}
}

// TestTracker covers recording, reports and merging.
func TestTracker(t *testing.T) {
	tracker := New(Config{Node: "a"})
	go tracker.Run(t.Context())
	tokens := make([]uint32, 160)
	request := &Request{At: time.Now(), Model: "m", BlockSize: 16, Tokens: tokens, Routed: true, ID: "r", Worker: "w",
		Held: 10, Registered: 10, Eligible: 10, Selected: 10, SelectedIn: NewTiers(10, 0, 0, 0)}
	tracker.Record(request)
	for _, want := range []bool{true, false} {
		if known, err := tracker.Report(t.Context(), &api.Report{RequestID: "r", CachedTokens: 144}); known != want ||
			err != nil {
			t.Fatalf("reported: %v, %v", known, err)
		}
	}
	part := func() *api.Funnel {
		f, err := tracker.Funnel(t.Context(), "m", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	f := part()
	if f.Reported != 1 || f.Steps[4].Tokens != 144 || f.Steps[4].Lost[0].Cause != api.CauseLastBlock ||
		f.Decisions["best"] != 1 || len(f.Buckets) != 1 {
		t.Errorf("%+v", f)
	}
	Merge(f, part())
	if f.Steps[0].Tokens != 320 || f.Steps[4].Lost[0].Tokens != 32 || f.Steps[4].Lost[0].Share != 0.1 ||
		f.Buckets[0].Asked != 320 || len(f.Nodes) != 2 {
		t.Errorf("%+v", f)
	}
}

// TestFailedPrefill: the tokens that a failed prefill worker held are lost to the failure, except the tokens that the
// decode worker reused.
func TestFailedPrefill(t *testing.T) {
	tracker := New(Config{Node: "a"})
	go tracker.Run(t.Context())
	tracker.Record(&Request{At: time.Now(), Model: "m", BlockSize: 16, Tokens: make([]uint32, 160), Routed: true, ID: "r",
		Worker: "w", Held: 10, Registered: 10, Eligible: 10, Selected: 10, SelectedIn: NewTiers(4, 6, 0, 0)})
	tracker.ReportLater(api.Report{RequestID: "r", CachedTokens: 32}, true)
	f, err := tracker.Funnel(t.Context(), "m", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if last := f.Steps[4]; last.Tokens != 32 || len(last.Lost) != 1 || last.Lost[0].Cause != api.CausePrefillFailed ||
		last.Lost[0].Tokens != 128 {
		t.Errorf("%+v", last)
	}
}

// TestTrackerIsBounded: entries above the bounds are counted, and no caller blocks.
func TestTrackerIsBounded(t *testing.T) {
	tracker := New(Config{MaxRate: 10})
	at := time.Unix(1000, 0)
	for range 15 {
		if tracker.Admit(0, at) {
			tracker.Record(&Request{At: at, Model: "m", BlockSize: 16})
		}
	}
	for range 2 * maxQueue {
		tracker.Applying(&jetstream.Message{Data: make([]byte, 100)}, &events.Batch{})
	}
	if n := tracker.dropped.Load(); n != 4 { // the request that uses the rest of a second is admitted
		t.Errorf("%d requests were dropped", n)
	}
	if !tracker.Admit(1000, at.Add(time.Second)) || tracker.Admit(0, at.Add(time.Minute)) {
		t.Error("a long prompt is recorded while the second has room, and uses the room of later prompts")
	}
	if n := tracker.eventsLost.Load(); n != maxQueue+11 {
		t.Errorf("%d messages were not read", n)
	}
}

// TestReadingIsBounded: a burst is read. A permanently higher rate is only counted.
func TestReadingIsBounded(t *testing.T) {
	b := budget{left: maxBurst}
	now := b.at
	const megabyte = 1 << 20
	read := 0
	for range 100 {
		now = now.Add(10 * time.Millisecond) // 100 MiB per second
		if b.spend(megabyte, 4*megabyte, now) {
			read++
		}
	}
	if read != maxBurst/megabyte+4 {
		t.Errorf("%d MiB were read, with a burst of %d and 4 per second", read, maxBurst/megabyte)
	}
	if now = now.Add(time.Hour); !b.spend(2*maxBurst, 4*megabyte, now) || b.spend(1, 4*megabyte, now) {
		t.Error("an hour without messages adds more or less than one burst")
	}
}

func BenchmarkRecord(b *testing.B) {
	tracker := New(Config{MaxRate: 1 << 30})
	go tracker.Run(b.Context())
	tokens := make([]uint32, 512*16)
	b.ReportAllocs()
	for i := range b.N {
		tokens[i%len(tokens)]++ // on average, half of the blocks are new
		tracker.divide(b.Context(), []*Request{{At: time.Now(), Model: "m", BlockSize: 16, Tokens: tokens, Held: 256}})
	}
}

// BenchmarkQueue measures the cost for a request: enqueue, or count a drop.
func BenchmarkQueue(b *testing.B) {
	tracker := New(Config{MaxRate: 1 << 40})
	go tracker.Run(b.Context())
	tokens := make([]uint32, 512*16)
	b.ReportAllocs()
	for range b.N {
		tracker.Admit(512, time.Now())
		tracker.Record(&Request{At: time.Now(), Model: "m", BlockSize: 16, Tokens: tokens, Held: 512})
	}
}

// BenchmarkApply measures a message of the log with 64 stored and 64 removed blocks.
func BenchmarkApply(b *testing.B) {
	h := NewHistory(1<<19, 0)
	key := events.RankKey{Instance: "w"}
	const blocks = 64
	var batch events.Batch
	b.ReportAllocs()
	b.SetBytes(2 * blocks)
	for i := range b.N {
		b.StopTimer()
		stored := events.Event{Kind: events.Stored, Tier: events.Device}
		for n := range blocks {
			stored.Blocks = append(stored.Blocks, events.BlockHash(corpus.Mix(uint64(i*blocks+n+1))))
			stored.Locals = append(stored.Locals, events.LocalHash(corpus.Mix(uint64(i*blocks+n)+1<<40)))
		}
		batch = events.Batch{Incarnation: 1, FirstID: events.EventID(2*i + 1), Model: "m", BlockSize: 16,
			Events: []events.Event{stored, {Kind: events.Removed, Tier: events.Device, Blocks: stored.Blocks}}}
		b.StartTimer()
		h.Apply(key, &batch, int64(i+1))
	}
}
