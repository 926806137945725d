package tables

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// tokenization prints the reason why a text could not be tokenized.
func tokenization(w io.Writer, t *api.Tokenization) {
	if t != nil && !t.Tokenized {
		cli.Fprintf(w, "NOT TOKENIZED: the blocks at workers are unknown: %s\n", t.TokenizeError)
	}
}

// Answer prints the overlaps of a prompt with the blocks of each worker. With q.Explain it prints the holders of each
// block.
func Answer(w io.Writer, a *api.Answer, q *api.Query) {
	cli.Fprintf(w, "%s: %d blocks of %d tokens\n", a.Model, a.Blocks, a.BlockSize)
	tokenization(w, a.Tokenization)
	if !a.Complete {
		cli.Fprintf(w, "INCOMPLETE: partitions %v are not available; see indexer status\n", a.Missing)
	}
	if line := lacks(a.Partitions); line != "" {
		cli.Fprintln(w, line)
	}
	if len(a.UnknownEndpoints) > 0 {
		cli.Fprintf(w, "no worker of the model is registered at %s\n", strings.Join(a.UnknownEndpoints, ", "))
	}
	store(w, &a.L3)
	regionPrefixes(w, a.Regions)
	if q.Explain && a.Blocks > 0 && len(a.Workers) > 0 {
		explanation(w, a)
		return
	}
	if len(a.Workers) == 0 {
		why := map[api.Reason]string{
			api.ReasonNoBlocks:   "the prompt is shorter than a block",
			api.ReasonNotCached:  "no worker holds the first block",
			api.ReasonNoTokens:   "the text could not be tokenized",
			api.ReasonNotAllowed: "no named worker serves this model",
		}[a.Reason]
		cli.Fprintln(w, "no worker holds any block:", why)
		return
	}
	overlaps(w, a, q)
}

// store prints the answer of the shared store, if the model has a store.
func store(w io.Writer, l *api.L3) {
	if l.Status != api.L3NotConfigured && l.Status != "" {
		cli.Fprintf(w, "shared store: %s, %d blocks found", l.Status, l.Total)
		for _, r := range l.Ranges {
			cli.Fprintf(w, " [%d,%d)", r[0], r[1])
		}
		if l.AgeMS > 0 {
			cli.Fprintf(w, ", as of %.0f ms ago", l.AgeMS)
		}
		if l.Reason != "" {
			cli.Fprintf(w, ": %s", l.Reason)
		}
		cli.Fprintln(w)
	}
}

// overlaps prints a line for each rank with a part of the prompt.
func overlaps(w io.Writer, a *api.Answer, q *api.Query) {
	table := answerBase
	for _, set := range q.Within {
		table = table.And(cli.Column{Name: strings.ToUpper(string(set))})
	}
	shared := a.L3.Status != api.L3NotConfigured
	if shared {
		table = table.And(storeColumns...)
	}
	guessed := slices.ContainsFunc(a.Workers, func(o api.Overlap) bool { return o.Guessed > 0 })
	if guessed {
		table = table.And(guessedColumn)
	}
	stands := slices.ContainsFunc(a.Workers, func(o api.Overlap) bool { return o.Engine != "" || o.CatchingUp })
	if stands {
		table = table.And(engineColumn)
	}
	addressed := slices.ContainsFunc(a.Workers, func(o api.Overlap) bool { return o.Endpoint != "" })
	if addressed {
		table = table.And(endpointColumn)
	}
	rows := make([][]any, len(a.Workers))
	for i, o := range a.Workers {
		part := fmt.Sprintf("%.0f%%", 100*float64(o.Total()+o.L3)/float64(a.Blocks))
		if o.Bound != "" {
			part = "at most " + part
		}
		rows[i] = []any{o.Instance, o.Rank, o.Device, o.Host, o.Disk, o.External, part}
		for k := range q.Within {
			n := uint32(0)
			if k < len(o.Within) {
				n = o.Within[k]
			}
			rows[i] = append(rows[i], n)
		}
		if shared {
			rows[i] = append(rows[i], o.L3, o.L3Stop)
		}
		if guessed {
			rows[i] = append(rows[i], o.Guessed)
		}
		if stands {
			rows[i] = append(rows[i], engineState(&api.WorkerInfo{Engine: o.Engine, CatchingUp: o.CatchingUp},
				time.Now()))
		}
		if addressed {
			rows[i] = append(rows[i], o.Endpoint)
		}
	}
	table.Table(w, rows)
}

// lacks describes gaps in a complete answer in one line: partitions behind the log, and partitions
// in need of a resync.
func lacks(parts []api.PartitionStatus) string {
	var old []string
	var resync []events.Partition
	for _, p := range parts {
		if p.StaleMS > 0 {
			old = append(old, fmt.Sprintf("%d (%s)", p.Partition, staleAge(p.StaleMS)))
		}
		if p.ResyncNeeded {
			resync = append(resync, p.Partition)
		}
	}
	var say []string
	if len(old) > 0 {
		say = append(say, "OLD: without recent events of partitions "+strings.Join(old, ", "))
	}
	if len(resync) > 0 {
		say = append(say, fmt.Sprintf("RESYNC NEEDED: workers in partitions %v may hold further blocks", resync))
	}
	if len(say) == 0 {
		return ""
	}
	return strings.Join(say, "; ") + "; see indexer status"
}

// staleAge formats the delay of a partition; 0 is "-".
func staleAge(staleMS uint64) string {
	if staleMS == 0 {
		return "-"
	}
	return (time.Duration(staleMS) * time.Millisecond).Round(time.Second).String()
}
