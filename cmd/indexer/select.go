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
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

func selectCommand() *cobra.Command {
	var prompt remote.Prompt
	var r api.SelectRequest
	var pin, role string
	var excluded []string
	var temperature float64
	cmd := &cobra.Command{
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
	}
	a := remote.Flags(cmd)
	prompt.Add(cmd, "choose among the named workers only")
	f := cmd.Flags()
	f.StringVar(&r.Policy, "policy", "",
		"how to choose: "+strings.Join(routing.Policies(), ", ")+" (default: the policy of the nodes)")
	f.StringVar(&role, "role", "", "pool: aggregated, prefill or decode (default aggregated and decode)")
	f.BoolVar(&r.Disaggregated, "disaggregated", false, "choose a decode worker, and a prefill worker or the reason "+
		"against one")
	f.BoolVar(&r.Advisory, "advisory", false, "choose without a booking, and show the worker's load")
	f.StringVar(&r.SessionID, "session", "", "the session of the request, kept on a single worker")
	f.StringVar(&r.PolicyClass, "policy-class", "", "the class, or family of classes, of the wait for a worker")
	f.Uint32Var(&r.StrictPriority, "strict-priority", 0,
		"priority of a waiting request: greater values go first")
	f.Float64Var(&r.PriorityJump, "priority-jump", 0,
		"seconds by which the arrival of a waiting request counts as earlier")
	f.StringVar(&pin, "pin", "", "check this worker, WORKER or WORKER/RANK, instead of choosing")
	f.StringSliceVar(&excluded, "exclude", nil,
		"do not choose this worker, as for a request that failed there; may be given several times")
	f.StringVar(&r.RequestID, "book", "", "book the request under this id")
	f.Float64Var(&temperature, "temperature", 0, "spread requests over workers of similar cost (default: the "+
		"temperature of the nodes)")
	f.BoolVar(&r.Explain, "explain", false, "show the costs of all candidates, and the rules that dropped candidates")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		q, err := prompt.Read(cmd)
		if err != nil {
			return err
		}
		explain := r.Explain
		r.Query, r.Book, r.Role = q, r.RequestID != "", routing.Role(role)
		r.Explain, r.Diagnostic = explain, !r.Book // who books a request by hand sends it
		for _, worker := range excluded {
			r.Excluded = append(r.Excluded, events.WorkerID(worker))
		}
		if pin != "" {
			if r.Pinned, err = remote.ParseRank("pin", pin); err != nil {
				return err
			}
		}
		if cmd.Flags().Changed("temperature") {
			r.Overrides = &routing.Overrides{RouterTemperature: &temperature}
		}
		if err := r.Check(); err != nil {
			return a.Refused(cli.UsageErrorf("%w", err))
		}
		_, err = remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.Selection, error) {
			return c.Select(ctx, &r)
		}, tables.Selection)
		return err
	}
	return cmd
}

func loadsCommand() *cobra.Command {
	var model string
	cmd := &cobra.Command{
		Use:   "loads [--model M]",
		Short: "List the load of workers: requests under way, as booked by routers",
		Long: `List the load of workers, as booked by routers: tokens for the prefill, blocks of requests under way (blocks
shared by several requests of a rank count once), and requests. Every node has the same table. The answering node has
measured PREFILL RATE, in tokens per second, and BUSY, the share of the time with prefill work, from first tokens. The
policy kvatlas uses both.`,
		Example: `  indexer loads
  indexer loads --model llama --json`,
	}
	a := remote.Flags(cmd)
	cmd.Flags().StringVar(&model, "model", "", "of this model only")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		_, err := remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.LoadList, error) {
			return c.Loads(ctx, model)
		}, tables.Loads)
		return err
	}
	return cmd
}
