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
	cli.Table(w, []string{"BLOCKS", "DEVICE", "HOST", "DISK", "EXTERNAL", "STORE"}, rows)
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
	cli.Table(w, []string{"WORKER", "OWN", "STOPPED", "LOADS", "NO MORE, FOR"}, rows)
	for i := range a.Workers {
		if o := &a.Workers[i]; o.Guessed > 0 {
			cli.Fprintf(w, "%s probably holds %d blocks on its device, as requests were sent there\n", name(o), o.Guessed)
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

// whyStopped describes the rule that ended a rank's own prefix.
func whyStopped(o *api.Overlap) string {
	at := o.Total()
	text := map[string]string{
		"query_ends":    "the prompt ends",
		"unknown_block": fmt.Sprintf("block %d: nobody holds it, or what follows", at),
		"not_held":      fmt.Sprintf("block %d: it does not hold it in any tier", at),
		"held_in_earlier_tier": fmt.Sprintf(
			"block %d: it holds it only in a tier before the one that its prefix has come to", at),
		"part_of_chunk": fmt.Sprintf(
			"block %d: its engine loads a chunk of several blocks only as a whole", at),
		"group_lacks_blocks": fmt.Sprintf("block %d: no longer prefix has what %s needs", at,
			groupInWords(o.Path.Group)),
		"draft_model": fmt.Sprintf(
			"block %d: its engine computes the last block that it holds anew, for its draft model", at),
	}[o.Path.Stop]
	if text == "" {
		text = o.Path.Stop
	}
	if o.Bound == api.BoundFullAttentionOnly {
		text += "; its engine may reuse less: what some group of its cache needs is not known"
	}
	if o.Path.Behind > 0 {
		text += fmt.Sprintf(" (%d it holds behind are of no use)", o.Path.Behind)
	}
	if o.Path.More {
		text += " (not all of its blocks are shown)"
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

// whyNoMore describes the rule of an engine that ended the load of a rank from the shared store.
func whyNoMore(o *api.Overlap, a *api.Answer) string {
	at := o.Total() + o.L3
	next := fmt.Sprintf("block %d", at)
	text, known := map[string]string{
		"":                "",
		"no_store":        "it has registered no shared store",
		"prompt_ends":     "the prompt ends",
		"not_in_store":    next + " is not in the store",
		"not_known":       next + ": the store was not asked, or did not answer in time",
		"below_threshold": next + " and what follows in one run is less than its engine begins to load for",
		"capacity":        "its engine loads no more ahead",
		"gap":             "its engine loads only what begins with the prompt, and of that the store has less than the worker",
		"other_groups":    next + " is in the store, but not what other groups of the model's cache need there",
		"alignment": next +
			" is in the store, but its engine's hits end at larger steps, or before what a draft model computes",
		"last_token": "its engine computes what holds the last token itself",
	}[o.L3Stop]
	if !known {
		text = o.L3Stop
	}
	if o.L3Stop == "" && a.L3.Reason != "" {
		text = a.L3.Reason
	}
	for _, b := range a.L3.Broken {
		if b.Block == at && o.L3Stop == "not_in_store" {
			text = fmt.Sprintf("block %d: the store has %d of its %d objects", at, b.Objects, b.Of)
		}
	}
	if o.Path.L3Behind > 0 {
		text += fmt.Sprintf(" (%d in the store behind are not loaded)", o.Path.L3Behind)
	}
	return text
}
