package corpus

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/trace"
)

var whole = flag.Bool("whole", false, "make the named corpora in full and check their digests")

// small has a variant for every flag, over a generated trace of 200 requests. The SHA-256 is the digest of the file
// that the first implementation of the format makes from the same trace and flags. The SHA-256 of holes is from this
// implementation.
var small = []struct {
	name   string
	change func(*Options)
	sha256 string
	digest string
}{
	{"lru", func(o *Options) { o.Workers, o.Capacity = 8, 3000 },
		"ba4ea76e73899dd9d0e3fe3212fa8b5e84e78f0b32e299796e73d318d8184955", "58dcd62e2d82bdd4"},
	{"random", func(o *Options) { o.Workers, o.Capacity, o.Evict = 8, 3000, Random },
		"0c3b986cee94cb451dbb6085c6a4f5a475a60a0152c664bba8d0f37c1f64e4a3", "fb90da245ee65766"},
	{"holes", func(o *Options) { o.Workers, o.Capacity, o.Evict = 8, 3000, Holes },
		"742b7614bca0f7a392369ed80476b33d624fc5598e0ef2d3d1b3fef4ac1b3f68", "ceef0ae9eaa3d7d3"},
	{"private", func(o *Options) { o.Workers, o.Capacity, o.Names = 8, 3000, Private },
		"d3a5064e1ab80e68b75329007c9ca3f1fae4ec6b43f3837695dba36a63ef0482", "58dcd62e2d82bdd4"},
	{"everyone", func(o *Options) { o.Workers, o.Capacity, o.Everyone, o.Requests = 5, 100000, true, 20 },
		"8299891ac292084ca56e10c8cc4a5274288435b83588615b5286eb3063fdd215", "610214d95a755053"},
	{"tight", func(o *Options) {
		o.Workers, o.Capacity, o.BlockSize, o.Repeat, o.Sticky, o.Evict, o.Names = 3, 500, 64, 2, 0, Random, Private
	}, "101cb3bcb96d77ffd5c808e758e8954e8255d722ef7f15ebc5acc2a67726d125", "5e88379706a9b480"},
	{"sticky", func(o *Options) { o.Workers, o.Capacity, o.BlockSize, o.Sticky = 16, 100, 128, 1 },
		"afc42cba8868c1295618118912fdfac9add8b278dd681ef58bbe334b2c8d5c10", "ae6d6ec7933b1ed2"},
}

func smallTrace() []trace.Request {
	return trace.Generate(trace.Options{Seed: 1, Requests: 200, Clump: 1})
}

// makeCorpus makes a corpus in a file of the test's own.
func makeCorpus(t testing.TB, o Options, reqs []trace.Request) (path string) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "corpus.bin"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Write(t.Context(), o, reqs, f); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return f.Name()
}

