package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/spf13/cobra"
)

func selectCommand() *cobra.Command {
	var prompt promptFlags
	var r api.SelectRequest
	var pin, role string
	var temperature float64
	cmd := &cobra.Command{
		Use:   "select --model M (--tokens 1,2,3 | --tokens-file F | --hashes H,H | --prompt-file F | --messages-file F)",
		Short: "Ask which worker should serve a prompt",
		Long: `Ask which worker should serve a prompt: by what each holds of it, and by what each has to do. --explain shows the cost
of every candidate term by term, and which rule dropped whom. With --book REQUEST-ID the request is booked on the worker
that is chosen, and counts as its load until it is freed or expires; who has sent the request by hand frees it by
POST /v1/free, or lets it expire.`,
		Example: `  indexer select --model llama --tokens-file prompt.json
  indexer select --model llama --tokens-file prompt.json --explain
  indexer select --model llama --tokens-file prompt.json --disaggregated
  indexer select --model llama --tokens-file prompt.json --policy least_load --json`,
	}
	a := askingFlags(cmd)
	prompt.add(cmd, "choose among these workers only")
	f := cmd.Flags()
	f.StringVar(&r.Policy, "policy", "",
		"how to choose: "+strings.Join(routing.Policies(), ", ")+" (default: that of the nodes)")
	f.StringVar(&role, "role", "", "pool: aggregated, prefill or decode (default any)")
	f.BoolVar(&r.Disaggregated, "disaggregated", false, "a decode worker, and a prefill worker beside it or why not")
	f.BoolVar(&r.Advisory, "advisory", false, "only ask, and show the worker's load")
	f.StringVar(&r.SessionID, "session", "", "the session of the request, which is kept on one worker")
	f.StringVar(&r.PolicyClass, "policy-class", "", "the class, or family of classes, in which it waits for a worker")
	f.Uint32Var(&r.StrictPriority, "strict-priority", 0,
		"where requests wait, who has more is before all who have less")
	f.Float64Var(&r.PriorityJump, "priority-jump", 0,
		"how many seconds earlier it counts as having come, where requests wait")
	f.StringVar(&pin, "pin", "", "check this worker, WORKER or WORKER/RANK, instead of choosing")
	f.StringVar(&r.RequestID, "book", "", "book the request under this id")
	f.Float64Var(&temperature, "temperature", 0, "spread requests over workers of like cost (default: that of the nodes)")
	f.BoolVar(&r.Explain, "explain", false, "show each candidate's cost, and which rule dropped whom")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		q, err := prompt.read(cmd)
		if err != nil {
			return err
		}
		explain := r.Explain
		r.Query, r.Book, r.Role = q, r.RequestID != "", routing.Role(role)
		r.Explain, r.Diagnostic = explain, !r.Book // who books a request by hand sends it
		if pin != "" {
			if r.Pinned, err = target("pin", pin); err != nil {
				return err
			}
		}
		if cmd.Flags().Changed("temperature") {
			r.Overrides = &routing.Overrides{RouterTemperature: &temperature}
		}
		if err := r.Check(); err != nil {
			return a.refused(cli.UsageErrorf("%w", err))
		}
		_, err = show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.Selection, error) {
			return c.Select(ctx, &r)
		}, printSelection)
		return err
	}
	return cmd
}

// target reads WORKER or WORKER/RANK of a flag.
func target(flag, text string) (*routing.Target, error) {
	worker, rank, has := text, "", false
	if i := strings.LastIndexByte(text, '/'); i >= 0 {
		worker, rank, has = text[:i], text[i+1:], true
	}
	t := &routing.Target{Worker: events.WorkerID(worker)}
	if has {
		v, err := strconv.ParseUint(rank, 10, 32)
		if err != nil {
			return nil, cli.UsageErrorf("--%s %q: the rank is %.40q, not an unsigned 32-bit number", flag, text, rank)
		}
		t.Rank = new(events.Rank)
		*t.Rank = events.Rank(v)
	}
	return t, nil
}

