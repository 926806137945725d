package tables

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"sort"
	"strings"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// namesInCell limits the names in a cell of the table of blocks.
const namesInCell = 6

// explanation prints a line for each run of blocks with the same holders, and the
// reason for the end of each worker's prefix.
func explanation(w io.Writer, a *api.Answer) {
	tiers := []string{"device", "host", "disk", "external"}
	cuts := map[uint32]bool{0: true, uint32(a.Blocks): true}
	cut := func(from, to uint32) { cuts[from], cuts[to] = true, true }
	for i := range a.Workers {
		if p := a.Workers[i].Path; p != nil {
			for _, r := range p.Held {
				cut(r.From, r.To)
			}
		}
	}
	for _, list := range [][][2]uint32{a.L3.Ranges, a.L3.Unknown} {
		for _, r := range list {
			cut(r[0], r[1])
		}
	}
	within := func(list [][2]uint32, block uint32) bool {
		return slices.ContainsFunc(list, func(r [2]uint32) bool { return r[0] <= block && block < r[1] })
	}
	ends := slices.Sorted(maps.Keys(cuts))
	var rows [][]any
	for i := range len(ends) - 1 {
		from := ends[i]
		if from >= uint32(a.Blocks) {
			break
		}
		row := []any{fmt.Sprintf("[%d,%d)", from, ends[i+1])}
		for _, tier := range tiers {
			row = append(row, holders(a, from, tier))
		}
		store := "no"
		switch known := a.L3.Status == api.L3OK || a.L3.Status == api.L3Partial; {
		case within(a.L3.Ranges, from):
			store = "yes"
		case a.L3.Status == api.L3NotConfigured:
			store = "-"
		case !known || within(a.L3.Unknown, from):
			store = "?"
		}
		rows = append(rows, append(row, store))
	}
	cli.Fprintln(w)
	BlocksColumns.Table(w, rows)
	cli.Fprintln(w)
	rows = nil
	unexplained := 0
	for i := range a.Workers {
		o := &a.Workers[i]
		if o.Path == nil {
			if o.Guessed == 0 {
				unexplained++
			}
			continue
		}
		rows = append(rows, []any{name(o), o.Total(), whyStopped(o), o.L3, whyNoMore(o, a)})
	}
	StopsColumns.Table(w, rows)
	for i := range a.Workers {
		if o := &a.Workers[i]; o.Guessed > 0 {
			cli.Fprintf(w, "%s probably holds %d blocks on the device, because of the requests sent to the worker\n", name(o),
				o.Guessed)
		}
	}
	if unexplained > 0 {
		cli.Fprintf(w, "%d more ranks are not explained; name some with --worker\n", unexplained)
	}
}

func name(o *api.Overlap) string { return fmt.Sprintf("%s/%d", o.Instance, o.Rank) }

// holders names the ranks that hold a block in a tier.
func holders(a *api.Answer, block uint32, tier string) string {
	var names []string
	n := 0
	for i := range a.Workers {
		p := a.Workers[i].Path
		if p == nil {
			continue
		}
		at := sort.Search(len(p.Held), func(i int) bool { return p.Held[i].To > block })
		if at < len(p.Held) && p.Held[at].From <= block && slices.Contains(p.Held[at].Tiers, tier) {
			if n++; n <= namesInCell {
				names = append(names, name(&a.Workers[i]))
			}
		}
	}
	if n > namesInCell {
		names = append(names, fmt.Sprintf("+%d", n-namesInCell))
	}
	if n == 0 {
		return "-"
	}
	return strings.Join(names, " ")
}

// whyStopped describes the rule at the end of a rank's prefix.
func whyStopped(o *api.Overlap) string {
	at := o.Total()
	text := map[string]string{
		"query_ends":    "the prompt ends",
		"unknown_block": fmt.Sprintf("block %d: no worker holds this block or a later block", at),
		"not_held":      fmt.Sprintf("block %d: in no tier of the worker", at),
		"held_in_earlier_tier": fmt.Sprintf(
			"block %d: only in a tier above the present tier of the prefix", at),
		"part_of_chunk": fmt.Sprintf(
			"block %d: the engine loads a chunk of several blocks only as a whole", at),
		"group_lacks_blocks": fmt.Sprintf("block %d: no longer prefix has the blocks for %s", at,
			groupInWords(o.Path.Group)),
		"draft_model": fmt.Sprintf(
			"block %d: the engine computes the last held block again, for the draft model", at),
	}[o.Path.Stop]
	if text == "" {
		text = o.Path.Stop
	}
	if o.Bound == api.BoundFullAttentionOnly {
		text += "; the engine may reuse less: the needs of some group of the cache are unknown"
	}
	if o.Path.Behind > 0 {
		text += fmt.Sprintf(" (%d later blocks are of no use)", o.Path.Behind)
	}
	if o.Path.More {
		text += " (some blocks are not shown)"
	}
	return text
}

// groupInWords describes a group of a hybrid model's cache.
func groupInWords(g *api.PathGroup) string {
	switch {
	case g == nil:
		return "another group of the model's cache"
	case g.Window > 0:
		return fmt.Sprintf("group %d (%s, %d tokens)", g.Index, g.Kind, g.Window)
	}
	return fmt.Sprintf("group %d (%s)", g.Index, g.Kind)
}

// whyNoMore describes the rule at the end of the load of a rank from the shared store.
func whyNoMore(o *api.Overlap, a *api.Answer) string {
	at := o.Total() + o.L3
	next := fmt.Sprintf("block %d", at)
	text, known := map[string]string{
		"":                "",
		"no_store":        "the worker has registered no shared store",
		"prompt_ends":     "the prompt ends",
		"not_in_store":    next + " is not in the store",
		"not_known":       next + ": no answer of the store in time, or no request",
		"below_threshold": next + " and the following run are less than the engine's least load",
		"capacity":        "the engine loads no more ahead",
		"gap":             "the engine loads only from the prompt's start, and the store has less from there than the worker",
		"other_groups":    next + " is in the store, without blocks for all groups of the model's cache",
		"alignment": next +
			" is in the store, but the engine's hits end at larger steps, or before the blocks of a draft model",
		"last_token": "the engine always computes the block of the last token",
	}[o.L3Stop]
	if !known {
		text = o.L3Stop
	}
	if o.L3Stop == "" && a.L3.Reason != "" {
		text = a.L3.Reason
	}
	for _, b := range a.L3.Broken {
		if b.Block == at && o.L3Stop == "not_in_store" {
			text = fmt.Sprintf("block %d: the store has %d of %d objects", at, b.Objects, b.Of)
		}
	}
	if o.Path.L3Behind > 0 {
		text += fmt.Sprintf(" (%d in the store behind are not loaded)", o.Path.L3Behind)
	}
	return text
}
