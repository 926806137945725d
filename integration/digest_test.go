package integration

import (
	"bytes"
	"encoding/json"
	"flag"
	"io"
	"path/filepath"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/tools/bench"
	"github.com/kvatlas/kvatlas/tools/corpus"
	"github.com/kvatlas/kvatlas/tools/twin"
)

var wholeCorpora = flag.Bool("whole", false,
	"TestWholeDigests: the named corpora in full (about 1 GB of disk, a few minutes)")

// makeCorpus makes a named corpus from the generator's seed 0: the beginning on fewer workers, or the whole corpus.
func makeCorpus(t *testing.T, n corpus.Named, whole bool) string {
	t.Helper()
	o := n.Options
	if !whole {
		o.Requests, o.Capacity, o.Workers = 60, 800, min(o.Workers, 16)
	}
	path := filepath.Join(t.TempDir(), n.Name+".bin")
	if _, err := corpus.Run(t.Context(), corpus.Job{Options: o, Out: path}, io.Discard); err != nil {
		t.Fatal(err)
	}
	return path
}

// digestOf returns the report of `indexer bench index --mode mixed`.
func digestOf(t *testing.T, path string, writers int) (r bench.Report) {
	t.Helper()
	var out bytes.Buffer
	if err := bench.RunIndex(t.Context(), bench.Options{File: path, Mode: bench.Mixed, Writers: writers, JSON: true},
		&out); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatalf("%v: %s", err, out.Bytes())
	}
	return r
}

// TestDigests compares the index with the twin on the beginnings of all named corpora.
func TestDigests(t *testing.T) {
	t.Parallel()
	for _, n := range corpus.TheNamed() {
		t.Run(n.Name, func(t *testing.T) {
			path := makeCorpus(t, n, false)
			want := twinDigest(t, path)
			for writers := 1; writers <= 2; writers++ {
				if got := digestOf(t, path, writers).Digest; got != want.String() {
					t.Errorf("%d writers: digest %s, the twin's %s", writers, got, want)
				}
			}
		})
	}
}

// TestWholeDigests compares the named corpora with their expected digests.
func TestWholeDigests(t *testing.T) {
	t.Parallel()
	if !*wholeCorpora {
		t.Log("the corpora in full run with -whole")
		return
	}
	for _, n := range corpus.TheNamed() {
		t.Run(n.Name, func(t *testing.T) {
			path := makeCorpus(t, n, true)
			for writers := 1; writers <= 2; writers++ {
				r := digestOf(t, path, writers)
				if r.Expected == "" || r.Digest != r.Expected {
					t.Errorf("%d writers: digest %s, expected %q", writers, r.Digest, r.Expected)
				}
				t.Logf("%d writers: %s in %.3f s", writers, r.Digest, r.Seconds)
			}
		})
	}
}

func twinDigest(t *testing.T, path string) (d corpus.Digest) {
	t.Helper()
	c, err := corpus.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var ranks []*twin.Rank
	for range c.Header().Workers {
		ranks = append(ranks, twin.New(twin.Config{MaxPending: radix.DefaultMaxPending,
			MaxTombstones: radix.DefaultMaxTombstones, TombstoneFor: radix.DefaultTombstoneFor}, c.Header().BlockSize))
	}
	query := 0
	for _, op := range c.Ops() {
		switch op.Kind {
		case corpus.Query:
			for w, r := range ranks {
				d.Add(query, uint32(w), int(r.Match(op.Locals)[0]))
			}
			query++
		case corpus.Store:
			ranks[op.Worker].Apply(0, []events.Event{{Kind: events.Stored, Tier: events.Device, HasParent: op.HasParent,
				Parent: op.Parent, Blocks: op.Blocks, Locals: op.Locals}})
		case corpus.Remove:
			ranks[op.Worker].Apply(0, []events.Event{{Kind: events.Removed, Tier: events.Device, Blocks: op.Blocks}})
		}
	}
	return d
}
