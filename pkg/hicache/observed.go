package hicache

import (
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Observed collects the KV-cache groups of vLLM from events, for a configuration without groups. It belongs to a single
// goroutine.
//
// Events have the kind and the window of each group whose blocks have the index's size. With [events.DecoderConfig],
// they also have the flag that a group drops the last block for a draft model. Events do not show groups with other
// block sizes, or the number of groups. Only the announced groups count, so a prefix may be too long until each group
// has announced a block.
type Observed struct {
	groups []Group // by number; unannounced groups have an empty kind
}

// kindOf returns the kind of a group for the coordinator, and whether all TP ranks have the same bytes.
func kindOf(a events.Attention) (kind Kind, mla bool) {
	switch a {
	case events.AttentionFull, events.AttentionSinkFull:
		return Full, false
	case events.AttentionMLA:
		return Full, true
	case events.AttentionSlidingWindow:
		return Sliding, false
	case events.AttentionSlidingMLA:
		return Sliding, true
	case events.AttentionChunkedLocal:
		return ChunkedLocal, false
	case events.AttentionMamba:
		return Mamba, false
	}
	return "", false
}

// Add processes an event. It returns true if the event changes the groups.
func (o *Observed) Add(e *events.Event) (more bool) {
	kind, mla := kindOf(e.Attention)
	windowed := kind == Sliding || kind == ChunkedLocal
	if e.Kind != events.Stored || kind == "" || int(e.Group) >= maxGroups || windowed && e.Window == 0 {
		return false
	}
	g := Group{Kind: kind, MLA: mla, Eagle: e.Drops}
	if windowed {
		g.Window = int(min(e.Window, maxBlockSize))
	}
	for int(e.Group) >= len(o.groups) {
		o.groups = append(o.groups, Group{})
	}
	if o.groups[e.Group] == g {
		return false
	}
	o.groups[e.Group] = g
	return true
}

// Open reports whether a configuration has no KV-cache groups yet. An open configuration does not pass Check before
// [Config.WithGroups].
func (c *Config) Open() bool { return c.VLLM != nil && len(c.VLLM.Groups) == 0 }

// WithGroups returns an open configuration with the groups. blockSize is the size of the groups' blocks in tokens, and
// the default size of hashes and of the scheduler's blocks.
func (c Config) WithGroups(groups []Group, blockSize uint32) Config {
	v := *c.VLLM
	v.Groups = slices.Clone(groups)
	for i := range v.Groups {
		v.Groups[i].BlockSize = int(blockSize)
	}
	for _, size := range []*int{&v.HashBlockSize, &v.SchedulerBlockSize} {
		if *size == 0 {
			*size = int(blockSize)
		}
	}
	c.VLLM = &v
	return c
}

// Config returns an open configuration with the observed groups. It returns false if the result does not pass Check,
// because a group between others is unannounced.
func (o *Observed) Config(c *Config, blockSize uint32) (Config, bool) {
	learned := c.WithGroups(o.groups, blockSize)
	return learned, len(o.groups) > 0 && learned.Check() == nil
}
