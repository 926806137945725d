package hicache

import (
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Observed collects the KV-cache groups of vLLM from its events, for a configuration that leaves them open. It is for
// one goroutine.
//
// Events say the kind and the window of each group whose blocks have the index's size, and [events.DecoderConfig] that
// a group drops its last block for a draft model. They do not say that a group has blocks of another size, or how many
// groups there are: those that were announced so far count, so that a prefix can be too long until each group has
// announced a block.
type Observed struct {
	groups []Group // by number; the kind of those that were not announced is empty
}

// kindOf is the kind of a group as the coordinator tells them apart, and whether every TP rank has the same bytes.
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

// Add takes an event, and reports whether it says more of the groups.
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

// Open reports whether a configuration leaves the KV-cache groups to be learned. It does not pass Check until
// [Config.WithGroups] has filled them in.
func (c *Config) Open() bool { return c.VLLM != nil && len(c.VLLM.Groups) == 0 }

// WithGroups is an open configuration with groups whose blocks have a size in tokens, which is the size of hashes and
// of the scheduler's blocks too unless the configuration says otherwise.
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

// Config is an open configuration with the groups that were observed; false if those do not yet make one that passes
// Check, as one between them was not announced.
func (o *Observed) Config(c *Config, blockSize uint32) (Config, bool) {
	learned := c.WithGroups(o.groups, blockSize)
	return learned, len(o.groups) > 0 && learned.Check() == nil
}
