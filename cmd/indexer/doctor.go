package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/operate/doctor"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func doctorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Find what is wrong with a deployment, and say what mends it",
		Long: `Look at NATS, streams and buckets, nodes, clocks, replicas, workers, shims, engines, shared stores and tokenizers, and
say what is wrong, with the evidence and the flag or command that mends it. Nothing is changed. A line on standard error
tells of each check.

With --http the nodes are asked over HTTP if NATS does not answer.

Run it with a NATS user that may do what an indexer node may; what another may not ask is said to be not checked.
Engines are asked over HTTP at the addresses that their workers are registered with, if --dial-allow permits these. The
engines of --engine-address get the API key of --engine-http-token-file.

Exit status 1 if there is an error, 3 if there is none and something could not be checked; warnings alone are 0.`,
		Example: `  indexer doctor
  indexer doctor --nats nats://nats-1:4222 --json`,
	}
	a := remote.Flags(cmd)
	var tokenFile string
	cmd.Flags().StringVar(&tokenFile, "engine-http-token-file", "", "file with the API key that engines want over HTTP")
	var keyed []string
	cmd.Flags().StringSliceVar(&keyed, "engine-address", nil,
		"HOST:PORT, host or CIDR of engines that get the API key; may be given again")
	rule := cli.DialFlag(cmd.Flags(), "networks in which engines are asked")
	cmd.Flags().Lookup("timeout").Usage = "how long each check may take"
	cmd.Flags().Lookup("timeout").DefValue = "20s"
	a.Timeout = 20 * time.Second
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := a.Check(); err != nil {
			return err
		}
		if _, err := a.NATS.Options(""); err != nil {
			return err
		}
		token, err := cli.TokenFile("engine-http-token-file", tokenFile)
		if err != nil {
			return err
		}
		var wrong cli.Complaints
		allowed, err := rule()
		wrong.About("--dial-allow", err)
		engines, err := dial.ParseAddresses(keyed)
		wrong.About("--engine-address", err)
		wrong.When(token != "" && len(keyed) == 0, "--engine-http-token-file needs --engine-address: workers registered "+
			"the addresses, and only those that you name get the API key")
		if err := wrong.Usage(); err != nil {
			return err
		}
		over, err := a.OverHTTP()
		if err != nil {
			return err
		}
		r := doctor.Examine(cmd.Context(), doctor.Config{
			Namespace: a.Namespace, Shown: a.NATS.Shown(), Timeout: a.Timeout, EngineToken: token, OverHTTP: over,
			EngineAddresses: engines, Rule: allowed,
			Connect: func(ctx context.Context) (*jetstream.Conn, error) {
				return a.NATS.ConnectCore(ctx, "kvatlas indexer")
			},
			Progress: func(c doctor.Result) { cli.Fprintln(os.Stderr, tables.Progress(c)) },
		})
		err = a.Print(r, func(w io.Writer) { tables.Findings(w, r) })
		errs, unable := r.Findings(doctor.Error), r.Unable()
		switch {
		case err != nil:
			return err
		case len(errs) == 1:
			return fmt.Errorf("1 error: %s: %s", errs[0].Where, errs[0].What)
		case len(errs) > 0:
			return fmt.Errorf("%d errors, the first: %s: %s", len(errs), errs[0].Where, errs[0].What)
		case len(unable) > 0:
			return cli.UnableErrorf("no errors found, and not checked: %s", strings.Join(unable, ", "))
		}
		return nil
	}
	return cmd
}
