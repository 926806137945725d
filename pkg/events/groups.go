package events

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// GroupSpec describes a KV-cache group by configuration, beside its events.
type GroupSpec struct {
	Kind   Attention
	Window uint32 // tokens: the window of a sliding group, the chunk of a chunked one; else 0

	// Drops is true if the engine recomputes the last block that the group finds, because a draft model (EAGLE, MTP)
	// needs the state before the block. A prefix of n blocks then needs n+1 blocks. An engine with lookahead in the hashes
	// drops nothing.
	Drops bool
}

// groupNames are the kinds of attention in the text form of groups.
var groupNames = []struct {
	name string
	kind Attention
}{{"full", AttentionFull}, {"mla", AttentionMLA}, {"swa", AttentionSlidingWindow}, {"chunked",
	AttentionChunkedLocal}, {"mamba", AttentionMamba}}

// ParseGroups parses the kinds of an engine's KV-cache groups, separated by commas, in the order of their numbers:
// full, mla, swa:TOKENS, chunked:TOKENS or mamba. The suffix :eagle marks a group that drops the last block for a draft
// model.
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
				"events: group %q: want full, mla, swa:TOKENS, chunked:TOKENS or mamba, optionally followed by :eagle", part)
		}
		g := GroupSpec{Kind: groupNames[at].kind}
		words = words[1:]
		if n := len(words); n > 0 && words[n-1] == "eagle" {
			g.Drops, words = true, words[:n-1]
		}
		if g.Kind.Windowed() {
			if len(words) == 0 {
				return nil, fmt.Errorf("events: group %q: the number of tokens is missing, as in %s:1024", part,
					groupNames[at].name)
			}
			tokens, err := strconv.ParseUint(words[0], 10, 31)
			if err != nil || tokens == 0 {
				return nil, fmt.Errorf("events: group %q: %q is not a number of tokens", part, words[0])
			}
			g.Window, words = uint32(tokens), words[1:]
		}
		if len(words) > 0 {
			return nil, fmt.Errorf("events: group %q: unexpected %q at the end", part, strings.Join(words, ":"))
		}
		list = append(list, g)
	}
	return list, nil
}

// complete adds the configuration of an event's group where the event has none. A window counts in blocks of this
// decoder, so it is removed if the group's blocks have another or an unknown size.
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

// unannounced is the window in events of a main group if the holdings of the rank's other groups are unknown. SGLang
// announces only the blocks of full attention, not those of windows and states. Main groups with blocks of another
// size than the decoder's are skipped.
const unannounced = 1
