package remote

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/client"
)

// Request is the request of a command to a running indexer.
type Request[T any] struct {
	// Flags are the flags of the command, in addition to the flags of [Flags].
	Flags cli.Flags

	// Check completes the request from the flags and the arguments, before the connection. Every error is a usage error.
	// nil: the flags are the request.
	Check func(cmd *cobra.Command, args []string) error

	// Send sends the request. [Call] and [Get] make it.
	Send func(context.Context, *client.Client) (T, error)

	// Print prints the answer, without --json.
	Print func(io.Writer, T)

	// Columns are the columns of the tables that Print prints.
	Columns []cli.Columns

	// Judge returns an error for an answer with a failure, after Print. nil: every answer is a success.
	Judge func(T) error
}

// Command returns a command that sends a request to a running indexer and prints the answer. Without cmd.Args the
// command has no arguments.
func Command[T any](cmd *cobra.Command, r Request[T]) *cobra.Command {
	t := Flags(cmd)
	r.Flags.Add(cmd.Flags())
	cli.Explain(cmd, r.Columns...)
	cli.Output[T](cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := r.check(cmd, args); err != nil {
			return t.Refused(err)
		}
		answer, err := Show(cmd.Context(), t, r.Send, r.Print)
		if err == nil && r.Judge != nil {
			err = r.Judge(answer)
		}
		return err
	}
	return cmd
}

// check checks the flags of the command, and completes the request.
func (r *Request[T]) check(cmd *cobra.Command, args []string) error {
	var wrong cli.Complaints
	r.Flags.Check(&wrong)
	if err := wrong.Usage(); err != nil || r.Check == nil {
		return err
	}
	if err := r.Check(cmd, args); err != nil {
		return cli.UsageErrorf("%w", err)
	}
	return nil
}

// Call returns a function that calls a method of a client with a request.
func Call[Q, T any](method func(*client.Client, context.Context, Q) (T, error), q Q) func(context.Context,
	*client.Client) (T, error) {
	return func(ctx context.Context, c *client.Client) (T, error) { return method(c, ctx, q) }
}

// Get returns a function that calls a method of a client without a request.
func Get[T any](method func(*client.Client, context.Context) (T, error)) func(context.Context, *client.Client) (T,
	error) {
	return func(ctx context.Context, c *client.Client) (T, error) { return method(c, ctx) }
}
