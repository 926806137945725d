package main

import (
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
	q := &api.Query{}
	var ranks, within []string
	return remote.Command(&cobra.Command{
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
	}, remote.Request[*api.Answer]{
		Flags: append(prompt.Flags(q, "search this worker only"),
			cli.Var(&ranks, "rank", nil,
				"WORKER/RANK: search this rank only, in place of --worker; may be given several times"),
			cli.Var(&within, "within", nil,
				"TIER+TIER: show the prefix that workers have in these tiers together, with every block in any of the tiers; "+
					"may be given several times"),
			cli.Var(&q.Explain, "explain", false,
				"show the places of all blocks, and the rule that ended every worker's prefix"),
			cli.Var(&q.Regions, "regions", false,
				"show the longest prefix in each region, with the price of the region; nodes need --region"),
			cli.Var(&q.WithEndpoint, "with-endpoint", false,
				"show the registered address of every worker, as --endpoint does"),
		),
		Check: func(cmd *cobra.Command, _ []string) error {
			if err := prompt.Read(cmd); err != nil {
				return err
			}
			var err error
			if q.Ranks, err = remote.ParseRanks("rank", ranks); err != nil {
				return err
			}
			for _, set := range within {
				q.Within = append(q.Within, api.Tiers(set))
			}
			q.Diagnostic = true
			return q.Check()
		},
		Send:  remote.Call((*client.Client).Find, q),
		Print: func(w io.Writer, answer *api.Answer) { tables.Answer(w, answer, q) },
		Columns: []cli.Columns{tables.AnswerColumns, tables.BlocksColumns, tables.StopsColumns,
			tables.RegionsColumns},
	})
}
