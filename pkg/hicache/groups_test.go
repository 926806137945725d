package hicache

import (
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

func TestGroupSpecs(t *testing.T) {
	layout := []Group{{Kind: Full, BlockSize: 16}, {Kind: Sliding, BlockSize: 16, Window: 128},
		{Kind: ChunkedLocal, BlockSize: 32, Window: 8192}, {Kind: Mamba, BlockSize: 64}}
	want := func(drops ...bool) []events.GroupSpec {
		list := []events.GroupSpec{{Kind: events.AttentionFull}, {Kind: events.AttentionSlidingWindow, Window: 128},
			{Kind: events.AttentionChunkedLocal}, {Kind: events.AttentionMamba}}
		for i := range list {
			list[i].Drops = drops[i]
		}
		return list
	}
	flagged := slices.Clone(layout)
	flagged[1].Eagle = true
	for name, c := range map[string]struct {
		vllm VLLM
		want []events.GroupSpec
	}{
		"no draft model":        {VLLM{Groups: layout}, want(false, false, false, false)},
		"a draft model":         {VLLM{Groups: layout, UseEagle: true}, want(true, true, true, true)},
		"a draft model's group": {VLLM{Groups: flagged, UseEagle: true}, want(false, true, false, false)},
		"hashes that read ahead": {VLLM{Groups: flagged, UseEagle: true, HashLookahead: 1},
			want(false, false, false, false)},
	} {
		if got := (&Config{VLLM: &c.vllm}).GroupSpecs(16); !slices.Equal(got, c.want) {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
	if got := (&Config{SGLang: &SGLang{}}).GroupSpecs(16); got != nil {
		t.Errorf("SGLang: %+v", got)
	}
}
