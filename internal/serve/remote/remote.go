package remote

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// connection is the name of the commands' connection to NATS.
const connection = "kvatlas indexer"

// Target holds the flags of a command with requests to running indexers.
type Target struct {
	NATS      *cli.NATS
	Namespace string
	Timeout   time.Duration
	JSON      bool

	http  httpFlags // empty for commands that need NATS
	quiet bool      // nothing is printed
	flags *pflag.FlagSet
}

// Flags adds the flags of a command that sends requests over NATS or HTTP.
func Flags(cmd *cobra.Command) *Target {
	t := StoreFlags(cmd)
	t.http.add(cmd.Flags())
	return t
}

// StoreFlags adds the flags of a command that needs JetStream.
func StoreFlags(cmd *cobra.Command) *Target {
	t := newTarget(cmd)
	cmd.Flags().BoolVar(&t.JSON, "json", false, "print JSON for programs instead of a table")
	return t
}

func newTarget(cmd *cobra.Command) *Target {
	t := &Target{NATS: cli.NATSFlags(cmd.Flags(), false), flags: cmd.Flags()}
	cmd.Flags().StringVar(&t.Namespace, "namespace", "default", "name of the deployment; several may share NATS servers")
	cmd.Flags().DurationVar(&t.Timeout, "timeout", ops.Deadline, "how long to wait for the answer")
	if cmd.Args == nil {
		cmd.Args = cobra.NoArgs
	}
	return t
}

// Check rejects settings invalid for all commands.
func (t *Target) Check() error {
	if err := jetstream.CheckNamespace(t.Namespace); err != nil {
		return cli.UsageErrorf("--namespace: %w", err)
	}
	if t.Timeout <= 0 {
		return cli.UsageErrorf("--timeout %v is not positive", t.Timeout)
	}
	return nil
}

// Ask sends a request to an indexer within --timeout. A request that is too large for a message of NATS is repeated
// over HTTP if --http is given.
func Ask[T any](
	ctx context.Context, t *Target, request func(context.Context, *client.Client) (T, error),
) (answer T, err error) {
	if err := t.Check(); err != nil {
		return answer, err
	}
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	c, err := t.Open(ctx)
	if err != nil {
		return answer, err
	}
	defer c.Close()
	answer, err = request(ctx, c.Client)
	err = Denied(err)
	if client.CodeOf(err) == api.CodeTooLarge && c.Conn != nil {
		if over, bad := t.OverHTTP(); bad == nil && over != nil {
			return request(ctx, over)
		}
	}
	return answer, err
}

// SetTimeout changes the default and the help text of --timeout.
func (t *Target) SetTimeout(def time.Duration, help string) {
	f := t.flags.Lookup("timeout")
	t.Timeout, f.DefValue, f.Usage = def, def.String(), help
}

// Denied adds the missing flag or right to the error of a forbidden subject.
func Denied(err error) error {
	if err == nil || cli.RefusalAdvice(err) == "" {
		return err
	}
	return fmt.Errorf("%w; what to do: %s", err, cli.RefusalAdvice(err))
}

// Show sends a request to an indexer, and prints the answer as JSON or with print. With --json, it also prints the
// error of an indexer as JSON.
func Show[T any](
	ctx context.Context, t *Target, request func(context.Context, *client.Client) (T, error), print func(io.Writer, T),
) (answer T, err error) {
	if answer, err = Ask(ctx, t, request); err != nil {
		return answer, t.Refused(err)
	}
	return answer, t.Print(answer, func(w io.Writer) { print(w, answer) })
}

// Print prints an answer to standard output, as JSON with --json and otherwise with print.
func (t *Target) Print(answer any, print func(io.Writer)) error {
	if t.JSON {
		return cli.PrintJSON(os.Stdout, answer)
	}
	return Buffered(os.Stdout, print)
}

// Buffered calls print with a buffer before a writer, and returns the first error of the writer.
func Buffered(to io.Writer, print func(io.Writer)) error {
	w := bufio.NewWriter(to)
	print(w)
	return w.Flush()
}

// Refused returns the error. With --json, it first prints the error of an indexer as JSON.
func (t *Target) Refused(err error) error {
	if failure, is := errors.AsType[*api.Error](err); is && t.JSON {
		if err := cli.PrintJSON(os.Stdout, api.ErrorBody{Error: failure}); err != nil {
			return err
		}
	}
	return err
}

// Connect connects to NATS with JetStream. Each request waits for at most --timeout.
func (t *Target) Connect(ctx context.Context) (*jetstream.Conn, error) {
	conn, err := t.NATS.Connect(ctx, connection, t.Timeout)
	return conn, Denied(err)
}

// ReachNATS connects to NATS with JetStream. The context of do ends after --timeout.
func (t *Target) ReachNATS(ctx context.Context, do func(context.Context, *jetstream.Conn) error) error {
	if err := t.Check(); err != nil {
		return err
	}
	opening, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	conn, err := t.Connect(opening)
	if err != nil {
		return err
	}
	defer conn.Close()
	return do(opening, conn)
}

// Reach connects to NATS and opens the namespace, for a command that needs no indexer. The context of do has no
// deadline, but each request to JetStream waits for at most --timeout.
func (t *Target) Reach(ctx context.Context, do func(context.Context, *jetstream.Namespace) error) error {
	return t.ReachNATS(ctx, func(opening context.Context, conn *jetstream.Conn) error {
		ns, err := jetstream.OpenNamespace(opening, conn, t.Namespace)
		if err == nil {
			err = do(ctx, ns)
		}
		err = Denied(err)
		if errors.Is(err, jetstream.ErrUnavailable) && !errors.Is(err, jetstream.ErrNoLeader) && conn.Connected() {
			return fmt.Errorf("%w: %w", jetstream.ErrNoLeader, err)
		}
		return err
	})
}

// ShowStored opens the namespace for do, as [Target.Reach], and prints the result as JSON or with print.
func ShowStored[T any](
	ctx context.Context, t *Target, do func(context.Context, *jetstream.Namespace) (T, error), print func(io.Writer, T),
) (result T, err error) {
	err = t.Reach(ctx, func(ctx context.Context, ns *jetstream.Namespace) (err error) {
		if result, err = do(ctx, ns); err != nil {
			return err
		}
		return t.Print(result, func(w io.Writer) { print(w, result) })
	})
	return result, err
}
