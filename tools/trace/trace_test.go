package trace

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
)

func TestReadTakesWhatMooncakeWrites(t *testing.T) {
	const text = `{"timestamp": 0, "input_length": 1025, "output_length": 500, "hash_ids": [0, 1, 2]}

{"timestamp": 2999, "input_length": 600, "output_length": 1, "hash_ids": [0, 3], "session_id": "s7"}` + "\r\n"
	want := []Request{{Timestamp: 0, InputLength: 1025, OutputLength: 500, HashIDs: []uint64{0, 1, 2}},
		{2999, 600, 1, []uint64{0, 3}, "s7"}}
	for limit, n := range map[int]int{0: 2, 1: 1, 2: 2, 9: 2} {
		got, err := Read(strings.NewReader(text), limit)
		if err != nil || !reflect.DeepEqual(got, want[:n]) {
			t.Errorf("limit %d: %v, %v", limit, got, err)
		}
	}
}

func TestReadStopsAtTheLimit(t *testing.T) {
	good := `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[0]}` + "\n"
	r := &countingReader{left: good + strings.Repeat(" ", 1<<19) + "\n" + strings.Repeat("x", 1<<20)}
	if got, err := Read(r, 1); err != nil || len(got) != 1 {
		t.Fatal(len(got), err)
	}
	if r.taken > 64<<10 {
		t.Errorf("read %d bytes to get one line", r.taken)
	}
}

type countingReader struct {
	left  string
	taken int
}

func (r *countingReader) Read(p []byte) (int, error) {
	n := copy(p, r.left)
	r.left = r.left[n:]
	r.taken += n
	return n, nil
}

func TestReadNamesFileAndLine(t *testing.T) {
	const good = `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[0]}` + "\n"
	for _, c := range []struct{ text, want string }{
		{good + "{\n", "line 2: no request: unexpected end of JSON"},
		{good + "\n\nhello\n", "line 4: no request: invalid character 'h'"},
		{`{"output_length":1,"hash_ids":[0]}`, "line 1: no request: no input_length"},
		{`{"input_length":1,"hash_ids":[0]}`, "line 1: no request: no output_length"},
		{`{"input_length":1,"output_length":1}`, "line 1: no request: no hash_ids"},
		{`{"input_length":-1,"output_length":1,"hash_ids":[]}`, "line 1: no request: input_length -1 is negative"},
		{`{"input_length":1,"output_length":-2,"hash_ids":[]}`, "line 1: no request: output_length -2 is negative"},
		{`{"input_length":1,"output_length":1,"hash_ids":[-1]}`,
			"line 1: no request: json: cannot unmarshal number -1"},
		{`{"input_length":1e99,"output_length":1,"hash_ids":[1]}`,
			"line 1: no request: json: cannot unmarshal number 1e99"},
		{good + `{"x":"` + strings.Repeat("y", MaxLine) + `"}`, "line 2: no request: longer than 1048576 bytes"},
	} {
		path := filepath.Join(t.TempDir(), "t.jsonl")
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		reqs, err := ReadFile(path, 0)
		if reqs != nil || err == nil || !strings.Contains(err.Error(), path+": "+c.want) {
			t.Errorf("%.40q: %v, want %q", c.text, err, c.want)
		}
	}
	if _, err := ReadFile(filepath.Join(t.TempDir(), "none"), 0); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	broken := errors.New("disk on fire")
	if _, err := Read(iotest.ErrReader(broken), 0); !errors.Is(err, broken) {
		t.Errorf("broken reader: %v", err)
	}
}

func TestWriteIsReadBack(t *testing.T) {
	want := append(Generate(Options{Seed: 3, Requests: 100}), Request{HashIDs: []uint64{1<<64 - 1}},
		Request{HashIDs: []uint64{}})
	var b bytes.Buffer
	if err := Write(&b, want); err != nil {
		t.Fatal(err)
	}
	got, err := Read(&b, 0)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("%v: %d requests, want %d", err, len(got), len(want))
	}
	full := errors.New("disk full")
	if err := Write(failing{full}, want); !errors.Is(err, full) {
		t.Errorf("failing writer: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// TestGenerateIsTheSameEverywhere checks that seeds give the same traces in all versions, because other golden values
// (corpora, digests) depend on them.
func TestGenerateIsTheSameEverywhere(t *testing.T) {
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{}, "29222b8e15351f10757dee6769429fefd792abcced91caa635067ca5d41e2be9"},
		{Options{Seed: 1, Requests: 200, Clump: 1}, "ab2091a495d57ba46b525e90b970e986a003104841f421ce10de7ee771ec9fd5"},
		{Options{Seed: 1<<64 - 1, Requests: 50}, "0dfa1f2603cffe90f4663349190ecbfe8bd8f3841c3e06d3d995225e7236f769"},
	} {
		h := sha256.New()
		if err := Write(h, Generate(c.o)); err != nil {
			t.Fatal(err)
		}
		if got := hex.EncodeToString(h.Sum(nil)); got != c.want {
			t.Errorf("%+v: %s, want %s", c.o, got, c.want)
		}
	}
}