func open(t testing.TB, path string) *Reader {
	t.Helper()
	r, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func TestBytesAndDigestsAreTheSameEverywhere(t *testing.T) {
	for _, c := range small {
		o := Defaults()
		c.change(&o)
		path := makeCorpus(t, o, smallTrace())
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != c.sha256 {
			t.Errorf("%s: %x, want %s", c.name, sum, c.sha256)
		}
		r := open(t, path)
		digest, counted, unknown := play(r)
		if digest.String() != c.digest || counted != r.Header() || unknown > 0 {
			t.Errorf("%s: digest %v, want %s; %d removals or parents unknown; counted %+v, the header has %+v",
				c.name, digest, c.digest, unknown, counted, r.Header())
		}
		if !slices.Equal(encode(r), data) {
			t.Errorf("%s: the read corpus differs from the written corpus", c.name)
		}
	}
}

// encode writes the content of a reader without the code of Write.
func encode(r *Reader) []byte {
	var b bytes.Buffer
	h := r.Header()
	b.Write(h.encode())
	u := func(width int, x uint64) {
		for ; width > 0; width-- {
			b.WriteByte(byte(x))
			x >>= 8
		}
	}
	for _, op := range r.Ops() {
		flags := uint64(0)
		if op.HasParent {
			flags = 1
		}
		n := max(len(op.Blocks), len(op.Locals))
		u(1, uint64(op.Kind))
		u(1, flags)
		u(2, 0)
		u(4, uint64(op.Worker))
		u(4, uint64(n))
		if op.Kind == Store {
			u(8, uint64(op.Parent))
		}
		for i := range n {
			if op.Kind != Query {
				u(8, uint64(op.Blocks[i]))
			}
			if op.Kind != Remove {
				u(8, uint64(op.Locals[i]))
			}
		}
	}
	return b.Bytes()
}

func TestNamedCorpora(t *testing.T) {
	names := []string{}
	for _, n := range TheNamed() {
		names = append(names, n.Name)
		if err := n.Options.Validate(); err != nil {
			t.Error(n.Name, err)
		}
		if !*whole {
			continue
		}
		path := filepath.Join(t.TempDir(), n.Name)
		h, err := Run(t.Context(), Job{Options: n.Options, Out: path}, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		want, known := Expected(h)
		digest, counted, unknown := play(open(t, path))
		if !known || digest != want || counted != h || unknown > 0 {
			t.Errorf("%s: digest %v, want %v (%v); %+v, counted %+v; %d unknown", n.Name, digest, want, known, h,
				counted, unknown)
		}
	}
	want := []string{"conv64", "conv256", "every256", "holes64", "onlyholes64", "private64", "spread64"}
	if !slices.Equal(names, want) {
		t.Errorf("%q, want %q", names, want)
	}
	if d, known := Expected(Header{}); known {
		t.Errorf("an empty corpus has digest %v", d)
	}
}

func TestRun(t *testing.T) {
	dir := t.TempDir()
	tracePath := filepath.Join(dir, "t.jsonl")
	f, err := os.Create(tracePath)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(trace.Write(f, smallTrace()), f.Close()); err != nil {
		t.Fatal(err)
	}
	o := Defaults()
	o.Workers, o.Capacity = 8, 3000
	jobs := []Job{
		{Options: o, Trace: tracePath, Out: filepath.Join(dir, "a")},
		{Options: o, Seed: 1, Clump: 1, Out: filepath.Join(dir, "b")},
	}
	jobs[1].Requests = 200
	for _, job := range jobs {
		var progress bytes.Buffer
		h, err := Run(t.Context(), job, &progress)
		if err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(job.Out)
		if err != nil {
			t.Fatal(err)
		}
		if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != small[0].sha256 {
			t.Errorf("%s: %x, want %s", job.Out, sum, small[0].sha256)
		}
		if got := open(t, job.Out).Header(); got != h {
			t.Errorf("%+v, in the file %+v", h, got)
		}
		if !strings.Contains(progress.String(), fmt.Sprintf("%d blocks stored", h.Stored)) {
			t.Errorf("progress: %s", &progress)
		}
	}

	left := func() (names []string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	if got, want := left(), []string{"a", "b", "t.jsonl"}; !slices.Equal(got, want) {
		t.Errorf("%q lie there, want %q", got, want)
	}
	stopped, stop := context.WithCancel(t.Context())
	stop()
	bad := o
	bad.Workers, bad.Evict = 0, "fifo"
	for _, c := range []struct {
		ctx  context.Context
		job  Job
		want string
	}{
		{stopped, Job{Options: o, Seed: 1, Out: filepath.Join(dir, "c")}, "context canceled"},
		{t.Context(), Job{Options: bad, Out: filepath.Join(dir, "c")}, "workers: 0"},
		{t.Context(), Job{Options: bad, Out: filepath.Join(dir, "c")}, `evict: "fifo"`},
		{t.Context(), Job{Options: o}, "no file"},
		{t.Context(), Job{Options: o, Trace: filepath.Join(dir, "none"), Out: filepath.Join(dir, "c")}, "none"},
		{t.Context(), Job{Options: o, Trace: os.DevNull, Out: filepath.Join(dir, "c")}, "no request"},
		{t.Context(), Job{Options: jobs[1].Options, Seed: 1, Out: filepath.Join(dir, "no", "c")}, "no such file"},
	} {
		if _, err := Run(c.ctx, c.job, io.Discard); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
	if got, want := left(), []string{"a", "b", "t.jsonl"}; !slices.Equal(got, want) {
		t.Errorf("after failures %q lie there, want %q", got, want)
	}
}

func TestOptionsComplainOfEverything(t *testing.T) {
	if err := Defaults().Validate(); err != nil {
		t.Error(err)
	}
	err := Options{Workers: 1 << 21, Capacity: -1, BlockSize: 5, Requests: -1, Sticky: 1.5, Evict: "x",
		Names: "y"}.Validate()
	for _, want := range []string{"workers", "capacity", "block size 5", "requests", "repeat", "sticky", "evict",
		"names"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %q", err, want)
		}
	}
}

func TestWriteReportsTheWritersError(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "c"))
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if _, err := Write(t.Context(), Defaults(), smallTrace(), f); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closed file: %v", err)
	}
}

