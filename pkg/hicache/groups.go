package hicache

import (
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// GroupSpecs is what a configuration says of the worker's own KV-cache groups, by number, for an engine whose blocks
// have a size in tokens; nil if it says nothing. c must have passed Check.
func (c *Config) GroupSpecs(blockSize uint32) (list []events.GroupSpec) {
	if c.VLLM == nil {
		return nil
	}
	flagged := slices.ContainsFunc(c.VLLM.Groups, func(g Group) bool { return g.Eagle })
	for _, g := range c.VLLM.Groups {
		spec := events.GroupSpec{
			Kind: map[Kind]events.Attention{Full: events.AttentionFull, Sliding: events.AttentionSlidingWindow,
				ChunkedLocal: events.AttentionChunkedLocal, Mamba: events.AttentionMamba}[g.Kind],
			// hashes that read ahead drop nothing
			Drops: (g.Eagle || c.VLLM.UseEagle && !flagged) && c.VLLM.HashLookahead == 0,
		}
		if uint32(g.BlockSize) == blockSize { // a window of other blocks means nothing in the index
			spec.Window = uint32(g.Window)
		}
		list = append(list, spec)
	}
	return list
}
