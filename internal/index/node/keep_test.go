package node

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

func TestMain(m *testing.M) {
	flag.Set("rapid.seed", "1") // the same cases each time; `make explore` uses others
	testkit.Main(m)
}

// TestPartitionsComeAndGo changes the partitions of a machine: partitions start from a snapshot or from the log's
// beginning, and are dropped in small steps with events of other partitions in between. The kept partitions equal those
// of the twin.
func TestPartitionsComeAndGo(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const partitions = 3
		m := NewMachine(radix.New(bounds), partitions)
		var logs [partitions][]jetstream.Message
		var twins [partitions]naive // nil: not kept
		var going [partitions]bool  // forgotten, and not yet dropped
		bucket := map[string][]byte{}
		for p := range logs {
			logs[p] = logOf(t)
			for i := range logs[p] {
				logs[p][i].Key.Instance = events.WorkerID(fmt.Sprintf("p%d-%s", p, logs[p][i].Key.Instance))
			}
		}
		begin := func(p events.Partition, saved bool) {
			twins[p] = naive{}
			if saved {
				load(t, m, bucket)
			} else {
				m.Begin(p, 0, 0)
			}
			for _, msg := range logs[p][:m.Applied(p)] {
				twins[p].apply(msg)
			}
		}
		apply := func(p events.Partition, n int) {
			at := int(m.Applied(p))
			to := min(at+n, len(logs[p]))
			if !m.Apply(p, logs[p][at:to]) {
				t.Fatalf("partition %d: a hole where there is none", p)
			}
			for _, msg := range logs[p][at:to] {
				twins[p].apply(msg)
			}
		}
		for range rapid.IntRange(5, 40).Draw(t, "steps") {
			p := events.Partition(rapid.IntRange(0, partitions-1).Draw(t, "partition"))
			switch what := rapid.IntRange(0, 9).Draw(t, "what"); {
			case going[p]:
				going[p] = m.Drop(p, int64(rapid.IntRange(1, 8).Draw(t, "holdings")))
				if m.Empty(p) == going[p] {
					t.Fatalf("partition %d is empty: %v, and more is to be dropped: %v", p, m.Empty(p), going[p])
				}
			case twins[p] == nil:
				_, saved := bucket[snapshot.ManifestKey(0)]
				begin(p, p == 0 && saved && what < 5)
			case what < 6:
				apply(p, rapid.IntRange(1, 20).Draw(t, "messages"))
			case what < 7 && p == 0:
				save(t, m, bucket, nil, func() {
					if twins[1] != nil {
						apply(1, 1)
					}
				})
			case what < 9:
				m.Forget(p)
				twins[p], going[p] = nil, m.Drop(p, 1)
				if m.parts[p].grown != (growth{}) { // otherwise a snapshot without changes would be due
					t.Fatalf("partition %d is forgotten, and has grown by %+v", p, m.parts[p].grown)
				}
			}
			all := naive{}
			for _, n := range twins {
				for key, r := range n {
					all[key] = r
				}
			}
			if m.index.Stats().Ranks == 0 && len(all) > 0 {
				t.Fatal("nothing is in the index")
			}
			for q := range events.Partition(partitions) {
				if twins[q] == nil && m.Applied(q) != 0 {
					t.Fatalf("partition %d is not kept, and %d is applied", q, m.Applied(q))
				}
			}
			agree(t, m, all, "after a step")
		}
	})
}

// TestLag advances the clock beside a growing log.
func TestLag(t *testing.T) {
	var l lag
	start := time.Unix(1000, 0)
	for i, step := range []struct {
		at            int // seconds
		applied, last events.StreamSeq
		unreadable    bool
		want          int // seconds
	}{
		{0, 10, 10, false, 0},
		{1, 10, 20, false, 0},
		{3, 15, 30, false, 2},
		{4, 19, 40, false, 3},
		{5, 20, 50, false, 4}, // the first target is reached after 4 s
		{6, 30, 60, false, 4},
		{10, 49, 70, false, 5},
		{11, 50, 70, false, 6},
		{12, 69, 70, false, 6}, // a part remains
		{13, 70, 70, false, 0},
		{14, 70, 70, true, 0}, // unreadable: the end is unknown
		{24, 70, 70, true, 10},
		{25, 70, 75, false, 11}, // readable again
		{26, 75, 75, false, 0},
		{3626, 75, 75, false, 0},
		{3627, 75, 76, false, 0},
		{7227, 75, 76, false, 3600}, // as after SIGSTOP
	} {
		if got := l.measure(start.Add(time.Duration(step.at)*time.Second), step.applied, step.last,
			step.unreadable); got != time.Duration(step.want)*time.Second {
			t.Errorf("step %d: behind for %v, want %d s", i, got, step.want)
		}
	}
}

// BenchmarkForget forgets a partition of 64 ranks with 20,000 blocks each, half of them shared, beside an equal
// partition. worst-us is the longest single step of the writer, which delays events.
func BenchmarkForget(b *testing.B) {
	const ranks, blocks, chain = 64, 20_000, 200
	var worst time.Duration
	for b.Loop() {
		b.StopTimer()
		m := NewMachine(radix.New(radix.Config{}), 2)
		for p := range events.Partition(2) {
			m.Begin(p, 0, 0)
			seq := events.StreamSeq(0)
			for r := range ranks {
				batch := events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: 16}
				for from := 0; from < blocks; from += chain {
					e := events.Event{Kind: events.Stored, Tier: events.Device}
					own := 0
					if from >= blocks/2 {
						own = (1 + r + int(p)*ranks) << 32
					}
					for i := range chain {
						e.Blocks = append(e.Blocks, events.BlockHash(from+i+1))
						e.Locals = append(e.Locals, events.LocalHash(own+from+i+1))
					}
					batch.Events = append(batch.Events, e)
				}
				data, err := events.AppendBatch(nil, &batch)
				if err != nil {
					b.Fatal(err)
				}
				seq++
				key := events.RankKey{Instance: events.WorkerID(fmt.Sprint("p", p)), Rank: events.Rank(r)}
				m.Apply(p, []jetstream.Message{{Seq: seq, Time: 1, Key: key, Data: data}})
			}
		}
		b.StartTimer()
		m.Forget(0)
		for more := true; more; {
			begun := time.Now()
			more = m.Drop(0, emptyBudget)
			worst = max(worst, time.Since(begun))
		}
		if got := m.index.Stats().Holdings[0]; got != ranks*blocks {
			b.Fatalf("%d holdings are left, not %d", got, ranks*blocks)
		}
	}
	b.ReportMetric(float64(worst.Microseconds()), "worst-us")
}