// tiny is a corpus with an operation of every kind.
func tiny(t testing.TB) []byte {
	t.Helper()
	o := Defaults()
	o.Workers, o.Capacity, o.BlockSize = 1, 2, 512
	data, err := os.ReadFile(makeCorpus(t, o,
		[]trace.Request{{InputLength: 1024, OutputLength: 512, HashIDs: []uint64{1, 2}}}))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func read(data []byte) (*Reader, error) { return Read(bytes.NewReader(data), int64(len(data))) }

func TestReaderSaysWhatIsWrong(t *testing.T) {
	good := tiny(t)
	r, err := read(good)
	if err != nil {
		t.Fatal(err)
	}
	kinds := []Kind{}
	for _, op := range r.Ops() {
		kinds = append(kinds, op.Kind)
	}
	if want := []Kind{Query, Store, Store, Remove}; !slices.Equal(kinds, want) {
		t.Fatalf("%v, want %v", kinds, want)
	}
	const query, store1, store2, remove = 88, 88 + 12 + 16, 88 + 12 + 16 + 20 + 32, 88 + 12 + 16 + 20 + 32 + 20 + 16
	for _, c := range []struct {
		at    int
		value byte
		want  string
	}{
		{0, 'X', `begins with "XVCORP01"`},
		{16, 9, "counts 9 operations"},
		{16 + 7, 0x80, "in 224 bytes"},
		{24, 9, "the header's counts make"},
		{query, 0, "operation 0: not a valid corpus: unknown kind(0)"},
		{query, 77, "unknown kind(77)"},
		{query + 1, 1, "a query with a parent"},
		{query + 1, 2, "unknown flags"},
		{query + 2, 2, "unknown flags"},
		{query + 8, 3, "operation 0: not a valid corpus: 3 blocks, beyond the 2 queried"},
		{store1 + 4, 1, "operation 1: not a valid corpus: worker 1 of 1"},
		{store1 + 8, 9, "9 blocks, beyond the 3 stored"},
		{store1 + 11, 0xff, "beyond the 3 stored"},
		{store1 + 12, 1, "parent 0x1 without the flag"},
		{store2 + 1, 0, "without the flag"},
		{remove + 8, 2, "2 blocks, beyond the 1 removed"},
		{remove + 8, 0, "the operations make"},
	} {
		data := slices.Clone(good)
		data[c.at] = c.value
		if r, err := read(data); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), c.want) || r != nil {
			t.Errorf("byte %d = %#x: %v, want %q", c.at, c.value, err, c.want)
		}
	}
	for n := range len(good) {
		if _, err := read(good[:n]); !errors.Is(err, ErrFormat) {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
		if _, err := Read(bytes.NewReader(good[:n]), int64(len(good))); !errors.Is(err, ErrFormat) ||
			!strings.Contains(err.Error(), "too early") {
			t.Errorf("shrunk to %d bytes while read: %v", n, err)
		}
	}
	if _, err := read(append(good, 0)); !errors.Is(err, ErrFormat) {
		t.Errorf("a corpus with an additional byte: %v", err)
	}

	path := filepath.Join(t.TempDir(), "bad.bin")
	if err := os.WriteFile(path, good[:100], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), path) {
		t.Errorf("%v does not name the file", err)
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

func TestReaderAllocatesNothing(t *testing.T) {
	o := Defaults()
	o.Workers, o.Capacity = 8, 3000
	r := open(t, makeCorpus(t, o, smallTrace()))
	blocks, locals := 0, 0
	var last events.BlockHash
	if n := testing.AllocsPerRun(20, func() {
		for _, op := range r.Ops() {
			blocks, locals = blocks+len(op.Blocks), locals+len(op.Locals)
			for _, b := range op.Blocks {
				last = b
			}
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if blocks == 0 || locals == 0 || last == 0 {
		t.Error("nothing was read")
	}
	if err := errors.Join(r.Close(), r.Close()); err != nil || r.Len() != 0 {
		t.Errorf("closed twice: %v", err)
	}
}

// TestEnginesAgreeWithLists compares an engine with a plain list in order of use, or of copies.
func TestEnginesAgreeWithLists(t *testing.T) {
	testkit.Sequential(t)
	reqs := trace.Generate(trace.Options{Seed: 5, Requests: 600, Clump: 1})
	for _, capacity := range []int{1, 7, 60, 1000} {
		e := newEngine(LRU, 0)
		var list []uint64 // least recently used first
		for _, r := range reqs {
			blocks := r.HashIDs
			for _, b := range blocks {
				if e.holds(b) != slices.Contains(list, b) {
					t.Fatalf("capacity %d: holds(%d) is %v", capacity, b, e.holds(b))
				}
			}
			e.use(blocks, 0)
			for i := len(blocks) - 1; i >= 0; i-- {
				list = append(slices.DeleteFunc(list, func(b uint64) bool { return b == blocks[i] }), blocks[i])
			}
			cut := max(0, len(list)-capacity)
			if gone := e.shrink(capacity, nil); !slices.Equal(gone, list[:cut]) {
				t.Fatalf("capacity %d: %v left, want %v", capacity, gone, list[:cut])
			}
			list = list[cut:]
			if held := slices.Collect(e.held()); !slices.Equal(held, list) && len(list) > 0 {
				t.Fatalf("capacity %d: holds %v, want %v", capacity, held, list)
			}
		}
	}
	e := newEngine(Random, 3)
	copies := map[uint64]int{}
	for _, r := range reqs {
		e.use(r.HashIDs, len(r.HashIDs)/2)
		for _, b := range r.HashIDs[len(r.HashIDs)/2:] {
			copies[b]++
		}
		for _, b := range e.shrink(50, nil) {
			if copies[b]--; copies[b] == 0 {
				delete(copies, b)
			}
		}
		total, held := 0, map[uint64]int{}
		for b, n := range copies {
			total += n
			held[b] = n
		}
		if total > 50 || len(held) != len(slices.Collect(e.held())) {
			t.Fatalf("%d copies of %d blocks", total, len(held))
		}
		for b := range e.held() {
			if copies[b] < 1 || !e.holds(b) {
				t.Fatalf("block %d has %d copies", b, copies[b])
			}
		}
	}
}

// TestHolesAlone checks evictions. Eviction of tails first leaves no holes and no second copies. Holes leaves only
// holes. Random leaves both.
func TestHolesAlone(t *testing.T) {
	for evict, want := range map[Evict][2]bool{LRU: {false, false}, Holes: {true, false},
		Random: {true, true}} {
		o := Defaults()
		o.Workers, o.Capacity, o.Evict = 8, 3000, evict
		r := open(t, makeCorpus(t, o, smallTrace()))
		var got [2]bool
		held := make([]map[events.BlockHash]int, o.Workers)
		followers := make([]map[events.BlockHash]int, o.Workers) // blocks held directly behind a block
		parents := map[events.BlockHash]events.BlockHash{}
		for w := range held {
			held[w], followers[w] = map[events.BlockHash]int{}, map[events.BlockHash]int{}
		}
		for _, op := range r.Ops() {
			switch op.Kind {
			case Store:
				parent := op.Parent
				for _, b := range op.Blocks {
					parents[b] = parent
					got[1] = got[1] || held[op.Worker][b] > 0
					if held[op.Worker][b]++; held[op.Worker][b] == 1 {
						followers[op.Worker][parent]++
					}
					parent = b
				}
			case Remove:
				for _, b := range op.Blocks {
					if held[op.Worker][b]--; held[op.Worker][b] == 0 {
						followers[op.Worker][parents[b]]--
						got[0] = got[0] || followers[op.Worker][b] > 0
					}
				}
			}
		}
		if got != want {
			t.Errorf("%s: holes, second copies: %v, want %v", evict, got, want)
		}
	}
}

func TestDigest(t *testing.T) {
	var a, b Digest
	a.Add(0, 1, 2)
	a.Add(3, 4, 5)
	a.Add(6, 7, 0)
	b.Add(3, 4, 5)
	b.Add(0, 1, 2)
	if want := Digest(Mix(1<<20^2) + Mix(3<<40^4<<20^5)); a != want || b != want {
		t.Errorf("%v, %v, want %v", a, b, want)
	}
	// The first outputs of SplitMix64 for the seed 1234567, as published with java.util.SplittableRandom's algorithm.
	state := uint64(1234567)
	for _, want := range []uint64{6457827717110365317, 3203168211198807973, 9817491932198370423} {
		if got := Mix(state); got != want {
			t.Errorf("%d, want %d", got, want)
		}
		state += 0x9e3779b97f4a7c15
	}
	if s := Digest(0xab).String(); s != "00000000000000ab" {
		t.Error(s)
	}
}

func FuzzRead(f *testing.F) {
	good := tiny(f)
	f.Add(good)
	f.Add(good[:90])
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := read(data)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatal(err)
			}
			return
		}
		if got := encode(r); !bytes.Equal(got, data) {
			t.Fatalf("read % x, writes % x", data, got)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

func BenchmarkWrite(b *testing.B) {
	reqs := trace.Generate(trace.Options{Requests: 1000})
	o := Defaults()
	for b.Loop() {
		makeCorpus(b, o, reqs)
	}
}

func BenchmarkOpen(b *testing.B) {
	path := makeCorpus(b, Defaults(), trace.Generate(trace.Options{Requests: 1000}))
	info, err := os.Stat(path)
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(info.Size())
	for b.Loop() {
		r, err := Open(path)
		if err != nil {
			b.Fatal(err)
		}
		r.Close()
	}
}

func ExampleReader_Ops() {
	dir, err := os.MkdirTemp("", "corpus")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "small.bin")
	o := Defaults()
	o.Workers, o.Capacity, o.Requests = 2, 1000, 3
	if _, err := Run(context.Background(), Job{Options: o, Seed: 1, Out: path}, io.Discard); err != nil {
		fmt.Println(err)
		return
	}
	r, err := Open(path)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer r.Close()
	blocks := map[Kind]int{}
	for _, op := range r.Ops() {
		blocks[op.Kind] += max(len(op.Blocks), len(op.Locals))
	}
	fmt.Println(r.Header().Workers, "workers:", blocks[Store], "blocks stored,", blocks[Remove], "removed,",
		blocks[Query], "queried")
	// Output: 2 workers: 1500 blocks stored, 141 removed, 1444 queried
}
