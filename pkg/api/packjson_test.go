package api

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// sameJSON compares encoding by hand with encoding/json.
func sameJSON(t *testing.T, v any) {
	t.Helper()
	got, failed := Marshal(JSON, v)
	want, err := json.Marshal(v)
	if (failed == nil) != (err == nil) || !bytes.Equal(got, want) {
		t.Fatalf("%+v is\n%s, %v\nby reflection\n%s, %v", v, got, failed, want, err)
	}
}

// oddTexts have characters to escape, and plain text.
var oddTexts = []string{"", "plain", "\x7f~/", `"`, `\`, "<b>&", "\u2028\u2029", "\xff\xc3", "\x00\b\f\n\r\t\x1f",
	"wörd 語"}

var oddFloats = []float64{0, math.Copysign(0, -1), 1, -1.5, 1e-6, 9.99e-7, 1e21, 9.99e20, -1e-9, math.MaxFloat64,
	math.SmallestNonzeroFloat64, math.Inf(1), math.NaN()}

func TestJSONAsByReflection(t *testing.T) {
	seeds := uint64(testkit.Rounds(500))
	if testing.Short() {
		seeds = 100
	}
	byHand := 0
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 18))
		a := randomAnswer(rng, seed%10 == 0)
		odd := func() string { return oddTexts[rng.IntN(len(oddTexts))] }
		if rng.IntN(4) == 0 {
			a.Model, a.Reason, a.L3.Reason, a.L3.AgeMS = odd(), Reason(odd()), odd(), oddFloats[rng.IntN(len(oddFloats))]
			a.Blocks = -a.Blocks
			a.Workers = append(a.Workers, Overlap{Instance: events.WorkerID(odd()), Endpoint: odd(), L3Stop: odd()})
		}
		if rng.IntN(16) == 0 {
			a.Partitions = append(a.Partitions, PartitionStatus{Epoch: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)})
		}
		if rng.IntN(4) == 0 {
			a.Tokenization = &Tokenization{Tokenized: rng.IntN(2) == 0, TokenizeError: odd(), PromptTokens: int(wide(rng)),
				TokenIDs: some(rng, 300, func() uint32 { return uint32(wide(rng)) })}
		}
		if _, done := jsonAnswer(a); done {
			byHand++
		}
		sameJSON(t, a)
	}
	if byHand < int(seeds)/2 {
		t.Errorf("%d of %d are encoded by hand", byHand, seeds)
	}
	for _, f := range oddFloats {
		for _, text := range oddTexts {
			sameJSON(t, &Answer{Model: text, L3: L3{AgeMS: f}})
			sameJSON(t, &Selection{Worker: events.WorkerID(text), Policy: text, Cost: f, Candidates: -1})
		}
	}
	sameJSON(t, (*Answer)(nil))
	sameJSON(t, (*Selection)(nil))
}

// FuzzMarshalJSON: the output by hand equals the output of encoding/json.
func FuzzMarshalJSON(f *testing.F) {
	for i, text := range oddTexts {
		f.Add(text, oddFloats[i], int64(i)<<32, int64(i), uint64(i)<<60, i%2 == 0)
	}
	f.Fuzz(func(t *testing.T, text string, float float64, secs, nanos int64, n uint64, is bool) {
		at := time.Unix(secs, nanos).In(time.FixedZone("", int(n%200_000)-100_000))
		ranges := [][2]uint32{{uint32(n), uint32(n >> 32)}, {uint32(nanos), 0}}[:n%3]
		o := Overlap{Instance: events.WorkerID(text), Rank: events.Rank(n), Device: uint32(n), L3Stop: text[:len(text)/2],
			Bound: Bound(text), CatchingUp: is, Guessed: uint32(secs), Within: []uint32{uint32(n), 0, 1}[:n%4],
			Held: uint32(n >> 3), Full: uint32(n >> 5)}
		if is {
			o.Path = &Path{Stop: text}
		}
		a := &Answer{Model: text, BlockSize: uint32(n), Blocks: int(secs), Complete: is, Workers: []Overlap{o, {}}[:n%3],
			Partitions: []PartitionStatus{{1, at, events.StreamSeq(n), uint64(secs), is}, {}}[:n%3], Reason: Reason(text),
			Missing: []events.Partition{events.Partition(n), 7}[:n%3],
			L3:      L3{Status: L3Status(text), Reason: text, Ranges: ranges, Unknown: ranges, AgeMS: float}}
		if n%5 == 0 {
			a.Workers, a.Partitions, a.ByEndpoint = nil, nil, map[string][]Overlap{text: {o}}
			a.Tokenization = &Tokenization{Tokenized: is, TokenizeError: text, PromptTokens: int(nanos),
				TokenIDs: Tokens{uint32(n), 0}[:n%3], UnsupportedFields: []string{text, text}[:n%3]}
		}
		sameJSON(t, a)
		sameJSON(t, &Selection{Model: text, Worker: events.WorkerID(text), RequestID: text, Endpoint: text, Policy: text,
			Booked: is, Cost: float, Probability: -float, EffectiveOverlap: float / 3, CachedTokens: n, Blocks: int(secs),
			Rank: events.Rank(n), Guessed: uint32(nanos), ISLTokens: n, Complete: is})
	})
}

// TestAllocations: usual requests and replies have the least number of allocations: the reply, and for a request the
// lists, their elements, and the shared state of the steps.
func TestAllocations(t *testing.T) {
	q, a := benchmarked()
	q.Partitions = nil
	s := &Selection{Model: "llama", Worker: "worker-1", Policy: "dynamo", Cost: 812.5}
	negative := &Query{Model: "m"}
	tokens := &Query{Model: "m"}
	for i := range uint64(767) {
		negative.Hashes = append(negative.Hashes, i*0x9E3779B97F4A7C15)
		tokens.Tokens = append(tokens.Tokens, uint32(i*7919))
	}
	signed := []int64{}
	for _, h := range negative.Hashes {
		signed = append(signed, int64(h))
	}
	text, err := json.Marshal(map[string]any{"model": "m", "hashes": signed})
	if err != nil {
		t.Fatal(err)
	}
	e := &echo{}
	h := Handler{Indexer: e}
	handle := func(form string, body []byte) func() error {
		return func() error {
			_, failure := h.Handle(context.Background(), ops.Find, form, body)
			if failure != nil {
				return failure
			}
			return nil
		}
	}
	marshalled := func(form string, v any) []byte {
		body, err := Marshal(form, v)
		if err != nil {
			t.Fatal(err)
		}
		return body
	}
	for _, c := range []struct {
		name string
		most float64
		do   func() error
	}{
		{"an answer in JSON", 1, func() error { _, err := Marshal(JSON, a); return err }},
		{"an answer in MessagePack", 1, func() error { _, err := Marshal(MsgPack, a); return err }},
		{"a choice in JSON", 1, func() error { _, err := Marshal(JSON, s); return err }},
		{"a query in MessagePack", 1, func() error { _, err := Marshal(MsgPack, q); return err }},
		{"hashes in JSON, answered", 12, handle(JSON, marshalled(JSON, q))},
		{"negative hashes in JSON, answered", 12, handle(JSON, text)},
		{"tokens in JSON, answered", 12, handle(JSON, marshalled(JSON, tokens))},
	} {
		if err := c.do(); err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		n := testing.AllocsPerRun(100, func() { _ = c.do() })
		t.Log(c.name, n)
		if n > c.most {
			t.Errorf("%s: %v allocations, more than %v", c.name, n, c.most)
		}
	}
	if _, failure := h.Handle(context.Background(), ops.Find, JSON, text); failure != nil ||
		!reflect.DeepEqual(e.last.Hashes, negative.Hashes) {
		t.Errorf("signed hashes have wrong values: %v", failure)
	}
}

// TestSignedHashes: negative numbers anywhere in a list are read as by [strconv.ParseInt].
func TestSignedHashes(t *testing.T) {
	rng := rand.New(rand.NewPCG(18, 3))
	words := []string{"-0", "-1", "-9", "-01", "-00", "-", "--1", "- 1", "-1.0", "-1e3", "-9223372036854775808",
		"-9223372036854775809", "-18446744073709551615", "-18446744073709551616", "-99999999999999999999999"}
	for range 200 {
		words = append(words, "-"+strconv.FormatUint(wide(rng), 10))
	}
	for _, word := range words {
		want, err := strconv.ParseInt(word, 10, 64)
		good := err == nil && (word == "-0" || word[1] != '0')
		for _, list := range []string{"[%s]", "[%s,1]", "[1, %s ]", "[%s,18446744073709551615,18446744073709551615]"} {
			h, err := ReadHashes("hashes", []byte(strings.ReplaceAll(list, "%s", word)))
			if (err == nil) != good || good && !slices.Contains(h, uint64(want)) {
				t.Errorf("%s in %s: %d, %v", word, list, h, err)
			}
		}
		if v, err := ReadTokens("tokens", []byte("["+word+"]")); err == nil && (word != "-0" || v[0] != 0) {
			t.Errorf("%s is read as the token %d", word, v)
		}
	}
}
