package node

import (
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// figures are what a shard's writer has counted, or the sum of these. They do not change once they are published.
type figures struct {
	index    api.IndexStatus
	events   map[string]uint64
	ranks    []int // by partition
	problems []string
	applied  Applied
}

// Applied says what was applied to the index since the node started.
type Applied struct {
	Events map[EventClass]uint64
	Ages   Ages // of messages of partitions that served; see [Ages]
}

// EventClass is what tells events apart in Applied. Tier is AllTiers for an event that clears all of them.
type EventClass struct {
	Source string // how the engine speaks, as its shim registered it; UnknownSource before it has
	Kind   events.Kind
	Tier   events.Tier
}

// UnknownSource is the source of events whose shim is not registered, or not yet.
const UnknownSource = "unknown"

// maxSources bounds the sources that are told apart; the events of others count as UnknownSource's.
const maxSources = 16

// tally counts a source's events by kind and tier.
type tally [events.Cleared + 1][events.NumTiers + 1]uint64

// tallyOf returns where events of a rank are counted.
func (m *Machine) tallyOf(key events.RankKey) *tally {
	source := m.source(key)
	if m.tallies[source] == nil && (source == "" || len(m.tallies) >= maxSources) {
		source = UnknownSource
	}
	t := m.tallies[source]
	if t == nil {
		t = new(tally)
		m.tallies[source] = t
	}
	return t
}

// figures sums up what there is, of which stats is a count. Ranks whose shims have registered since are counted under
// their sources from now on.
func (m *Machine) figures(stats radix.Stats) *figures {
	f := &figures{
		index: api.IndexStatus{
			Blocks: tiers(stats.Holdings), Distinct: uint64(stats.Blocks - stats.Dead), Bytes: uint64(stats.Bytes.Total),
			BlocksApplied: m.counts.BlocksStored, DecoderBytes: uint64(m.batch.MemoryBytes()),
		},
		events: m.counts.byName(), applied: Applied{Events: map[EventClass]uint64{}, Ages: m.ages},
	}
	for _, part := range m.parts {
		f.ranks = append(f.ranks, len(part.ranks))
		for key, r := range part.ranks {
			r.tally = m.tallyOf(key)
			f.problems = append(f.problems, m.rankProblems(r)...)
		}
	}
	slices.Sort(f.problems)
	for source, t := range m.tallies {
		for kind := range t {
			for tier, n := range t[kind] {
				if n > 0 {
					f.applied.Events[EventClass{source, events.Kind(kind), events.Tier(tier)}] = n
				}
			}
		}
	}
	return f
}

// add adds what another shard has counted, whose partitions these are.
func (f *figures) add(of *figures, partitions []events.Partition) {
	if f.events == nil {
		*f = figures{events: map[string]uint64{}, ranks: make([]int, len(of.ranks)),
			applied: Applied{Events: map[EventClass]uint64{}}}
	}
	x, y := &f.index, &of.index
	x.Blocks.Device += y.Blocks.Device
	x.Blocks.Host += y.Blocks.Host
	x.Blocks.Disk += y.Blocks.Disk
	x.Blocks.External += y.Blocks.External
	x.Distinct += y.Distinct
	x.Bytes += y.Bytes
	x.BlocksApplied += y.BlocksApplied
	x.DecoderBytes += y.DecoderBytes
	for name, n := range of.events {
		f.events[name] += n
	}
	for _, p := range partitions {
		f.ranks[p] = of.ranks[p]
	}
	f.problems = append(f.problems, of.problems...)
	slices.Sort(f.problems)
	for class, n := range of.applied.Events {
		f.applied.Events[class] += n
	}
	f.applied.Ages.join(&of.applied.Ages)
}

// AgeBounds are the upper bounds of the classes of Ages.
var AgeBounds = [...]time.Duration{
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond,
	50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second,
	2500 * time.Millisecond, 5 * time.Second, 10 * time.Second, 30 * time.Second, time.Minute,
}

// Ages says how long messages were under way from the log, by the clock of its server, to the index, by this host's.
type Ages struct {
	Counts [len(AgeBounds) + 1]uint64 // by AgeBounds, each bound included; the last has no bound
	Sum    time.Duration
}

func (a *Ages) add(age time.Duration) {
	age = max(age, 0) // clocks differ
	i, _ := slices.BinarySearch(AgeBounds[:], age)
	a.Counts[i]++
	a.Sum += age
}

func (a *Ages) join(b *Ages) {
	for i, n := range b.Counts {
		a.Counts[i] += n
	}
	a.Sum += b.Sum
}

// applied notes that messages of a partition that serves are applied.
func (m *Machine) applied(msgs []jetstream.Message, now time.Time) {
	at := now.UnixMilli()
	for i := range msgs {
		if t := msgs[i].Time; t != 0 {
			m.ages.add(time.Duration(at-int64(t)) * time.Millisecond)
		}
	}
}

// How the writer counts by itself: so many nodes of the index at a time, each time at most 1 % of its own time, and
// all of them once a second at most.
const (
	censusPart  = 1 << 14
	censusShare = 100
	censusPause = time.Second
)
