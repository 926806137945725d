package source

import (
	"strings"
	"testing"
	"unicode"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestParseTopic: valid and invalid topics in the form of llm-d and KServe.
func TestParseTopic(t *testing.T) {
	for text, want := range map[string]struct {
		topicName
		address string
	}{
		"kv@10.0.0.1:8000@org/m":           {topicName{"10.0.0.1:8000", "org/m"}, "10.0.0.1:8000"},
		"kv@10.0.0.1@m":                    {topicName{"10.0.0.1", "m"}, ""},
		"kv@pod-7@m":                       {topicName{"pod-7", "m"}, ""},
		"kv@[fd00::1]:8000@m":              {topicName{"[fd00::1]:8000", "m"}, "[fd00::1]:8000"},
		"kv@fd00::1@m":                     {topicName{"fd00::1", "m"}, ""},
		"kv@10.0.0.1:8000@m@rev@2":         {topicName{"10.0.0.1:8000", "m@rev@2"}, "10.0.0.1:8000"},
		"kv@10.0.0.1:8000":                 {topicName{"10.0.0.1:8000", ""}, "10.0.0.1:8000"},
		"kv@host/x:80@m":                   {topicName{"host/x:80", "m"}, ""},
		"kv@host:http@m":                   {topicName{"host:http", "m"}, ""},
		"kv@模型 a:1@模型":                     {topicName{"模型 a:1", "模型"}, ""},
		"kv@a@" + strings.Repeat("m", 255): {topicName{"a", strings.Repeat("m", 255)}, ""},
	} {
		got, ok := parseTopic(text)
		address, _ := got.Address()
		if !ok || got != want.topicName || address != want.address {
			t.Errorf("%q: %+v, %v, %q", text, got, ok, address)
		}
	}
	for _, text := range []string{"", "kv", "kv@", "kv@@m", "kv@a@", "kv-events", "KV@a@m", "a@kv@b", "kv@a\n@m",
		"kv@a@m\x00", "kv@\xff@m", "kv@\u202ea@m", "kv@" + strings.Repeat("a", 256) + "@m",
		"kv@a@" + strings.Repeat("m", 256)} {
		if got, ok := parseTopic(text); ok {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

// TestPayloadBlockSize: the result is the size of the blocks, or 0 without blocks.
func TestPayloadBlockSize(t *testing.T) {
	message := func(event ...any) []byte {
		b, err := msgpack.Marshal([]any{1.5, []any{event}, 0})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	tokens := make([]uint32, 64)
	for _, c := range []struct {
		payload []byte
		want    uint32
	}{
		{message("BlockStored", []uint64{1, 2}, nil, tokens, 32, nil, "GPU"), 32},
		{message("BlockStored", []uint64{1}, nil, tokens[:1], 1, nil, "GPU"), 1},
		{message("BlockStored", []uint64{1}, nil, make([]uint32, events.MaxBlockSize), events.MaxBlockSize, nil, "GPU"),
			events.MaxBlockSize},
		{message("BlockStored", []uint64{1}, nil, tokens, 0, nil, "GPU"), 0},
		{message("BlockRemoved", []uint64{1}, "GPU"), 0},
		{message("AllBlocksCleared"), 0},
		{[]byte{0xc1}, 0},
	} {
		if got := payloadBlockSize(c.payload); got != c.want {
			t.Errorf("%x: %d, want %d", c.payload, got, c.want)
		}
	}
}

func FuzzTopic(f *testing.F) {
	for _, s := range []string{"kv@10.0.0.1:8000@org/m", "kv@[::1]:1@m@2", "kv@a", "kv@@", "kv@\xff@m", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, ok := parseTopic(text)
		if !ok {
			if got != (topicName{}) {
				t.Fatalf("refused, and %+v", got)
			}
			return
		}
		again := "kv@" + string(got.Worker)
		if got.Model != "" {
			again += "@" + got.Model
		}
		if again != text || got.Worker == "" || len(got.Worker) > 255 || len(got.Model) > 255 ||
			strings.Contains(string(got.Worker), "@") || strings.ContainsFunc(text, unicode.IsControl) {
			t.Fatalf("%q: %+v", text, got)
		}
		// llm-d splits at each '@' and accepts three parts.
		if parts := strings.Split(text, "@"); len(parts) == 3 && (parts[1] != string(got.Worker) || parts[2] != got.Model) {
			t.Fatalf("llm-d reads %q as %q, we as %+v", text, parts, got)
		}
	})
}

// FuzzPayloadRank: the rank equals the decoder's rank for every readable message.
func FuzzPayloadRank(f *testing.F) {
	for _, s := range []string{"\x93\xcb\x00\x00\x00\x00\x00\x00\x00\x00\x90\x03", "\x92\x00\x90",
		"\x94\x00\x90\xcd\x01\x00\xc0",
		"\x83\xa2ts\x00\xa6events\x90\xb2data_parallel_rank\x05", "\x82\xacattn_dp_rank\x01\xa6events\x90",
		"\x93\x00\x90\xc0",
		"\xc1", ""} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		d, err := events.NewDecoder(events.DecoderConfig{Engine: events.AnyEngine, BlockSize: 16})
		if err != nil {
			t.Fatal(err)
		}
		m, err := d.Decode(payload)
		rank, ok := payloadRank(payload)
		payloadBlockSize(payload)
		if err == nil && (ok != m.HasRank || ok && rank != m.Rank) {
			t.Fatalf("rank %d, %v; the decoder reads %d, %v", rank, ok, m.Rank, m.HasRank)
		}
	})
}
