package trace

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// TestImport reads a small file of each format, with and without the format's name.
func TestImport(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("word ", 1000) // 5,000 bytes: 1,250 assumed tokens, 3 ids
	for _, c := range []struct {
		format  Format
		file    string
		tokens  int
		untimed bool
		want    string
	}{
		{Mooncake, `{"timestamp": 500, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
{"timestamp": 700, "input_length": 600, "output_length": 3, "hash_ids": [0, 2], "session_id": "s"}`, 512, false,
			"[{0 600 3 [0 1] } {200 600 3 [0 2] s}]"},
		{VLLMTimed, `{"timestamp": 61.114, "input_length": 20, "output_length": 5, "hash_ids": [7, 8]}
{"timestamp": 61.5, "input_length": 18, "output_length": 6, "hash_ids": [7, 9]}`, 16, false,
			"[{0 20 5 [7 8] } {386 18 6 [7 9] }]"},
		{VLLMTimed, `{"chat_id": 159, "parent_chat_id": -1, "timestamp": 1, "input_length": 20, "output_length": 5, "type": "text", "turn": 1, "hash_ids": [7, 8]}
{"chat_id": 160, "parent_chat_id": 159, "timestamp": 2.5, "input_length": 40, "output_length": 6, "hash_ids": [7, 8, 9]}
{"chat_id": 161, "parent_chat_id": -1, "timestamp": 2, "input_length": 1, "output_length": 6, "hash_ids": [3]}`, 16, false,
			"[{0 20 5 [7 8] 159} {1000 1 6 [3] 161} {1500 40 6 [7 8 9] 159}]"},
		{VLLMCustom, fmt.Sprintf(`{"prompt": "Name the capital of India now", "output_tokens": 10}

{"prompt": %q, "output_tokens": 1520}
{"prompt": %q}`, long+"a", long+"b"), 512, true,
			"[{0 8 10 [0] } {1000 1251 1520 [1 2 3] } {2000 1251 0 [1 2 4] }]"},
		{ShareGPT, `[{"id": "a", "conversations": [{"from": "human", "value": "hello"}]},
{"id": "b", "conversations": [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "hi"}, {"from": "human", "value": "x"}]},
{"id": "c", "conversations": ["{\"from\": \"human\", \"value\": \"hello there\"}", {"from": "gpt", "value": "good day"}]}]`,
			512, true, "[{0 3 1 [0] } {1000 3 2 [0] }]"},
		{Azure, `TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,1025,109
2024-05-10 00:00:00.009930+00:00,5,6`, 512, false,
			"[{0 374 44 [0] } {4315 1025 109 [1 2 3] } {15140653329 5 6 [4] }]"},
		{Weka, `{"id": "x", "models": ["m"], "block_size": 64, "requests": [
  {"t": 1.5, "type": "n", "model": "m", "in": 100, "out": 7, "hash_ids": [1, 2]},
  {"t": 2.0, "type": "subagent", "agent_id": "g", "subagent_type": "k", "requests": [
    {"t": 0.25, "type": "n", "model": "m", "in": 64, "out": 2, "hash_ids": [9]},
    {"t": 3.0, "type": "n", "model": "m", "in": 64, "out": 3, "hash_ids": [1]}]}]}
{"id": "y", "models": ["m"], "block_size": 64, "requests": [{"t": 0, "type": "s", "model": "m", "in": 64, "out": 1, "hash_ids": [1], "ttft": 0.1}]}`,
			64, false, "[{0 64 1 [3] y} {1500 100 7 [0 1] x} {2250 64 2 [2] x} {3000 64 3 [0] x}]"},
	} {
		for _, format := range []Format{"", c.format} {
			got, err := Import(strings.NewReader(c.file), format, 0)
			if err != nil {
				t.Errorf("%s (given %q): %v", c.format, format, err)
				continue
			}
			if text := fmt.Sprint(got.Requests); text != c.want || got.Tokens != c.tokens || got.Untimed != c.untimed ||
				got.Format != c.format {
				t.Errorf("%s (given %q): %s, %d tokens, untimed %v, format %s", c.format, format, text, got.Tokens, got.Untimed,
					got.Format)
			}
			some, err := Import(strings.NewReader(c.file), format, 1)
			if err != nil || len(some.Requests) != 1 {
				t.Errorf("%s, one request: %v, %v", c.format, some, err)
			}
		}
	}
}

