package events

import "testing"

// TestOtherBlockSizes: a diagnosis begins if no device block has the right size, and ends with the first such block.
// Blocks of another size are counted, and blocks of the right size are decoded, in any order.
func TestOtherBlockSizes(t *testing.T) {
	const main, state = "full_attention", "mamba"
	type announcement struct {
		kind      string
		group     int
		size      int // tokens in a block; 0: not announced
		first, n  int // the first block and the number of blocks of this size
		medium    string
		diagnosed bool // after the event
	}
	right := announcement{kind: main, size: 4, n: 2}
	for name, c := range map[string]struct {
		says    []announcement
		skipped SkipCounts
	}{
		"tail first": {[]announcement{
			{kind: main, size: 1, first: 1, n: 1}, {kind: state, group: 1, size: 1, first: 1, n: 1}, right,
		}, SkipCounts{skipPartialBlock: 1, skipGroupTokens: 1}},
		"tails of several prompts first": {[]announcement{
			{kind: main, size: 1, n: 3}, {kind: main, size: 1, first: 5, n: 3}, {kind: main, size: 1, first: 13, n: 2}, right,
		}, SkipCounts{skipPartialBlock: 3}},
		"tail last": {[]announcement{
			right, {kind: main, size: 1, first: 8, n: 3},
		}, SkipCounts{skipPartialBlock: 1}},
		"a whole block in smaller ones first": {[]announcement{
			{kind: main, size: 1, n: 3}, {kind: main, size: 1, first: 3, n: 1, diagnosed: true}, right,
		}, SkipCounts{skipPartialBlock: 1, SkipBlockSize: 1}},
		"a larger block first": {[]announcement{
			{kind: main, size: 8, n: 1, diagnosed: true}, right,
		}, SkipCounts{SkipBlockSize: 1}},
		"larger blocks last": {[]announcement{
			right, {kind: main, size: 8, n: 1}, {kind: main, size: 8, n: 1},
		}, SkipCounts{SkipBlockSize: 2}},
		"a second main group first": {[]announcement{
			{kind: main, group: 1, size: 8, n: 1, diagnosed: true}, right, {kind: main, group: 1, size: 8, n: 1}, right,
		}, SkipCounts{SkipBlockSize: 2}},
		"second main groups last": {[]announcement{
			right, {kind: main, group: 1, size: 2, n: 2}, right, {kind: main, group: 2, size: 8, n: 1},
		}, SkipCounts{SkipBlockSize: 2}},
		"no size first": {[]announcement{{kind: main, n: 1, diagnosed: true}, right}, SkipCounts{SkipBlockSize: 1}},
		"no size last":  {[]announcement{right, {kind: main, n: 1}}, SkipCounts{SkipBlockSize: 1}},
		"other units in host memory": {[]announcement{
			{kind: main, size: 6, n: 1, medium: "CPU"}, right, {kind: main, size: 6, n: 1, medium: "CPU"},
			{kind: main, size: 2, n: 1, medium: "CPU"},
		}, SkipCounts{SkipCopySize: 2, skipPartialBlock: 1}},
		"only a state group has the size": {[]announcement{
			{kind: state, group: 1, size: 4, n: 1}, {kind: main, size: 8, n: 1, diagnosed: true}, right,
		}, SkipCounts{SkipBlockSize: 1}},
	} {
		d := mustDecoder(t, VLLM, 4)
		for i, s := range c.says {
			blocks, parent := []any{}, any(nil)
			for b := range s.n {
				blocks = append(blocks, 100*s.group+s.first+b+1)
			}
			if s.first > 0 {
				parent = 100*s.group + s.first
			}
			size, medium := s.size, s.medium
			if size == 0 {
				size = 4
			}
			if medium == "" {
				medium = "GPU"
			}
			m, err := d.Decode(message(t, store(blocks, parent, count(uint32(s.first*size), uint32(s.n*size)),
				pair{"block_size", s.size}, pair{"group_idx", s.group}, pair{"kv_cache_spec_kind", s.kind},
				pair{"medium", medium})))
			if err != nil || (len(m.Events) > 0) != (s.size == 4 || s.kind == state) {
				t.Errorf("%s: message %d: %+v, %v", name, i, m, err)
			}
			if (d.Diagnosis() != nil) != s.diagnosed {
				t.Errorf("%s: after message %d: %v", name, i, d.Diagnosis())
			}
		}
		if d.Counts() != c.skipped {
			t.Errorf("%s: skipped %v, want %v", name, d.Counts(), c.skipped)
		}
		if d.Reset(); d.Diagnosis() != nil {
			t.Errorf("%s: a new engine: %v", name, d.Diagnosis())
		}
	}
}
