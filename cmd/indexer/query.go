package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

func queryCommand() *cobra.Command {
	var prompt remote.Prompt
	var explain, endpoints bool
	var ranks, within []string
	cmd := &cobra.Command{
		Use:   "query --model M (--tokens 1,2,3 | --tokens-file F | --hashes H,H | --prompt-file F | --messages-file F)",
		Short: "Ask which worker holds how much of a prompt",
		Long: `Ask which worker holds how much of a prompt, in blocks: DEVICE counts the leading blocks in device memory, HOST those
that follow directly in host memory, and so on. Tokens are whole numbers with commas or blanks between; a file of them
may also be a JSON array, and - is standard input. --explain shows block by block which worker holds it in which tier
and whether the shared store has it, and for each worker the rule that stopped its own prefix, and what it would load.
GUESSED counts the leading blocks that a worker probably holds in device memory, as requests were sent there, though its
events do not say so.`,
		Example: `  indexer query --model llama --tokens-file prompt.json
  indexer query --model llama --tokens-file prompt.json --explain
  indexer query --model llama --messages-file chat.json
  indexer query --model llama --tokens-file prompt.json --rank worker-1/0 --rank worker-1/1
  indexer query --model llama --hashes 13226331709069118873 --json`,
	}
	a := remote.Flags(cmd)
	prompt.Add(cmd, "look at this worker only")
	cmd.Flags().StringSliceVar(&ranks, "rank", nil,
		"WORKER/RANK: look at this rank only, in place of --worker; may be given several times")
	cmd.Flags().StringSliceVar(&within, "within", nil,
		"TIER+TIER: show how much of the prompt each worker has within these tiers alone, whichever of them a block is in; "+
			"may be given several times")
	cmd.Flags().BoolVar(&explain, "explain", false, "show where each block is, and which rule stopped each worker")
	cmd.Flags().BoolVar(&endpoints, "with-endpoint", false,
		"show the address that each worker is registered with, as --endpoint does")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		q, err := prompt.Read(cmd)
		if err != nil {
			return err
		}
		q.Explain, q.WithEndpoint, q.Diagnostic = explain, endpoints, true
		for _, set := range within {
			q.Within = append(q.Within, api.Tiers(set))
		}
		for _, text := range ranks {
			at, err := remote.ParseRank("rank", text)
			if err != nil {
				return err
			}
			if at.Rank == nil {
				return cli.UsageErrorf("--rank %q is not WORKER/RANK", text)
			}
			q.Ranks = append(q.Ranks, api.RankPlace{Instance: at.Worker, Rank: *at.Rank})
		}
		if err := q.Check(); err != nil {
			return a.Refused(cli.UsageErrorf("%w", err))
		}
		_, err = remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.Answer, error) {
			return c.Find(ctx, &q)
		}, func(w io.Writer, answer *api.Answer) { tables.Answer(w, answer, &q) })
		return err
	}
	return cmd
}
