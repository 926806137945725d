package snapshot

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// world is a bucket and a log with several writers. Every step of a writer is atomic. Between two steps, other writers
// may act and the writer may die.
type world struct {
	values   map[string][]byte
	revision int // revision of the current manifest
	first    events.StreamSeq
	last     events.StreamSeq
	epoch    time.Time
	made     int                         // number of streams so far
	truth    map[events.StreamSeq]string // the image at the sequence of each snapshot of the current epoch
}

func (w *world) log() Log {
	return Log{Namespace: "test", Stream: "KV_EVENTS_test_3", Epoch: w.epoch, First: w.first, Last: w.last}
}

func (w *world) manifests() map[string][]byte {
	found := map[string][]byte{}
	for k, v := range w.values {
		if key, ok := ParseKey(k); ok && key.Type != ChunkKey {
			found[k] = v
		}
	}
	return found
}

// imageAt returns the image of an index at a sequence. Every message changes a part.
func imageAt(seq events.StreamSeq, made int) *image {
	im := small(made)
	for i := range 3 {
		r := im.runs[0]
		r.ID = events.RunID(10 + i)
		r.Locals = []events.LocalHash{events.LocalHash(mix(uint64(made)<<32 + uint64(seq)/uint64(i+1)))}
		im.runs = append(im.runs, r)
	}
	return im
}

// writer is a process with the remaining steps of a snapshot.
type writer struct {
	name  string
	index *RunIndex
	steps []func() (done bool)

	wrote, fenced, deleted, purged int
}

