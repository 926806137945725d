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
		Short: "Find the workers that hold blocks of a prompt",
		Long: `Find the workers that hold a prompt's blocks. DEVICE counts the leading blocks in device memory, HOST the
directly following blocks in host memory, and so on. Tokens are whole numbers, separated by commas or blanks. A file
of tokens may also be a JSON array, and - is standard input. --explain shows the workers, tiers and the shared store
for every block, and for every worker the rule at the end of the prefix and the loads from the shared store. GUESSED
counts the leading blocks that a worker probably holds in device memory, because of the requests sent to the worker,
without events of the worker so far.`,
		Example: `  indexer query --model llama --tokens-file prompt.json
  indexer query --model llama --tokens-file prompt.json --explain
  indexer query --model llama --messages-file chat.json
  indexer query --model llama --tokens-file prompt.json --rank worker-1/0 --rank worker-1/1
  indexer query --model llama --hashes 13226331709069118873 --json`,
	}
	a := remote.Flags(cmd)
	prompt.Add(cmd, "search this worker only")
	cmd.Flags().StringSliceVar(&ranks, "rank", nil,
		"WORKER/RANK: search this rank only, in place of --worker; may be given several times")
	cmd.Flags().StringSliceVar(&within, "within", nil,
		"TIER+TIER: show the prefix that workers have in these tiers together, with every block in any of the tiers; "+
			"may be given several times")
	cmd.Flags().BoolVar(&explain, "explain", false, "show the places of all blocks, and the rule that ended every "+
		"worker's prefix")
	cmd.Flags().BoolVar(&endpoints, "with-endpoint", false,
		"show the registered address of every worker, as --endpoint does")
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
