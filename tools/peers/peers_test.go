package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/tools/corpus"
	"github.com/kvatlas/kvatlas/tools/trace"
)

var harness = flag.Bool("harness", false, "build the Rust harness and check its answers")

// TestMain makes the test program play an index if the first argument is "play".
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "play" {
		os.Exit(play(os.Args[2], os.Args[3:]))
	}
	os.Exit(m.Run())
}

func play(part string, args []string) int {
	switch part {
	case "index":
		fmt.Printf(`{"index":"x","corpus":"c","mode":%q,"seconds":2.5,"p50_us":1.5,"digest":"00000000000000ab"}`+"\n",
			args[1])
	case "unable":
		fmt.Fprintln(os.Stderr, "for one thread")
		return exitUnsupported
	case "garbage":
		fmt.Println("hello")
	case "broken":
		fmt.Fprintln(os.Stderr, "no such corpus")
		return 1
	}
	return 0
}

func player(name, part string) index {
	return index{name, func(corpus string, m mode) []string {
		return append([]string{os.Args[0], "play", part, corpus, m.name}, m.args()...)
	}}
}

func TestMeasure(t *testing.T) {
	var raw bytes.Buffer
	modes := []mode{{"mixed", 1}, {"queries", 2}}
	got, err := measure(t.Context(), []index{player(us, "index"), player("peer", "unable")}, "c.bin", modes, 3, &raw,
		t.Output())
	if err != nil {
		t.Fatal(err)
	}
	want := map[cell][]float64{
		{us, modes[0], "seconds"}: {2.5, 2.5, 2.5},
		{us, modes[1], "p50_us"}:  {1.5, 1.5, 1.5},
	}
	for at, values := range want {
		if !slices.Equal(got.values[at], values) {
			t.Errorf("%v: %v, want %v", at, got.values[at], values)
		}
	}
	if len(got.values) != len(want) || len(got.digests[us]) != 6 || strings.Count(raw.String(), "\n") != 6 {
		t.Errorf("%v, %v, raw %q", got.values, got.digests, &raw)
	}
	for part, want := range map[string]string{"garbage": `printed "hello\n"`, "broken": "no such corpus"} {
		if _, err := measure(t.Context(), []index{player("peer", part)}, "c.bin", modes, 1, &raw,
			t.Output()); err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "peer, mixed") {
			t.Errorf("%s: %v, want %q", part, err, want)
		}
	}
	stopped, stop := context.WithCancel(t.Context())
	stop()
	if _, err := measure(stopped, []index{player("peer", "index")}, "c.bin", modes, 1, &raw,
		t.Output()); !errors.Is(err, context.Canceled) {
		t.Errorf("stopped: %v", err)
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		xs   []float64
		want float64
	}{{[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 2, 9}, 3}} {
		if got, ok := median(c.xs); !ok || got != c.want {
			t.Errorf("%v: %v, want %v", c.xs, got, c.want)
		}
	}
	if _, ok := median(nil); ok {
		t.Error("a median of nothing")
	}
}

func TestTable(t *testing.T) {
	events, queries := mode{"events", 1}, mode{"queries", 2}
	all := &results{
		indexes: []string{us, "chainindex", "radixtree"},
		modes:   []mode{events, queries},
		values: map[cell][]float64{
			{us, events, "blocks_per_s"}:           {12e6, 15e6, 13e6},
			{"chainindex", events, "blocks_per_s"}: {26e6},
			{"radixtree", events, "blocks_per_s"}:  {6.5e6},
			{us, queries, "p50_us"}:                {0.8},
			{"chainindex", queries, "p50_us"}:      {1.2},
			{us, queries, "queries_per_s"}:         {1234567},
		},
		digests: map[string][]string{us: {"4100b23a895c2f72", "4100b23a895c2f72"}, "chainindex": {"0000000000000001"},
			"radixtree": {"0000000000000001", "0000000000000002"}},
	}
	conv64 := corpus.Header{Workers: 64, BlockSize: 16, Ops: 281409, Stored: 6477149, Removed: 2637149, Queries: 12031,
		QueryBlocks: 9044013,
		StoreOps:    263984, RemoveOps: 5394, LiveAtEnd: 3840000, DistinctAtEnd: 3532936}
	for _, c := range []struct {
		h    corpus.Header
		want string
	}{
		{conv64, `
                                          / chainindex  / radixtree  kvatlas  chainindex  radixtree
  events, first pass, M blocks/s                  0.50         2.00     13.0        26.0       6.50
  events, second pass, M blocks/s                    –            –        –           –          –
  query p50, µs (2 threads)                       1.50            –     0.80        1.20          –
  query p99, µs (2 threads)                          –            –        –           –          –
  query p99.9, µs (2 threads)                        –            –        –           –          –
  query p99.9 of medians, µs (2 threads)             –            –        –           –          –
  k queries/s (2 threads)                            –            –     1235           –          –
  answers                                                              right       wrong   wavering
`},
		{corpus.Header{}, `4100b23a895c2f72`},
	} {
		var b bytes.Buffer
		if err := all.print(&b, c.h); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains("\n"+b.String(), c.want) {
			t.Errorf("printed\n%s\nwant %s", &b, c.want)
		}
	}

	alone := &results{indexes: []string{"chainindex"}, modes: []mode{{"memory", 1}},
		values: map[cell][]float64{{"chainindex", mode{"memory", 1}, "bytes_per_holding"}: {58}}}
	var b bytes.Buffer
	if err := alone.print(&b, conv64); err != nil {
		t.Fatal(err)
	}
	if want := "                     chainindex\n  bytes per holding        58.0\n"; b.String() != want {
		t.Errorf("printed\n%q, want\n%q", &b, want)
	}
}

