package tables

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Selection prints the chosen worker, and the candidates if they are explained.
func Selection(w io.Writer, s *api.Selection) {
	cli.Fprintf(w, "%s: %d tokens, %d whole blocks of %d\n", s.Model, s.ISLTokens, s.Blocks, s.BlockSize)
	tokenization(w, s.Tokenization)
	if !s.Complete {
		cli.Fprintf(w, "INCOMPLETE: the blocks of workers in partitions %v are unknown; see indexer status\n", s.Missing)
	}
	cli.Fprintf(w, "worker %s rank %d", s.Worker, s.Rank)
	if s.Endpoint != "" {
		cli.Fprintf(w, " at %s", s.Endpoint)
	}
	cli.Fprintf(w, ", by %s from %s, cost %.3f\n", s.Policy, cli.Count(uint64(s.Candidates), "candidate"), s.Cost)
	cli.Fprintf(w, "%d tokens are cached, %d are to be computed; the worker will have %s under way\n", s.CachedTokens,
		s.EffectivePrefillTokens, cli.Count(s.PotentialDecodeBlocks, "block"))
	if len(s.UnknownEndpoints) > 0 {
		cli.Fprintf(w, "no worker of the model is registered at %s\n", strings.Join(s.UnknownEndpoints, ", "))
	}
	if s.Guessed > 0 {
		cli.Fprintf(w, "events confirm %d blocks on the device; the worker probably holds %d, because of the requests "+
			"sent to the worker\n", s.Device, s.Guessed)
	}
	if k := s.KVSource; k != nil {
		cli.Fprintf(w, "KV source: worker %s rank %d at %s holds %d tokens more\n", k.Worker, k.Rank, k.Endpoint, k.Tokens)
	}
	if l := s.WorkerLoad; l != nil {
		cli.Fprintf(w, "the worker has %d tokens to compute, and room for %d\n", l.ActivePrefillTokens,
			l.PrefillTokenCapacity)
	}
	if s.Booked {
		cli.Fprintf(w, "booked as %s\n", s.RequestID)
	}
	if b := s.Session; b != nil {
		cli.Fprintf(w, "session %s: %s\n", b.ID, b.Binding)
	}
	regionPrefixes(w, s.Regions)
	if s.Explanation != nil {
		choice(w, s.Explanation)
	}
	if d := s.Disaggregation; d != nil && d.Bypass {
		cli.Fprintf(w, "no prefill worker: %s\n", d.Reason)
	} else if s.Prefill != nil {
		cli.Fprintf(w, "\nprefill (%s):\n", d.Reason)
		Selection(w, s.Prefill)
	}
}

// choice prints the candidates, the cheapest first, and the dropped workers.
func choice(w io.Writer, x *routing.Explanation) {
	cli.Fprintln(w)
	list := slices.Clone(x.Candidates)
	slices.SortStableFunc(list, func(a, b routing.Considered) int { return cmp.Compare(a.Cost, b.Cost) })
	table := candidatesBase
	terms := len(list) > 0 && list[0].Terms != nil
	if terms {
		table = table.And(DynamoColumns.List...)
	}
	scores := !terms && len(list) > 0 && len(list[0].Scores) > 1
	if scores {
		for _, s := range list[0].Scores {
			table = table.And(cli.Column{Name: strings.ToUpper(s.Scorer)})
		}
	}
	guessed := terms && slices.ContainsFunc(list, func(c routing.Considered) bool { return c.Terms.GuessedBlocks > 0 })
	if guessed {
		table = table.And(guessedBlocks)
	}
	rows := make([][]any, len(list))
	for i, c := range list {
		chosen := ""
		if c.Chosen {
			chosen = "*"
		}
		rows[i] = []any{chosen, c.Worker, c.Rank, fmt.Sprintf("%.3f", c.Cost), fmt.Sprintf("%.3f", c.Probability),
			c.Estimate.CachedTokens}
		if t := c.Terms; terms {
			credit := t.DeviceCredit + t.HostCredit + t.DiskCredit + t.SharedCredit
			rows[i] = append(rows[i], fmt.Sprintf("%.3f", t.RawPrefill), fmt.Sprintf("%.3f", 0-credit),
				fmt.Sprintf("%.3f", t.Decode), fmt.Sprintf("%.3f", t.ActiveRequests), fmt.Sprintf("x%.3f", t.TaintFactor))
		}
		if scores {
			for _, s := range c.Scores {
				rows[i] = append(rows[i], fmt.Sprintf("%.3f", s.Cost))
			}
		}
		if guessed {
			rows[i] = append(rows[i], c.Terms.GuessedBlocks)
		}
	}
	table.Table(w, rows)
	for i := range list {
		if r := list[i].Reported; r != nil {
			cli.Fprintf(w, "worker %s rank %d reports %s\n", list[i].Worker, list[i].Rank, reportOf(r))
		}
	}
	if a := x.Affinity; a != nil {
		cli.Fprintln(w, affinityLine(a))
	}
	for _, d := range x.Dropped {
		cli.Fprintf(w, "dropped by %s: worker %s rank %d %s\n", d.Filter, d.Worker, d.Rank, d.Reason)
	}
}

// affinityLine describes the effect of a request's affinity.
func affinityLine(a *routing.AffinityEffect) string {
	line := fmt.Sprintf("affinity by %s to worker %s", a.By, a.Worker)
	if a.Rank != nil {
		line += fmt.Sprintf(" rank %d", *a.Rank)
	}
	if !a.Decided {
		return line + " did not decide"
	}
	line += " decided"
	if c := a.Cheapest; c != nil {
		line += fmt.Sprintf("; the cheapest candidate is worker %s rank %d, cost %.3f", c.Worker, c.Rank, c.Cost)
	}
	return line
}

// Loads prints a line for each rank with requests under way.
func Loads(w io.Writer, list *api.LoadList) {
	if len(list.Models) == 0 {
		cli.Fprintln(w, "no request is under way")
		return
	}
	var rows [][]any
	for _, m := range list.Models {
		if m.PendingCount > 0 {
			defer cli.Fprintf(w, "%s: %d requests with %d tokens wait on this node\n", m.Model, m.PendingCount,
				m.PendingISLTokens)
		}
		paces := m.Paces
		for _, r := range m.Ranks {
			rate, busy := "not measured", ""
			if len(paces) > 0 && paces[0].Worker == r.Worker && paces[0].Rank == r.Rank {
				rate, busy = fmt.Sprintf("%.0f", paces[0].PrefillTokensPerS), fmt.Sprintf("%.0f %%", 100*paces[0].Busy)
				paces = paces[1:]
			}
			rows = append(rows, []any{m.Model, r.Worker, r.Rank, r.ActiveRequests, r.ActivePrefillTokens, r.ActiveBlocks,
				rate, busy})
		}
	}
	LoadsColumns.Table(w, rows)
}
