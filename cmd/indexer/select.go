package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

func selectCommand() *cobra.Command {
	var prompt remote.Prompt
	r := &api.SelectRequest{}
	var pin string
	var excluded []string
	var temperature float64
	return remote.Command(&cobra.Command{
		Use:   "select --model M (--tokens 1,2,3 | --tokens-file F | --hashes H,H | --prompt-file F | --messages-file F)",
		Short: "Ask which worker should serve a prompt",
		Long: `Choose a worker for a prompt, by the workers' blocks of the prompt and by the load. --explain shows the cost
of every candidate by terms, and the rules that dropped candidates. --book REQUEST-ID books the request on the chosen
worker. The booking counts as load until the release or the expiry. For a request sent by hand, release the booking with
POST /v1/free, or let the booking expire.`,
		Example: `  indexer select --model llama --tokens-file prompt.json
  indexer select --model llama --tokens-file prompt.json --explain
  indexer select --model llama --tokens-file prompt.json --disaggregated
  indexer select --model llama --tokens-file prompt.json --policy least_load --json`,
	}, remote.Request[*api.Selection]{
		Flags: append(prompt.Flags(&r.Query, "choose among the named workers only"),
			cli.Var(&r.Policy, "policy", "",
				"how to choose: "+strings.Join(routing.Policies(), ", ")+" (default: the policy of the nodes)"),
			cli.Var((*string)(&r.Role), "role", "",
				"pool: aggregated, prefill or decode (default aggregated and decode)"),
			cli.Var(&r.Disaggregated, "disaggregated", false,
				"choose a decode worker, and a prefill worker or the reason against one"),
			cli.Var(&r.Advisory, "advisory", false,
				"choose without a booking, and show the worker's load"),
			cli.Var(&r.SessionID, "session", "",
				"the session of the request, kept on a single worker"),
			cli.Var(&r.PolicyClass, "policy-class", "",
				"the class, or family of classes, of the wait for a worker"),
			cli.Var(&r.StrictPriority, "strict-priority", 0,
				"priority of a waiting request: greater values go first"),
			cli.Var(&r.PriorityJump, "priority-jump", 0,
				"seconds by which the arrival of a waiting request counts as earlier"),
			cli.Var(&pin, "pin", "",
				"check this worker, WORKER or WORKER/RANK, instead of choosing"),
			cli.Var(&excluded, "exclude", nil,
				"do not choose this worker, as for a request that failed there; may be given several times"),
			cli.Var(&r.RequestID, "book", "",
				"book the request under this id"),
			cli.Var(&temperature, "temperature", 0,
				"spread requests over workers of similar cost (default: the temperature of the nodes)"),
			cli.Var(&r.Regions, "regions", false,
				"show the longest prefix in each region, with the price of the region; nodes need --region"),
			cli.Var(&r.Explain, "explain", false,
				"show the costs of all candidates, and the rules that dropped candidates"),
		),
		Check: func(cmd *cobra.Command, _ []string) error {
			if err := prompt.Read(cmd); err != nil {
				return err
			}
			r.Book, r.Excluded = r.RequestID != "", remote.Workers(excluded)
			r.Diagnostic = !r.Book // who books a request by hand sends it
			if pin != "" {
				var err error
				if r.Pinned, err = remote.ParseRank("pin", pin); err != nil {
					return err
				}
			}
			if cmd.Flags().Changed("temperature") {
				r.Overrides = &routing.Overrides{RouterTemperature: &temperature}
			}
			return r.Check()
		},
		Send: remote.Call((*client.Client).Select, r), Print: tables.Selection,
		Columns: []cli.Columns{tables.CandidatesColumns, tables.KvatlasColumns, tables.DynamoColumns,
			tables.RegionsColumns},
	})
}

func loadsCommand() *cobra.Command {
	var model string
	return remote.Command(&cobra.Command{
		Use:   "loads [--model M]",
		Short: "List the load of workers: requests under way, as booked by routers",
		Long: `List the load of workers, as booked by routers: tokens for the prefill, blocks of requests under way (blocks
shared by several requests of a rank count once), and requests. Every node has the same table. The answering node has
measured PREFILL RATE, in tokens per second, and BUSY, the share of the time with prefill work, from first tokens. The
policy kvatlas uses both.`,
		Example: `  indexer loads
  indexer loads --model llama --json`,
	}, remote.Request[*api.LoadList]{
		Flags: cli.Flags{cli.Var(&model, "model", "", "of this model only")},
		Send: func(ctx context.Context, c *client.Client) (*api.LoadList, error) {
			return c.Loads(ctx, model)
		},
		Print: tables.Loads, Columns: []cli.Columns{tables.LoadsColumns},
	})
}
