package snapshot

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// small returns an image of a run, different for each seed.
func small(seed int) *image {
	r := events.Run{ID: 1, Parent: events.NoRun, Locals: []events.LocalHash{events.LocalHash(mix(uint64(seed)))},
		Names: []events.BlockHash{1}}
	r.Holdings = []events.Holding{{Tier: events.Device, Lead: 1}}
	return &image{ranks: []RankState{{Instance: "a"}}, runs: []events.Run{r},
		states: []events.RankImage{{Clock: events.Millis(seed)}}}
}

// two returns a bucket with generations 1 (sequence 10) and 2 (sequence 20).
func two(t *testing.T) *store {
	s := newStore()
	s.write(t, small(1), 10)
	s.index = nil
	s.write(t, small(2), 20)
	s.index = nil
	return s
}

func generations(c Choice) (usable []Generation, rejected []string) {
	for _, m := range c.Usable {
		usable = append(usable, m.Generation)
	}
	for _, r := range c.Rejected {
		rejected = append(rejected, fmt.Sprintf("%d:%s", r.Generation, r.Reason))
	}
	return usable, rejected
}

func TestChoose(t *testing.T) {
	chunkOf := func(s *store, g Generation) string {
		for _, ref := range s.manifest(t, g).Chunks {
			if !slices.Contains(s.manifest(t, 3-g).Chunks, ref) {
				return ref.Key
			}
		}
		t.Fatal("generation 2 has no chunk of its own")
		return ""
	}
	for _, c := range []struct {
		name     string
		change   func(s *store, b *Bucket, log *Log)
		usable   string
		rejected string
	}{
		{"all is well", func(*store, *Bucket, *Log) {}, "[2 1]", "[]"},
		{"the log was purged as far as may be", func(_ *store, _ *Bucket, l *Log) { l.First = 11 }, "[2 1]", "[]"},
		{"the log was purged further", func(_ *store, _ *Bucket, l *Log) { l.First = 12 }, "[2]", "[1:log_truncated]"},
		{"the log was purged beyond both", func(_ *store, _ *Bucket, l *Log) { l.First = 22 }, "[]",
			"[2:log_truncated 1:log_truncated]"},
		{"the log ends early", func(_ *store, _ *Bucket, l *Log) { l.Last = 19 }, "[1]", "[2:ahead_of_log]"},
		{"the stream was made again", func(_ *store, _ *Bucket, l *Log) { l.Epoch = l.Epoch.Add(1) }, "[]",
			"[2:other_epoch 1:other_epoch]"},
		{"another time zone", func(_ *store, _ *Bucket, l *Log) { l.Epoch = l.Epoch.In(time.FixedZone("x", 3600)) },
			"[2 1]", "[]"},
		{"another namespace", func(_ *store, _ *Bucket, l *Log) { l.Namespace = "x" }, "[]", "[2:foreign 1:foreign]"},
		{"another stream", func(_ *store, _ *Bucket, l *Log) { l.Stream = "x" }, "[]", "[2:foreign 1:foreign]"},
		{"current manifest damaged", func(_ *store, b *Bucket, _ *Log) { b.Manifests["p3.manifest"] = []byte("{") },
			"[1]", "[0:unreadable]"},
		{"earlier manifest damaged", func(_ *store, b *Bucket, _ *Log) { b.Manifests["p3.g1"] = nil }, "[2]",
			"[1:unreadable]"},
		{"current manifest gone", func(_ *store, b *Bucket, _ *Log) { delete(b.Manifests, "p3.manifest") }, "[1]",
			"[]"},
		{"current manifest of the future",
			func(_ *store, b *Bucket, _ *Log) { b.Manifests["p3.manifest"] = sealed(`{"format": 7,`) }, "[1]",
			"[0:future_version]"},
		{"a manifest under another's key",
			func(_ *store, b *Bucket, _ *Log) { b.Manifests["p3.g1"] = b.Manifests["p3.manifest"] }, "[2]",
			"[1:foreign]"},
		{"the current one also under its own key",
			func(_ *store, b *Bucket, _ *Log) { b.Manifests["p3.g2"] = b.Manifests["p3.manifest"] }, "[2 1]", "[]"},
		{"another partition's", func(_ *store, b *Bucket,
			_ *Log) {
			b.Manifests["p4.manifest"] = b.Manifests["p3.manifest"]
		}, "[2 1]", "[]"},
		{"a chunk is missing", func(s *store, b *Bucket, _ *Log) {
			gone := chunkOf(s, 2)
			b.Keys = slices.DeleteFunc(b.Keys, func(k string) bool { return k == gone })
		}, "[1]", "[2:missing_chunk]"},
		{"a chunk is missing, without a listing of keys", func(s *store, b *Bucket, _ *Log) { b.Keys = nil }, "[2 1]", "[]"},
		{"a chunk is known to be bad", func(s *store, b *Bucket,
			_ *Log) {
			b.Corrupt = map[string]bool{chunkOf(s, 1): true}
		}, "[2]", "[1:corrupt_chunk]"},
		{"nothing there", func(_ *store, b *Bucket, _ *Log) { *b = Bucket{Partition: 3} }, "[]", "[]"},
	} {
		s := two(t)
		b, log := s.bucket(), s.log
		c.change(s, &b, &log)
		choice := Choose(b, log)
		usable, rejected := generations(choice)
		if fmt.Sprint(usable) != c.usable || fmt.Sprint(rejected) != c.rejected {
			t.Errorf("%s: usable %v, rejected %v", c.name, usable, rejected)
		}
		for _, r := range choice.Rejected {
			if r.Err == nil || r.Key == "" {
				t.Errorf("%s: %+v has no reason", c.name, r)
			}
		}
	}
}