// TestFractions: a Mooncake trace may have fractions of a millisecond if its format is given.
func TestFractions(t *testing.T) {
	t.Parallel()
	const file = `{"timestamp": 59.25, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
{"timestamp": 159.75, "input_length": 600, "output_length": 3, "hash_ids": [0, 2]}`
	got, err := Import(strings.NewReader(file), Mooncake, 0)
	if err != nil || fmt.Sprint(got.Requests) != "[{0 600 3 [0 1] } {101 600 3 [0 2] }]" {
		t.Fatalf("%+v, %v", got, err)
	}
	if err := got.CheckTokens(got.Tokens); err != nil {
		t.Error(err)
	}
	got, err = Import(strings.NewReader(file), "", 0)
	if err != nil || got.Format != VLLMTimed {
		t.Fatalf("%+v, %v", got, err)
	}
	if err := got.CheckTokens(got.Tokens); err == nil || !strings.Contains(err.Error(), "--trace-format") {
		t.Errorf("two ids for 600 tokens pass for ids of 16 tokens: %v", err)
	}
}

// TestCheckTokens: ids of another size than expected are an error with the size that fits.
func TestCheckTokens(t *testing.T) {
	t.Parallel()
	trace := &Imported{Format: Mooncake}
	for n := range 100 {
		length := 1000 + 37*n
		trace.Requests = append(trace.Requests, Request{InputLength: length, HashIDs: make([]uint64, (length+63)/64)})
	}
	trace.Requests = append(trace.Requests, Request{InputLength: 9000}, // without ids
		Request{InputLength: 650, HashIDs: make([]uint64, 10)}) // without an id for the last part
	if err := trace.CheckTokens(64); err != nil {
		t.Error(err)
	}
	for _, tokens := range []int{16, 32, 128, 512} {
		if err := trace.CheckTokens(tokens); err == nil ||
			!strings.Contains(err.Error(), "about 64 tokens: give the number with --block-tokens") {
			t.Errorf("%d tokens: %v", tokens, err)
		}
	}
	short := &Imported{Format: Mooncake}
	for range 10 { // an id of 1,024 tokens
		short.Requests = append(short.Requests, Request{InputLength: 1000, HashIDs: []uint64{1}})
	}
	if err := short.CheckTokens(512); err == nil {
		t.Errorf("ids of 1,024 tokens: %v", err)
	}
}

// TestImportRejects: files with missing fields, other forms and bad numbers are errors that name the place.
func TestImportRejects(t *testing.T) {
	t.Parallel()
	for file, want := range map[string]string{
		"hello": "form of the file", `{"a": 1}`: "form of the file", "[1]": "form of the file",
		`{"timestamp": 1.5, "input_length": 3, "hash_ids": []}`:                                       "line 1",
		`{"timestamp": 1.5, "input_length": -3, "output_length": 1, "hash_ids": []}`:                  "-3",
		"{\"prompt\": \"a\"}\n{\"output_tokens\": 1}":                                                 "line 2",
		`[{"conversations": [{"from": "a"}, {"value": "b"}]}]`:                                        "conversation 0",
		"TIMESTAMP,A,B\n2023-11-16 18:15:46,5,6\n2023-11-16 18:15:46,five,6":                          "row 3",
		`{"id": "x", "block_size": 64, "requests": []} {"id": "y", "block_size": 32, "requests": []}`: "session 1",
		`{"id": "x", "block_size": 64, "requests": [{"t": 1, "in": -5}]}`:                             "session 0",
	} {
		if _, err := Import(strings.NewReader(file), "", 0); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", file, err, want)
		}
	}
	if _, err := Import(strings.NewReader("x,1,2"), "other", 0); err == nil {
		t.Error("an unknown format is read")
	}
}

// FuzzImport: no file breaks the importers, and an imported trace can be written and read again.
func FuzzImport(f *testing.F) {
	f.Add(`{"timestamp": 1.5, "input_length": 3, "output_length": 4, "hash_ids": [1]}`)
	f.Add(`[{"conversations": [{"value": "a"}, {"value": "b"}]}]`)
	f.Add("2023-11-16 18:15:46.6805900,374,44")
	f.Add(`{"id": "x", "block_size": 64, "requests": [{"t": 1, "in": 5}]}`)
	f.Add(`{"prompt": "a", "output_tokens": 1}`)
	f.Fuzz(func(t *testing.T, file string) {
		got, err := Import(strings.NewReader(file), "", 50)
		if err != nil {
			return
		}
		var b strings.Builder
		if err := Write(&b, got.Requests); err != nil {
			t.Fatal(err)
		}
		again, err := Read(strings.NewReader(b.String()), 0)
		if err != nil && !errors.Is(err, ErrFormat) {
			t.Fatal(err)
		}
		same := slices.EqualFunc(again, got.Requests, func(a, b Request) bool {
			return a.InputLength == b.InputLength && a.OutputLength == b.OutputLength && a.Timestamp == b.Timestamp &&
				(len(a.HashIDs) == 0 && len(b.HashIDs) == 0 || reflect.DeepEqual(a.HashIDs, b.HashIDs))
		})
		if err != nil || !same {
			t.Fatalf("%v\n%v\n%v", err, got.Requests, again)
		}
	})
}