func TestGenerateHasTheShapeOfTheRealTrace(t *testing.T) {
	real := Shape{ // of Mooncake's conversation trace, by Measure
		Requests: 12031, Blocks: 288500, Distinct: 182790, FollowUps: .387, Extends: .850, Single: .69,
		Input:    Spread{Mean: 12035, P10: 964, P25: 2306, P50: 6909, P75: 15368, P90: 27367, P99: 85401},
		Output:   Spread{Mean: 343, P10: 24, P25: 156, P50: 350, P75: 472, P90: 597, P99: 1120},
		Shared:   Spread{Mean: 21.1, P50: 12, P75: 26, P90: 49},
		Turns:    Spread{Mean: 1.63},
		Pause:    Spread{Mean: 215, P10: 42, P25: 66, P50: 123, P75: 264, P90: 483},
		Arrivals: Spread{Mean: 10.2, P25: 5, P50: 10, P75: 15, P90: 21, P99: 29},
		Duration: 3536999,
	}
	for seed := range uint64(5) {
		got := Measure(Generate(Options{Seed: seed}))
		near := func(what string, got, want float64) {
			if ratio := got / want; ratio < .8 || ratio > 1.25 {
				t.Errorf("seed %d: %s is %.3g, in the real trace %.3g", seed, what, got, want)
			}
		}
		spread := func(what string, got, want Spread) {
			near(what+" mean", got.Mean, want.Mean)
			for i, p := range [][2]int{{got.P10, want.P10}, {got.P25, want.P25}, {got.P50, want.P50},
				{got.P75, want.P75}, {got.P90, want.P90}, {got.P99, want.P99}} {
				if p[1] > 0 {
					near(fmt.Sprint(what, " quantile ", i), float64(p[0]), float64(p[1]))
				}
			}
		}
		near("requests", float64(got.Requests), float64(real.Requests))
		near("blocks", float64(got.Blocks), float64(real.Blocks))
		near("share reused", got.Reused(), real.Reused())
		near("follow-ups", got.FollowUps, real.FollowUps)
		near("extends", got.Extends, real.Extends)
		near("single", got.Single, real.Single)
		near("duration", float64(got.Duration), float64(real.Duration))
		spread("input", got.Input, real.Input)
		spread("output", got.Output, real.Output)
		spread("shared", got.Shared, real.Shared)
		spread("turns", got.Turns, real.Turns)
		spread("pause", got.Pause, real.Pause)
		spread("arrivals", got.Arrivals, real.Arrivals)
	}
}

func TestGenerateKeepsTheFormatsRules(t *testing.T) {
	for seed := range uint64(20) {
		reqs := Generate(Options{Seed: seed, Requests: 400, Clump: 2})
		if len(reqs) != 400 {
			t.Fatalf("seed %d: %d requests", seed, len(reqs))
		}
		parent := map[uint64]uint64{0: 0} // an id also identifies all blocks before
		next, now := uint64(0), int64(0)
		for i, r := range reqs {
			if len(r.HashIDs) != (r.InputLength+BlockTokens-1)/BlockTokens || r.OutputLength < 1 || r.Timestamp < now ||
				r.HashIDs[0] != 0 {
				t.Fatalf("seed %d: request %d: %+v", seed, i, r)
			}
			now = r.Timestamp
			before := uint64(0)
			for _, h := range r.HashIDs {
				if h > next {
					t.Fatalf("seed %d: request %d: id %d, the next fresh id is %d", seed, i, h, next)
				}
				if p, known := parent[h]; known && p != before {
					t.Fatalf("seed %d: request %d: id %d after %d, earlier after %d", seed, i, h, before, p)
				}
				parent[h] = before
				next = max(next, h+1)
				before = h
			}
		}
	}
}

func TestTokensAreEqualWhereIDsAre(t *testing.T) {
	for _, size := range []int{1, 2, 16, 64, 512} {
		f := BlockTokens / size
		for _, r := range []Request{
			{InputLength: 1300, HashIDs: []uint64{0, 7, 123456}}, // the last block is not full
			{InputLength: 1024, HashIDs: []uint64{5, 6}},
			{InputLength: 5000, HashIDs: []uint64{1}}, // fewer ids than tokens
			{InputLength: 0, HashIDs: []uint64{1}},
			{InputLength: 3},
		} {
			var want []uint32 // the rule of the format, token by token
			for i := range min(r.InputLength, BlockTokens*len(r.HashIDs)) {
				want = append(want, uint32(r.HashIDs[i/BlockTokens])*uint32(f)+uint32(i%BlockTokens/size))
			}
			got := r.PromptTokens([]uint32{9}, size)
			if got[0] != 9 || !equal(got[1:], want) {
				t.Errorf("block size %d, %+v: %d tokens, want %d", size, r, len(got)-1, len(want))
			}
		}
	}
}