// manifest returns the manifest of a generation.
func (s *store) manifest(t *testing.T, g Generation) *Manifest {
	for _, m := range Choose(s.bucket(), s.log).Usable {
		if m.Generation == g {
			return m
		}
	}
	t.Fatalf("no generation %d", g)
	return nil
}

func TestReasonOf(t *testing.T) {
	for want, err := range map[Reason]error{
		Future: fmt.Errorf("x: %w", ErrVersion), MissingChunk: fmt.Errorf("x: %w",
			ErrMissing), CorruptChunk: fmt.Errorf("x: %w", ErrCorrupt), failed: errors.New("timeout"),
	} {
		if got := ReasonOf(err); got != want {
			t.Errorf("%v is %s", err, got)
		}
	}
}

func TestPlanWrite(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(s *store, b *Bucket, log *Log)
		want   string // generation, older, copy, purge to, error
	}{
		{"all is well", func(*store, *Bucket, *Log) {}, "3 2 p3.g2 21"},
		{"an empty bucket", func(_ *store, b *Bucket, _ *Log) { *b = Bucket{Partition: 3, Keys: []string{}} },
			"1 none  0"},
		{"the copy is there", func(_ *store, b *Bucket, _ *Log) { b.Manifests["p3.g2"] = b.Manifests["p3.manifest"] },
			"3 2  21"},
		{"another copy is there", func(_ *store, b *Bucket, _ *Log) { b.Manifests["p3.g2"] = []byte("x") },
			"3 2 p3.g2 21"},
		{"current manifest damaged", func(_ *store, b *Bucket, _ *Log) { b.Manifests["p3.manifest"] = []byte("{") },
			"3 1  11"},
		{"current manifest of the future",
			func(_ *store, b *Bucket, _ *Log) { b.Manifests["p3.manifest"] = sealed(`{"format": 7,`) }, "3 1  11"},
		{"the log ends before the current one", func(_ *store, b *Bucket, l *Log) { l.Last = 15 }, "3 1  11"},
		{"the stream was made again", func(_ *store, b *Bucket, l *Log) { l.Epoch = l.Epoch.Add(time.Hour) },
			"3 2 p3.g2 0"},
		{"leftovers of a later one", func(_ *store, b *Bucket,
			_ *Log) {
			b.Keys = append(b.Keys, Key{3, ChunkKey, 7, Hash{}}.String())
		}, "8 2 p3.g2 21"},
		{"ours is behind", func(_ *store, b *Bucket, _ *Log) {}, "error"},
	} {
		s := two(t)
		b, log := s.bucket(), s.log
		c.change(s, &b, &log)
		seq := events.StreamSeq(30)
		if c.want == "error" {
			seq = 19
		}
		p, err := PlanWrite(b, log, seq)
		got := "error"
		if err == nil {
			older := "none"
			if p.Older != nil {
				older = fmt.Sprint(p.Older.Generation)
			}
			m := &Manifest{Generation: p.Generation, Epoch: log.Epoch, Seq: seq}
			got = fmt.Sprintf("%d %s %s %d", p.Generation, older, p.CopyKey, p.After(m, b.Keys).PurgeTo)
		} else if !errors.Is(err, ErrBehind) ||
			!strings.Contains(err.Error(), "generation 2 stands for sequence 20, this one for 19") {
			t.Error(err)
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// TestCorruptChunkIsWrittenAgain: a writer writes damaged chunks again.
func TestCorruptChunkIsWrittenAgain(t *testing.T) {
	s := newStore()
	im := conversations(4, 2000).im
	s.write(t, im, 1)
	b := s.bucket()
	b.Corrupt = map[string]bool{}
	for _, ref := range s.m.Chunks {
		if ref.Kind == kindRuns {
			s.values[ref.Key] = []byte("damaged")
			b.Corrupt[ref.Key] = true
			break
		}
	}
	plan, err := PlanWrite(b, s.log, 2)
	if err != nil {
		t.Fatal(err)
	}
	if plan.Older == nil || plan.usable || len(plan.Rejected) != 0 && plan.Rejected[0].Reason != CorruptChunk {
		// The bucket has no intact generation to keep, and so no purge.
		if plan.Older != nil {
			t.Fatalf("%+v", plan)
		}
	}
	wrote := 0
	w, err := NewWriter(config(im, 2), plan, s.index, func(key string, data []byte) error {
		s.values[key] = data
		wrote++
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	im.writeTo(t, w)
	m, _, err := w.Close()
	if err != nil || wrote == 0 {
		t.Fatal(wrote, err)
	}
	if s.values[ManifestKey(3)], err = m.Encode(); err != nil {
		t.Fatal(err)
	}
	if got, _ := s.read(t); !got.equal(im) {
		t.Fatal("the restored image differs")
	}
}

// TestAfter: garbage is all chunks outside of the two kept generations, except the chunks of a later writer.
func TestAfter(t *testing.T) {
	s := two(t)
	b := s.bucket()
	plan, err := PlanWrite(b, s.log, 30)
	if err != nil {
		t.Fatal(err)
	}
	second := s.manifest(t, 2)
	m := &Manifest{Partition: 3, Generation: plan.Generation, Epoch: epoch, Seq: 30, Chunks: second.Chunks[:1]}
	fresh := Key{3, ChunkKey, 3, Hash{1, 1}}.String()
	keys := append(slices.Clone(b.Keys), fresh, "p3.g2", Key{3, ChunkKey, 4, Hash{1, 1}}.String(), "p3.g3", "p3.notes",
		Key{4, ChunkKey, 1, Hash{}}.String())
	got := plan.After(m, keys)
	slices.Sort(got.Delete)
	want := []string{"p3.g1", fresh}
	for _, k := range b.Keys {
		if key, _ := ParseKey(k); key.Type == ChunkKey &&
			!slices.ContainsFunc(second.Chunks, func(c ChunkRef) bool { return c.Key == k }) {
			want = append(want, k)
		}
	}
	slices.Sort(want)
	if !slices.Equal(got.Delete, want) || got.PurgeTo != 21 {
		t.Errorf("got %v, want %v; purge to %d", got.Delete, want, got.PurgeTo)
	}
}

func TestOtherEpochErrorHasRFC3339(t *testing.T) {
	at := time.Date(2025, 11, 21, 8, 0, 0, 1, time.UTC)
	reason, err := (&Manifest{Epoch: at}).fits(&Log{Epoch: at.Add(time.Second).In(time.FixedZone("", 3600))})
	const want = "snapshot of the stream made at 2025-11-21T08:00:00.000000001Z, not of the one made at " +
		"2025-11-21T08:00:01.000000001Z"
	if reason != OtherEpoch || err == nil || err.Error() != want {
		t.Errorf("%v: %v", reason, err)
	}
}
