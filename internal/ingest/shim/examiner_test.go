package shim

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/vmihailenco/msgpack/v5"
)

// TestExaminerReportsBlockSizes checks that Unusable is called at the end of a message: once at the first block of
// another size, and once at the end of such blocks.
func TestExaminerReportsBlockSizes(t *testing.T) {
	decoder, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	var said []string
	x := &Examiner{Decoder: decoder, Found: func(events.Engine, string) {}, Unusable: func(err error, size uint32) {
		wrong, is := errors.AsType[*events.BlockSizeError](err)
		if is != (size > 0) || is && wrong.Got != size {
			t.Errorf("%v with size %d", err, size)
		}
		said = append(said, fmt.Sprint(size))
	}}
	for i, c := range []struct {
		sizes []int // of the message's blocks; nil: a new engine
		want  []string
	}{
		{[]int{8, 4}, nil}, // a second main group
		{[]int{8, 8}, nil},
		{nil, nil},
		{[]int{1}, nil}, // a tail
		{[]int{8}, []string{"8"}},
		{[]int{8, 16}, nil},
		{[]int{8, 4}, []string{"0"}},
		{[]int{8}, nil},
		{nil, nil},
		{[]int{16}, []string{"16"}},
		{nil, []string{"0"}},
		{[]int{4}, nil},
	} {
		said = nil
		if c.sizes == nil {
			x.Reset()
		} else {
			x.read(t, blocksOf(t, c.sizes))
		}
		if !slices.Equal(said, c.want) {
			t.Errorf("step %d: %q, want %q", i, said, c.want)
		}
	}

	// The right size may come with the last part of a message.
	x.Reset()
	said = nil
	sizes := append(append([]int{8}, make([]int, 10_000)...), 4)
	if parts := x.read(t, blocksOf(t, sizes)); parts < 2 || len(said) > 0 {
		t.Errorf("%d parts: %q", parts, said)
	}
}

// TestExaminerFollowsItsRank: an engine's events count if it names a single rank. The first message of the shim's rank
// ends the credit of another rank. Another rank's events are skipped until a new engine names that rank alone.
func TestExaminerFollowsItsRank(t *testing.T) {
	decoder, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	var said []string
	x := &Examiner{Decoder: decoder, Found: func(events.Engine, string) {}, Unusable: func(error, uint32) {}, Rank: 1,
		OtherRank: func(rank events.Rank, skipped bool) { said = append(said, fmt.Sprint(rank, " ", skipped)) }}
	for i, c := range []struct {
		rank    int // of the message; -1: a new engine
		cleared bool
		stored  int
		want    string
	}{
		{2, false, 1, "2 false"}, {2, false, 1, ""}, // the operator configured the shim for this engine
		{1, true, 1, ""}, {1, false, 1, ""}, // both ranks publish here
		{2, false, 0, "2 true"}, {1, false, 1, ""},
		{-1, false, 0, ""},
		{2, false, 1, "2 false"},
	} {
		said = nil
		var msg events.Message
		if c.rank < 0 {
			x.Reset()
		} else if msg, _, err = x.Begin(messageOf(t, []int{4}, c.rank)); err != nil {
			t.Fatal(err)
		}
		cleared, stored := false, 0
		for _, e := range msg.Events {
			cleared = cleared || e.Kind == events.Cleared
			stored += len(e.Blocks)
		}
		if got := strings.Join(said, ", "); cleared != c.cleared || stored != c.stored || got != c.want {
			t.Errorf("step %d: cleared %t, %d blocks, reports %q", i, cleared, stored, got)
		}
	}
}

func (x *Examiner) read(t *testing.T, payload []byte) (parts int) {
	t.Helper()
	_, more, err := x.Begin(payload)
	for parts = 1; more; parts++ {
		_, more = x.Continue()
	}
	if err != nil {
		t.Fatal(err)
	}
	return parts
}

// blocksOf returns a message that stores a block of every size in a separate group. Size 0 removes the block.
func blocksOf(t *testing.T, sizes []int) []byte {
	t.Helper()
	return messageOf(t, sizes, 0)
}

// messageOf is blocksOf for a message that names a rank.
func messageOf(t *testing.T, sizes []int, rank int) []byte {
	t.Helper()
	var list []any
	for i, size := range sizes {
		event := map[string]any{"type": "BlockStored", "block_hashes": []int{i + 1}, "token_ids": make([]int, size),
			"block_size": size, "group_idx": i, "medium": "GPU"}
		if size == 0 {
			event["type"] = "BlockRemoved"
		}
		list = append(list, event)
	}
	payload, err := msgpack.Marshal([]any{1.5, list, rank})
	if err != nil {
		t.Fatal(err)
	}
	return payload
}
