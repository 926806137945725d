package remote

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

const (
	completionWait = time.Second // a shell blocks meanwhile
	mostOffered    = 1000        // names
)

// namesFunc returns names of a running cluster.
type namesFunc func(context.Context, *client.Client) ([]string, error)

// flagNames are the names for the values of flags, and argumentNames for the words of usage lines.
var (
	flagNames = map[string]namesFunc{"worker": workerNames, "exclude": workerNames, "pin": workerNames,
		"model": modelNames, "node": nodeNames, "session": sessionNames}
	argumentNames = map[string]namesFunc{"WORKER": workerNames, "MODEL": modelNames, "ID": sessionNames}
)

// Complete makes shell completion offer the workers, models, nodes and sessions of the running cluster, in all commands
// with requests to indexers. Without an answer within a second, completion offers nothing and prints nothing.
func Complete(root *cobra.Command) {
	for _, cmd := range root.Commands() {
		Complete(cmd)
	}
	if f := root.Flags(); f.Lookup("namespace") == nil || f.Lookup("timeout") == nil {
		return // no requests to indexers
	}
	for flag, names := range flagNames {
		if root.Flags().Lookup(flag) != nil {
			if err := root.RegisterFlagCompletionFunc(flag, offer(names)); err != nil {
				panic(err) // registered twice
			}
		}
	}
	for i, word := range strings.Fields(root.Use) {
		if names := argumentNames[strings.Trim(word, "[]")]; names != nil && i == 1 {
			root.ValidArgsFunction = firstOnly(offer(names))
		}
	}
}

// firstOnly returns a completion function for the first argument.
func firstOnly(f cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return f(cmd, args, prefix)
	}
}

// offer returns a completion function for names.
func offer(names namesFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
		var offered []string
		for _, name := range namesNow(cmd, names) {
			// The shell inserts the word without quotes, and a name of others could be a command.
			if strings.HasPrefix(name, prefix) && escape.Operand(name) == name && len(offered) < mostOffered {
				offered = append(offered, name)
			}
		}
		return offered, cobra.ShellCompDirectiveNoFileComp
	}
}

// namesNow requests names with the connection of the command's flags and settings. It returns nil after an error.
func namesNow(cmd *cobra.Command, names namesFunc) []string {
	if cli.Fill(cmd) != nil {
		return nil
	}
	twin := &cobra.Command{}
	t := Flags(twin)
	var err error
	twin.Flags().VisitAll(func(f *pflag.Flag) {
		if given := cmd.Flags().Lookup(f.Name); given != nil && given.Changed && err == nil {
			err = twin.Flags().Set(f.Name, valueText(given.Value))
		}
	})
	t.Timeout, t.quiet = min(t.Timeout, completionWait), true
	if err != nil {
		return nil
	}
	list, err := Ask(cmd.Context(), t, func(ctx context.Context, c *client.Client) ([]string, error) {
		return names(ctx, c)
	})
	if err != nil {
		return nil
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// valueText returns the value of a flag in the form of the command line.
func valueText(v pflag.Value) string {
	if list, is := v.(pflag.SliceValue); is {
		return strings.Join(list.GetSlice(), ",")
	}
	return v.String()
}

func workerNames(ctx context.Context, c *client.Client) (names []string, err error) {
	list, err := c.Workers(ctx)
	if err != nil {
		return nil, err
	}
	for i := range list.Workers {
		names = append(names, string(list.Workers[i].Instance))
	}
	return names, nil
}

func modelNames(ctx context.Context, c *client.Client) (names []string, err error) {
	list, err := c.Workers(ctx)
	if err != nil {
		return nil, err
	}
	for i := range list.Workers {
		names = append(names, list.Workers[i].Model)
	}
	return names, nil
}

func nodeNames(ctx context.Context, c *client.Client) (names []string, err error) {
	status, err := survey.Cluster(ctx, c)
	if err != nil {
		return nil, err
	}
	for i := range status.Nodes {
		names = append(names, status.Nodes[i].Node)
	}
	return names, nil
}

func sessionNames(ctx context.Context, c *client.Client) (names []string, err error) {
	list, err := c.Sessions(ctx, &api.SessionsRequest{})
	if err != nil {
		return nil, err
	}
	for i := range list.Sessions {
		names = append(names, list.Sessions[i].ID)
	}
	return names, nil
}