func TestFlags(t *testing.T) {
	f, err := parse([]string{"--corpora", "conv64,holes64", "--modes", "events:2,memory", "--peers", "radixtree",
		"--cache", "/c"})
	if err != nil {
		t.Fatal(err)
	}
	if f.corpora[0].Name != "conv64" || f.corpora[1].Options.Evict != corpus.Random ||
		!slices.Equal(f.modes, []mode{{"events", 2}, {"memory", 1}}) || f.rounds != 5 {
		t.Errorf("%+v", f)
	}
	if f, err := parse([]string{"--peers", "", "--cache", "/c"}); err != nil || len(f.peers) != 0 ||
		len(f.corpora) != len(corpus.TheNamed()) {
		t.Errorf("%+v, %v", f, err)
	}
	for want, args := range map[string][]string{
		`corpus "conv65": unknown`: {"--corpora", "conv65"},
		`mode "fast": unknown`:     {"--modes", "fast"},
		`mode "mixed:2"`:           {"--modes", "mixed:2"},
		`mode "events:0"`:          {"--modes", "events:0"},
		`mode "queries:x"`:         {"--modes", "queries:x"},
		`peer "x": unknown`:        {"--peers", "x"},
		`rounds: 0`:                {"--rounds", "0"},
		`unknown argument "y"`:     {"y"},
	} {
		if _, err := parse(args); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", args, err, want)
		}
	}
}

func TestTemplate(t *testing.T) {
	command := template("x --corpus {corpus} --mode={mode} {threads}")
	for _, c := range []struct {
		mode mode
		want string
	}{
		{mode{"events", 2}, "x --corpus f --mode=events --writers 2"},
		{mode{"queries", 3}, "x --corpus f --mode=queries --readers 3"},
		{mode{"mixed", 1}, "x --corpus f --mode=mixed"},
	} {
		if got := strings.Join(command("f", c.mode), " "); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

func TestPrepareMakesWhatIsMissing(t *testing.T) {
	small := corpus.Named{Name: "small", Options: corpus.Defaults()}
	small.Options.Workers, small.Options.Requests = 4, 30
	f := flags{seed: 1, cache: t.TempDir()}
	path, h, err := prepare(t.Context(), f, small, t.Output())
	if err != nil || h.Queries != 30 {
		t.Fatal(h, err)
	}
	first, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	same := func() bool {
		again, g, err := prepare(t.Context(), f, small, t.Output())
		if err != nil || g != h || again != path {
			t.Fatalf("%s, %+v, %v", again, g, err)
		}
		second, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		return os.SameFile(first, second)
	}
	if !same() {
		t.Error("a sound corpus was made again")
	}
	if err := os.Truncate(path, first.Size()-1); err != nil {
		t.Fatal(err)
	}
	if same() {
		t.Error("a damaged corpus was used")
	}

	f.trace = filepath.Join(t.TempDir(), "t.jsonl")
	file, err := os.Create(f.trace)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(trace.Write(file, trace.Generate(trace.Options{Seed: 2, Requests: 20})),
		file.Close()); err != nil {
		t.Fatal(err)
	}
	if other, g, err := prepare(t.Context(), f, small, t.Output()); err != nil || other == path || g.Queries != 20 {
		t.Errorf("from a trace: %s, %+v, %v", other, g, err)
	}
}

// TestHarness checks the peers' answers on small corpora against the digests of the twin in tools/corpus. With holes,
// all peers are wrong. Dynamo's are also wrong if workers have different engine hashes.
func TestHarness(t *testing.T) {
	if !*harness {
		t.Log("the harness is built and checked with -harness (needs cargo)")
		return
	}
	f, err := parse(nil)
	if err != nil {
		t.Fatal(err)
	}
	f.ours = "none"
	indexes, err := build(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	const plain, holes = "58dcd62e2d82bdd4", "fb90da245ee65766"
	for _, c := range []struct {
		change func(*corpus.Options)
		want   string
		right  []string
	}{
		{func(*corpus.Options) {}, plain, peerNames},
		{func(o *corpus.Options) { o.Names = corpus.Private }, plain, []string{"chainindex", "chainindex+mimalloc"}},
		{func(o *corpus.Options) { o.Evict = corpus.Random }, holes, nil},
	} {
		o := corpus.Defaults()
		o.Workers, o.Capacity, o.Requests = 8, 3000, 200
		c.change(&o)
		path := filepath.Join(t.TempDir(), "small.bin")
		if _, err := corpus.Run(t.Context(), corpus.Job{Options: o, Seed: 1, Clump: 1, Out: path},
			t.Output()); err != nil {
			t.Fatal(err)
		}
		modes := []mode{{"mixed", 1}, {"events", 1}, {"events", 2}, {"queries", 1}, {"queries", 2}, {"load", 1},
			{"memory", 1}}
		all, err := measure(t.Context(), indexes, path, modes, 1, t.Output(), t.Output())
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range indexes {
			if got := all.digests[x.name][0] == c.want; got != slices.Contains(c.right, x.name) {
				t.Errorf("%s, %+v: digest %s, right is %s", x.name, o, all.digests[x.name][0], c.want)
			}
			for _, m := range modes {
				for _, metric := range metrics {
					alone := x.name == "radixtree" && (m.threads > 1 || m.name == "load")
					if values := all.values[cell{x.name, m, metric.field}]; metric.mode == m.name &&
						(len(values) == 0) != alone {
						t.Errorf("%s, %v, %s: %v", x.name, m, metric.field, values)
					}
				}
			}
		}
	}
}
