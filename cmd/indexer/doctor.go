package main

import (
	"context"
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
		Short: "Find faults of a deployment, and print remedies",
		Long: `Examine NATS, streams and buckets, nodes, clocks, replicas, workers, shims, engines, shared stores and
tokenizers, and report faults with the evidence and the flag or command for the repair. The command changes nothing. A
line on standard error reports the progress of every check.

With --http the requests go to the nodes over HTTP if NATS does not answer.

Run doctor with a NATS user with the rights of an indexer node. With fewer rights, the report lists the impossible
checks as not checked. Requests to engines go to the registered addresses of workers, if --dial-allow permits the
addresses. The engines of --engine-address get the API key of --engine-http-token-file.

Exit status 1 if there is an error, 3 without an error if a check was impossible, 0 if there are at most warnings.`,
		Example: `  indexer doctor
  indexer doctor --nats nats://nats-1:4222 --json`,
	}
	a := remote.Flags(cmd)
	cli.Output[*doctor.Report](cmd)
	cli.Explain(cmd, tables.FindingsColumns)
	a.SetTimeout(20*time.Second, "time limit of every check")
	rule := cli.DialFlag(cmd.Flags(), "networks of engines that doctor may contact")
	var tokenFile string
	var keyed []string
	return cli.Command(cmd, cli.Flags{
		cli.Var(&tokenFile, "engine-http-token-file", "", "file with the API key for engines' HTTP"),
		cli.Var(&keyed, "engine-address", nil,
			"HOST:PORT, host or CIDR of the engines for the API key; may be given again"),
	}, nil, func(ctx context.Context, _ []string) error {
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
			"the addresses, and only named addresses get the API key")
		if err := wrong.Usage(); err != nil {
			return err
		}
		over, err := a.OverHTTP()
		if err != nil {
			return err
		}
		r := doctor.Examine(ctx, doctor.Config{
			Namespace: a.Namespace, Shown: a.NATS.Shown(), Timeout: a.Timeout, EngineToken: token, OverHTTP: over,
			EngineAddresses: engines, Rule: allowed,
			Connect: func(ctx context.Context) (*jetstream.Conn, error) {
				return a.NATS.ConnectCore(ctx, "kvatlas indexer")
			},
			Progress: func(c doctor.Result) { cli.Fprintln(os.Stderr, tables.Progress(c)) },
		})
		if err := a.Print(r, func(w io.Writer) { tables.Findings(w, r) }); err != nil {
			return err
		}
		if err := r.Failure(); err != nil {
			return err
		}
		if unable := r.Unable(); len(unable) > 0 {
			return cli.UnableErrorf("no errors found, and not checked: %s", strings.Join(unable, ", "))
		}
		return nil
	})
}
