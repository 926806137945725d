package events

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// GroupSpec is what is known of a KV-cache group apart from its events.
type GroupSpec struct {
	Kind   Attention
	Window uint32 // tokens: the window of a sliding group, the chunk of a chunked one; else 0

	// Drops says that the engine computes the last block of what the group finds anew, since a draft model (EAGLE, MTP)
	// needs the state before it: a prefix takes one block more than it is long. An engine whose hashes read ahead drops
	// nothing.
	Drops bool
}

// The names of kinds of attention in the text form of groups.
var groupNames = []struct {
	name string
	kind Attention
}{{"full", AttentionFull}, {"mla", AttentionMLA}, {"swa", AttentionSlidingWindow}, {"chunked",
	AttentionChunkedLocal}, {"mamba", AttentionMamba}}

// ParseGroups reads what an engine's KV-cache groups serve, in the order of their numbers: full, mla, swa:TOKENS,
// chunked:TOKENS or mamba, each with :eagle behind it if its last block is dropped for a draft model, with commas
// between them.
func ParseGroups(text string) (list []GroupSpec, err error) {
	for part := range strings.SplitSeq(text, ",") {
		words := strings.Split(strings.TrimSpace(part), ":")
		at := slices.IndexFunc(groupNames, func(n struct {
			name string
			kind Attention
		}) bool {
			return n.name == words[0]
		})
		if at < 0 {
			return nil, fmt.Errorf(
				"events: group %q: want full, mla, swa:TOKENS, chunked:TOKENS or mamba, with :eagle behind it if need be", part)
		}
		g := GroupSpec{Kind: groupNames[at].kind}
		words = words[1:]
		if n := len(words); n > 0 && words[n-1] == "eagle" {
			g.Drops, words = true, words[:n-1]
		}
		if g.Kind.Windowed() {
			if len(words) == 0 {
				return nil, fmt.Errorf("events: group %q: its tokens are missing, as in %s:1024", part,
					groupNames[at].name)
			}
			tokens, err := strconv.ParseUint(words[0], 10, 31)
			if err != nil || tokens == 0 {
				return nil, fmt.Errorf("events: group %q: %q is no number of tokens", part, words[0])
			}
			g.Window, words = uint32(tokens), words[1:]
		}
		if len(words) > 0 {
			return nil, fmt.Errorf("events: group %q: %q is too much", part, strings.Join(words, ":"))
		}
		list = append(list, g)
	}
	return list, nil
}

// complete adds what the configuration knows of an event's group and the event leaves open. A window is one of this
// decoder's blocks: in a group whose blocks have another size, or one that is not said, it means nothing that could be
// counted.
func (d *Decoder) complete(e *rawEvent) {
	if int64(e.group) < int64(len(d.groups)) {
		g := &d.groups[e.group]
		if e.attention == AttentionUnknown {
			e.attention = g.Kind
		}
		if e.window == 0 {
			e.window = g.Window
		}
		e.drops = g.Drops
	}
	if !e.attention.Windowed() || e.blockSize != d.block {
		e.window = 0
	}
	silent := d.engine == SGLang && slices.ContainsFunc(d.groups, func(g GroupSpec) bool { return g.Kind.Bounds() })
	if e.attention.Main() && (silent || d.sizes.otherMains()) {
		e.window = unannounced
	}
}

// unannounced is the window in events of a main group if what the rank's others hold is not known: SGLang says when
// its full attention's blocks come and go, but not when a window or a state does; and main groups with blocks of
// another size than the decoder's are passed over.
const unannounced = 1
