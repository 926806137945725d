package bench

import (
	"bytes"
	"encoding/json"
	"flag"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/tools/corpus"
)

var whole = flag.Bool("whole", false, "run holes64 in full, not only the beginning")

// makeCorpus makes a named corpus of the generator's first requests; 0 uses all requests of the corpus.
func makeCorpus(t *testing.T, n corpus.Named, requests, capacity int) string {
	t.Helper()
	o := n.Options
	if requests > 0 {
		o.Requests, o.Capacity, o.Workers = requests, capacity, min(o.Workers, 16)
	}
	path := filepath.Join(t.TempDir(), n.Name+".bin")
	if _, err := corpus.Run(t.Context(), corpus.Job{Options: o, Out: path}, io.Discard); err != nil {
		t.Fatal(err)
	}
	return path
}

func report(t *testing.T, o Options) (r Report) {
	t.Helper()
	o.JSON = true
	var out bytes.Buffer
	if err := RunIndex(t.Context(), o, &out); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatalf("%v: %s", err, out.Bytes())
	}
	return r
}

// TestHolesEightTimesOver plays holes64 eight times with different contents. Every rank is cleared before the first
// event of a round. After the second round, the kept content of the index must not grow. The memory may grow by a
// single mapping step for every array of the arena: at most an eighth of all granules is free and scattered until the
// sixth round.
func TestHolesEightTimesOver(t *testing.T) {
	requests, capacity := 300, 3000
	if *whole {
		requests, capacity = 0, 0
	}
	c, err := corpus.Open(makeCorpus(t, corpus.TheNamed()[3], requests, capacity))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	x := radix.New(radix.Config{})
	var ids []radix.RankID
	for range c.Header().Workers {
		ids = append(ids, x.AddRank(0, 16))
	}
	const (
		// growth of a mapped array; arrays on the heap (under the race detector) have a quarter to spare
		step   = 256 << 10
		arrays = 3 // of the arena
	)
	within := func(n, was, more int64) bool { return n >= was*99/100 && n <= was*101/100+more }
	var second, sixth radix.Stats
	for round := range uint64(8) {
		cleared := map[uint32]bool{}
		for _, op := range c.Ops() {
			if op.Kind == corpus.Query {
				continue
			}
			if !cleared[op.Worker] {
				cleared[op.Worker] = true
				x.Apply(ids[op.Worker], 0, []events.Event{{Kind: events.Cleared}})
			}
			e := events.Event{Kind: events.Stored, Tier: events.Device, HasParent: op.HasParent,
				Parent: op.Parent ^ events.BlockHash(corpus.Mix(round))}
			for _, b := range op.Blocks {
				e.Blocks = append(e.Blocks, b^events.BlockHash(corpus.Mix(round)))
			}
			for _, l := range op.Locals {
				e.Locals = append(e.Locals, l^events.LocalHash(corpus.Mix(round)))
			}
			if op.Kind == corpus.Remove {
				e.Kind, e.Locals = events.Removed, nil
			}
			x.Apply(ids[op.Worker], 0, []events.Event{e})
		}
		st := x.Stats()
		if st.Holdings[0] != int64(c.Header().LiveAtEnd) {
			t.Fatalf("round %d: %d holdings, the corpus ends with %d", round, st.Holdings[0], c.Header().LiveAtEnd)
		}
		switch round {
		case 1:
			second = st
		case 5:
			sixth = st
		}
		if round > 1 && (!within(st.Blocks, second.Blocks, 0) || !within(st.Nodes, second.Nodes, 0) ||
			!within(st.Bytes.Total, second.Bytes.Total, arrays*step)) {
			t.Errorf("round %d: %+v, after the second %+v", round+1, st, second)
		}
		if round > 5 && !within(st.Bytes.Total, sixth.Bytes.Total, 0) {
			t.Errorf("round %d: %d bytes, %d after the sixth", round+1, st.Bytes.Total, sixth.Bytes.Total)
		}
	}
}

// TestModes runs every mode and checks for a complete report.
func TestModes(t *testing.T) {
	path := makeCorpus(t, corpus.TheNamed()[3], 60, 800)
	c, err := corpus.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	held := int64(c.Header().LiveAtEnd)
	c.Close()
	complete := map[Mode]func(r Report) bool{
		Events: func(r Report) bool { return r.BlocksPerSec > 0 && r.BlocksPerSecSecond > 0 },
		Queries: func(r Report) bool {
			return r.Latency != nil && r.N >= 20000 && r.P50 > 0 && r.P999Typical > 0 && r.P999Typical <= r.Max &&
				r.QueriesPerSec > 0
		},
		Mixed:  func(r Report) bool { return r.Seconds > 0 && r.Digest != "" },
		Load:   func(r Report) bool { return r.Latency != nil && r.P999Typical == 0 && r.BlocksPerSec > 0 },
		Memory: func(r Report) bool { return r.Holdings == held && r.Counted > 0 && r.Stats != nil },
		Snapshot: func(r Report) bool {
			return r.Image != nil && r.Image.Same && r.Image.Runs > 0 &&
				r.Holdings == held
		},
	}
	for _, m := range Modes {
		o := Options{File: path, Mode: m, Readers: 2}
		if r := report(t, o); !complete[m](r) || r.Mode != m || r.Corpus != "holes64" {
			t.Errorf("%s: %+v", m, r)
		}
		var out strings.Builder
		if err := RunIndex(t.Context(), o, &out); err != nil || !strings.Contains(out.String(), string(m)) {
			t.Errorf("%s: %v: %s", m, err, out.String())
		}
	}
}

// TestTypical checks the median: a single slow run does not slow a query, and a query with many slow runs is slow.
func TestTypical(t *testing.T) {
	qs := make([][]events.LocalHash, 3)
	first := &reader{qs: qs, took: []time.Duration{1, 2, 9, 1, 200, 8}}
	second := &reader{qs: qs, first: 2, took: []time.Duration{9, 100, 3}}
	if got, want := typical([]*reader{first, second}), []time.Duration{1, 3, 9}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if a, b, c := rounds(1), rounds(2001), rounds(12031); a != 20000 || b != 10 || c != 9 {
		t.Errorf("rounds %d, %d, %d", a, b, c)
	}
}

func TestRefused(t *testing.T) {
	for want, o := range map[string]Options{
		"no corpus file": {Mode: Mixed},
		`mode "fast"`:    {File: "x", Mode: "fast"},
		"negative":       {File: "x", Mode: Mixed, Readers: -1},
		"open corpus":    {File: filepath.Join(t.TempDir(), "none"), Mode: Mixed},
	} {
		if err := RunIndex(t.Context(), o, io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", o, err, want)
		}
	}
}