// begin starts a snapshot. Other writers act between the steps.
func (p *writer) begin(t *rapid.T, w *world) {
	var b Bucket
	var plan *WritePlan
	var m *Manifest
	var index *RunIndex
	var chunks map[string][]byte
	var order []string
	seq, made, log := w.last, w.made, Log{}
	revision := 0
	im := imageAt(seq, made)
	stop := func() bool { p.steps = nil; return true }
	put := func(key string, value []byte) func() bool {
		return func() bool { w.values[key] = value; return false }
	}
	p.steps = []func() bool{
		func() bool {
			b, revision = Bucket{Partition: 3, Manifests: w.manifests()}, w.revision
			return false
		},
		func() bool {
			b.Keys = []string{}
			b.Keys = append(b.Keys, slices.Sorted(maps.Keys(w.values))...)
			return false
		},
		func() bool {
			if log = w.log(); w.made != made {
				return stop() // the index belongs to a deleted stream
			}
			var err error
			if plan, err = PlanWrite(b, log, seq); err != nil {
				if !errors.Is(err, ErrBehind) {
					t.Fatal(err)
				}
				return stop()
			}
			chunks = map[string][]byte{}
			cfg := config(im, seq)
			cfg.Epoch, cfg.Writer = log.Epoch, p.name
			wr, err := NewWriter(cfg, plan, p.index, func(key string, data []byte) error {
				chunks[key] = data
				order = append(order, key)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			im.writeTo(t, wr)
			if m, index, err = wr.Close(); err != nil {
				t.Fatal(err)
			}
			var rest []func() bool
			for _, k := range order {
				rest = append(rest, put(k, chunks[k]))
			}
			if plan.CopyKey != "" {
				rest = append(rest, put(plan.CopyKey, plan.Copy))
			}
			p.steps = append(rest, p.steps[1:]...)
			p.steps = append([]func() bool{nil}, p.steps...) // in place of the current step
			return false
		},
		func() bool {
			if w.revision != revision {
				p.fenced++
				return stop()
			}
			data, err := m.Encode()
			if err != nil {
				t.Fatal(err)
			}
			w.values[ManifestKey(3)] = data
			w.revision++
			if w.made == made {
				w.truth[seq] = im.text()
			}
			p.index = index
			p.wrote++
			clean := plan.After(m, b.Keys)
			for _, k := range clean.Delete {
				p.steps = append(p.steps, func() bool { delete(w.values, k); p.deleted++; return false })
			}
			p.steps = append(p.steps, func() bool {
				if clean.PurgeTo > w.first && w.epoch.Equal(m.Epoch) {
					w.first = clean.PurgeTo
					p.purged++
				}
				return false
			})
			return false
		},
	}
}

// check restores the bucket and compares the result with the truth.
func (w *world) check(t *rapid.T, damaged int) {
	choice := Choose(Bucket{Partition: 3, Manifests: w.manifests()}, w.log())
	for _, m := range choice.Usable {
		im := new(image)
		_, err := Read(m, func(key string) ([]byte, error) {
			if v, ok := w.values[key]; ok {
				return v, nil
			}
			return nil, ErrMissing
		}, func(ranks []RankState) (Sink, error) { im.ranks = ranks; return im, nil })
		if err != nil {
			damaged--
			if damaged < 0 {
				t.Fatalf("generation %d: %v", m.Generation, err)
			}
			continue
		}
		if want, ok := w.truth[m.Seq]; ok && im.text() != want {
			t.Fatalf("generation %d differs from the image of sequence %d", m.Generation, m.Seq)
		}
		if w.first > m.Seq+1 || m.Seq > w.last {
			t.Fatalf("generation %d at %d is usable, but the log is %d to %d", m.Generation, m.Seq, w.first, w.last)
		}
		return
	}
	// Without a generation, the log must have all messages.
	if w.first > 1 {
		t.Fatalf("no generation to restore, and the log begins at %d: %v", w.first, choice.Rejected)
	}
}

// TestModel: two or three writers die or overtake each other at any step. A generation with the log after it always
// exists.
func TestModel(t *testing.T) {
	testkit.Sequential(t)
	wrote, fenced, deleted, purged := 0, 0, 0, 0
	rapid.Check(t, func(t *rapid.T) {
		w := &world{values: map[string][]byte{}, first: 1, epoch: epoch, truth: map[events.StreamSeq]string{}}
		writers := []*writer{{name: "a"}, {name: "b"}, {name: "c"}}
		for range rapid.IntRange(20, 250).Draw(t, "steps") {
			p := writers[rapid.IntRange(0, len(writers)-1).Draw(t, "writer")]
			switch what := rapid.IntRange(0, 99).Draw(t, "what"); {
			case what < 20:
				w.last += events.StreamSeq(rapid.IntRange(1, 3).Draw(t, "messages"))
			case what < 23: // the writer dies; a new process starts without an index
				p.steps, p.index = nil, nil
			case what < 24: // the stream is recreated
				w.made++
				w.epoch = w.epoch.Add(time.Hour)
				w.first, w.last, w.truth = 1, 0, map[events.StreamSeq]string{}
				for _, p := range writers {
					p.index = nil
				}
			case len(p.steps) == 0:
				p.begin(t, w)
			default:
				for range rapid.IntRange(1, 6).Draw(t, "at once") {
					if len(p.steps) > 0 {
						if step := p.steps[0]; step() {
							p.steps = nil
						} else {
							p.steps = p.steps[1:]
						}
					}
				}
			}
			w.check(t, 0)
		}
		for _, p := range writers {
			wrote, fenced, deleted, purged = wrote+p.wrote, fenced+p.fenced, deleted+p.deleted, purged+p.purged
		}
	})
	if wrote < 100 || fenced < 10 || deleted < 100 || purged < 20 {
		t.Error("the model misses cases")
	}
	t.Logf("%d snapshots, %d fenced, %d keys deleted, %d purges", wrote, fenced, deleted, purged)
}

// TestModelDamage damages a value of the bucket at any time. The older generation is usable, and the next snapshots
// repair the bucket.
func TestModelDamage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{values: map[string][]byte{}, epoch: epoch, first: 1, truth: map[events.StreamSeq]string{}}
		p := &writer{name: "a"}
		whole := func() {
			w.last += 2
			p.begin(t, w)
			for len(p.steps) > 0 {
				step := p.steps[0]
				if step() {
					break
				}
				p.steps = p.steps[1:]
			}
		}
		for range rapid.IntRange(2, 5).Draw(t, "before") {
			whole()
		}
		before := maps.Clone(w.values)
		key := rapid.SampledFrom(slices.Sorted(maps.Keys(w.values))).Draw(t, "damaged")
		if rapid.Bool().Draw(t, "gone") {
			delete(w.values, key)
		} else {
			w.values[key] = append([]byte{^before[key][0]}, before[key][1:]...)
		}
		k, _ := ParseKey(key)
		if k.Type == ChunkKey && neededByAll(before, key, w.log()) {
			return // all generations need the chunk: only a resync helps
		}
		w.check(t, 1)
		if k.Type != ChunkKey { // the next writer replaces a damaged manifest
			for range 2 {
				whole()
				w.check(t, 1)
			}
			if c := Choose(Bucket{Partition: 3, Manifests: w.manifests()}, w.log()); len(c.Usable) != 2 {
				t.Fatalf("generations after two more snapshots: %v in %v; %s was damaged", c,
					slices.Sorted(maps.Keys(w.values)), key)
			}
		}
	})
}

// neededByAll reports whether every generation names the chunk.
func neededByAll(values map[string][]byte, key string, log Log) bool {
	w := world{values: values}
	for _, m := range Choose(Bucket{Partition: 3, Manifests: w.manifests()}, log).Usable {
		if !slices.ContainsFunc(m.Chunks, func(c ChunkRef) bool { return c.Key == key }) {
			return false
		}
	}
	return true
}