func equal(a, b []uint32) bool {
	return len(a) == len(b) && (len(a) == 0 || reflect.DeepEqual(a, b))
}

func TestAnswersAreUnique(t *testing.T) {
	blocks := map[[16]uint32]int{}
	for n := range 3000 {
		a := Request{OutputLength: 64}.OutputTokens(nil, n)
		if !equal(a, Request{OutputLength: 64}.OutputTokens(nil, n)) ||
			!equal(a[:9], Request{OutputLength: 9}.OutputTokens(nil, n)) {
			t.Fatalf("answer %d is not always the same", n)
		}
		for ; len(a) > 0; a = a[16:] {
			b := [16]uint32(a)
			if other, twice := blocks[b]; twice {
				t.Fatalf("answers %d and %d share a block", other, n)
			}
			blocks[b] = n
			for _, token := range b {
				if token < answerBit || token > 1<<31-1 {
					t.Fatalf("answer %d: token %#x", n, token)
				}
			}
		}
	}
	if p := (Request{InputLength: 512, HashIDs: []uint64{1<<64 - 1}}).PromptTokens(nil, 1); p[511] >= answerBit {
		t.Errorf("a prompt's token %#x could be an answer's", p[511])
	}
}

func TestBlockSizes(t *testing.T) {
	for _, b := range []int{1, 16, 512} {
		if err := CheckBlockSize(b); err != nil {
			t.Error(err)
		}
	}
	for _, b := range []int{-16, 0, 3, 1024} {
		if err := CheckBlockSize(b); err == nil || !strings.Contains(err.Error(), fmt.Sprint(b)) {
			t.Errorf("block size %d: %v", b, err)
		}
	}
}

func TestMeasure(t *testing.T) {
	got := Measure([]Request{
		{0, 1100, 10, []uint64{0, 1, 2}, ""},
		{1000, 600, 20, []uint64{0, 3}, ""},
		{3000, 1600, 30, []uint64{0, 1, 4, 5}, ""},    // follows the first request with a partial last block
		{9000, 2000, 40, []uint64{0, 1, 6, 7}, ""},    // an edit of the request before
		{9000, 2500, 40, []uint64{0, 1, 6, 7, 8}, ""}, // at once
	})
	if got.Blocks != 18 || got.Distinct != 9 || got.Reused() != .5 || got.FollowUps != .6 || got.Turns.Max != 4 ||
		got.Single != .5 ||
		got.Extends != 2./3 || got.Pause.Min != 0 || got.Pause.Max != 6 || got.Duration != 9000 ||
		got.Arrivals.Max != 2 || got.Input.Mean != 1560 {
		t.Errorf("%+v", got)
	}
	if empty := Measure(nil); empty != (Shape{}) || empty.Reused() != 0 {
		t.Errorf("of nothing: %+v", empty)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"timestamp": 0, "input_length": 1025, "output_length": 500, "hash_ids": [0, 1, 2]}`))
	f.Add([]byte("{}\n[]\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		reqs, err := Read(bytes.NewReader(text), 0)
		if err != nil {
			if reqs != nil || !strings.HasPrefix(err.Error(), "line ") {
				t.Fatalf("%d requests, %v", len(reqs), err)
			}
			return
		}
		var b bytes.Buffer
		if err := Write(&b, reqs); err != nil {
			t.Fatal(err)
		}
		again, err := Read(&b, 0)
		if err != nil || !reflect.DeepEqual(again, reqs) {
			t.Fatalf("%v after writing: %v", again, err)
		}
	})
}

func BenchmarkGenerate(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		Generate(Options{})
	}
}

func ExampleGenerate() {
	for i, r := range Generate(Options{Seed: 1, Requests: 3}) {
		fmt.Println(i, r.Timestamp, r.InputLength, r.OutputLength, r.HashIDs[:2], len(r.HashIDs))
	}
	// Output:
	// 0 0 964 357 [0 1] 2
	// 1 0 4134 822 [0 2] 9
	// 2 0 18023 250 [0 10] 36
}

func ExampleRequest_PromptTokens() {
	r := Request{InputLength: 520, HashIDs: []uint64{0, 3}}
	tokens := r.PromptTokens(nil, 256)
	fmt.Println(len(tokens), tokens[0], tokens[256], tokens[512])
	// Output: 520 0 1 6
}