func printSelection(w io.Writer, s *api.Selection) {
	cli.Fprintf(w, "%s: %d tokens, %d whole blocks of %d\n", s.Model, s.ISLTokens, s.Blocks, s.BlockSize)
	printTokenization(w, s.Tokenization)
	if !s.Complete {
		cli.Fprintf(w, "INCOMPLETE: what workers of partitions %v hold is not known; see indexer status\n", s.Missing)
	}
	cli.Fprintf(w, "worker %s rank %d", s.Worker, s.Rank)
	if s.Endpoint != "" {
		cli.Fprintf(w, " at %s", s.Endpoint)
	}
	cli.Fprintf(w, ", by %s from %s, cost %.3f\n", s.Policy, cli.Count(uint64(s.Candidates), "candidate"), s.Cost)
	cli.Fprintf(w, "%d tokens are cached, %d are to be computed; it will have %s under way\n", s.CachedTokens,
		s.EffectivePrefillTokens, cli.Count(s.PotentialDecodeBlocks, "block"))
	if len(s.UnknownEndpoints) > 0 {
		cli.Fprintf(w, "no worker of the model is registered at %s\n", strings.Join(s.UnknownEndpoints, ", "))
	}
	if s.Guessed > 0 {
		cli.Fprintf(w, "its events confirm %d blocks on its device; it probably holds %d, as requests were sent there\n",
			s.Device, s.Guessed)
	}
	if l := s.WorkerLoad; l != nil {
		cli.Fprintf(w, "it has %d tokens to compute, and room for %d\n", l.ActivePrefillTokens, l.PrefillTokenCapacity)
	}
	if s.Booked {
		cli.Fprintf(w, "booked as %s\n", s.RequestID)
	}
	if b := s.Session; b != nil {
		cli.Fprintf(w, "session %s: %s\n", b.ID, b.Binding)
	}
	if s.Explanation != nil {
		printChoice(w, s.Explanation)
	}
	if d := s.Disaggregation; d != nil && d.Bypass {
		cli.Fprintf(w, "no prefill worker: %s\n", d.Reason)
	} else if s.Prefill != nil {
		cli.Fprintf(w, "\nprefill (%s):\n", d.Reason)
		printSelection(w, s.Prefill)
	}
}

// printChoice prints the candidates, the cheapest first, and the dropped workers.
func printChoice(w io.Writer, x *routing.Explanation) {
	cli.Fprintln(w)
	list := slices.Clone(x.Candidates)
	slices.SortStableFunc(list, func(a, b routing.Considered) int { return cmp.Compare(a.Cost, b.Cost) })
	heading := []string{"", "WORKER", "RANK", "COST", "PROBABILITY", "CACHED TOKENS"}
	terms := len(list) > 0 && list[0].Terms != nil
	if terms {
		heading = append(heading, "PREFILL", "CREDIT", "DECODE", "REQUESTS", "TAINTS")
	}
	scores := !terms && len(list) > 0 && len(list[0].Scores) > 1
	if scores {
		for _, s := range list[0].Scores {
			heading = append(heading, strings.ToUpper(s.Scorer))
		}
	}
	guessed := terms && slices.ContainsFunc(list, func(c routing.Considered) bool { return c.Terms.GuessedBlocks > 0 })
	if guessed {
		heading = append(heading, "GUESSED BLOCKS")
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
	cli.Table(w, heading, rows)
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

func loadsCommand() *cobra.Command {
	var model string
	cmd := &cobra.Command{
		Use:   "loads [--model M]",
		Short: "List what workers have to do: requests under way, as routers have booked them",
		Long: `List what workers have to do, as routers have booked it: tokens to be prefilled, blocks of requests under way (those
that several requests of a rank share count once), and requests. Every node has the same table. PREFILL RATE, in tokens
per second, and BUSY, the share of the time with prefill to do, are what the node that answers has measured from first
tokens; the policy kvatlas uses them.`,
		Example: `  indexer loads
  indexer loads --model llama --json`,
	}
	a := askingFlags(cmd)
	cmd.Flags().StringVar(&model, "model", "", "of this model only")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		_, err := show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.LoadList, error) {
			return c.Loads(ctx, model)
		}, printLoads)
		return err
	}
	return cmd
}

func printLoads(w io.Writer, list *api.LoadList) {
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
	cli.Table(w, []string{"MODEL", "WORKER", "RANK", "REQUESTS", "PREFILL TOKENS", "BLOCKS", "PREFILL RATE", "BUSY"}, rows)
}
