package node

import (
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// figures are the counts of one shard's writer, or the sum over shards. Published figures do not change.
type figures struct {
	index    api.IndexStatus
	events   map[string]uint64
	ranks    []int // by partition
	problems []string
	applied  Applied
}

// Applied counts the events applied to the index since the node started.
type Applied struct {
	Events map[EventClass]uint64
	Ages   Ages // of messages of partitions that served; see [Ages]
}

// EventClass is the key of the counts in Applied. Tier is AllTiers for an event that clears all tiers.
type EventClass struct {
	Source string // the engine's protocol, as registered by the shim; UnknownSource before the registration
	Kind   events.Kind
	Tier   events.Tier
}

// UnknownSource is the source of events from a shim that has not registered.
const UnknownSource = "unknown"

// maxSources limits the number of separate sources. Events of further sources count under UnknownSource.
const maxSources = 16

// tally counts the events of a source by kind and tier.
type tally [events.Cleared + 1][events.NumTiers + 1]uint64

// tallyOf returns the tally for the events of a rank.
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

// figures returns the machine's counts together with stats, a count of the index. Ranks of shims that have registered
// since the last call count under the registered source from then on.
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

// add adds the figures of a further shard, with the partitions of the shard.
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

// AgeBounds are the upper bounds of the buckets of Ages.
var AgeBounds = [...]time.Duration{
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond,
	50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second,
	2500 * time.Millisecond, 5 * time.Second, 10 * time.Second, 30 * time.Second, time.Minute,
}

// Ages is a histogram of the time between the log and the index per message: from the clock of the log's server to the
// clock of this host.
type Ages struct {
	Counts [len(AgeBounds) + 1]uint64 // by AgeBounds, bounds included; the last bucket has no bound
	Sum    time.Duration
}

func (a *Ages) add(age time.Duration) {
	age = max(age, 0) // the clocks may differ
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

// applied records the ages of messages of a serving partition, after the application.
func (m *Machine) applied(msgs []jetstream.Message, now time.Time) {
	at := now.UnixMilli()
	for i := range msgs {
		if t := msgs[i].Time; t != 0 {
			m.ages.add(time.Duration(at-int64(t)) * time.Millisecond)
		}
	}
}

// Limits of the writer's periodic census: the number of index nodes in one step, the inverse of the writer's share of
// time for the census (1 %), and the minimum pause between complete counts.
const (
	censusPart  = 1 << 14
	censusShare = 100
	censusPause = time.Second
)
