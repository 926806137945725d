// Package cli is what both programs share at the command line: where a setting comes from, how a result is printed,
// what an exit status means.
//
// A setting is looked for as a flag, then in the environment, then in the file that --config names, then its default is
// taken. The flag --snapshot-interval is KVATLAS_SNAPSHOT_INTERVAL in the environment and snapshot-interval in the
// file, which is YAML (so JSON will do). Settings of the NATS connection also have the names that NATS users know:
// NATS_URL, NATS_CREDS, NATS_NKEY, NATS_USER, NATS_PASSWORD, NATS_TOKEN, NATS_CERT, NATS_KEY, NATS_CA. Those of traces
// have the names that OpenTelemetry users know, such as OTEL_EXPORTER_OTLP_ENDPOINT.
//
// Exit status: 0 success; 1 it failed, or the answer is no; 2 what was given makes no sense, whoever is asked: the
// command line, a setting, a name that cannot be one, a file to be read that is not there or not what it should be. So
// 2 says: mend what was given; to try again is useless. 3, of `indexer doctor` alone: nothing was found, and not all
// could be looked at.
package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// usageError is something given that makes no sense.
type usageError struct{ error }

func (u usageError) Unwrap() error { return u.error }

// UsageErrorf makes the error of something given that makes no sense: it ends the program with status 2.
func UsageErrorf(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// Complaints are what is wrong with a command's flags.
type Complaints []error

// When adds a complaint if something is wrong.
func (c *Complaints) When(wrong bool, format string, args ...any) {
	if wrong {
		*c = append(*c, fmt.Errorf(format, args...))
	}
}

// About adds what is wrong with a flag, unless err is nil.
func (c *Complaints) About(flag string, err error) { c.When(err != nil, "%s: %w", flag, err) }

// Usage is an error of usage with all complaints; nil if there are none.
func (c *Complaints) Usage() error {
	if err := errors.Join(*c...); err != nil {
		return UsageErrorf("%w", err)
	}
	return nil
}

// unableError is that something could not be found out.
type unableError struct{ error }

// UnableErrorf makes the error of a question that has no answer: it ends the program with status 3.
func UnableErrorf(format string, args ...any) error { return unableError{fmt.Errorf(format, args...)} }

// KnownNames are the environment variables, by flag, that users of NATS and of OpenTelemetry know.
var KnownNames = map[string]string{
	"nats": "NATS_URL", "nats-creds": "NATS_CREDS", "nats-nkey": "NATS_NKEY", "nats-user": "NATS_USER",
	"nats-password": "NATS_PASSWORD",
	"nats-token":    "NATS_TOKEN", "nats-cert": "NATS_CERT", "nats-key": "NATS_KEY", "nats-ca": "NATS_CA",
	"otlp-endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT",
}

// Main runs a program's root command and returns its exit status. The command's context ends at SIGINT or SIGTERM; a
// second one kills.
func Main(root *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	running := false
	root.Version = Version()
	root.AddCommand(versionCommand(), manCommand())
	root.SilenceErrors, root.SilenceUsage = true, true
	root.PersistentFlags().String("config", "", "file of settings, YAML; flags and environment are stronger")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := fillFlags(cmd); err != nil {
			return err
		}
		running = true
		return nil
	}
	refuseUnknownShells(root)
	root.SetUsageFunc(usage)
	cmd, err := root.ExecuteContextC(ctx)
	said := ""
	if err != nil {
		said = oneLine(err.Error())
	}
	switch _, usage := errors.AsType[usageError](err); {
	case err == nil:
		return 0
	case !running || usage || errors.Is(err, jetstream.ErrBadName):
		Fprintf(os.Stderr, "%s: %s (see %s --help)\n", cmd.CommandPath(), said, cmd.CommandPath())
		return 2
	}
	Fprintf(os.Stderr, "%s: %s\n", cmd.CommandPath(), said)
	if _, unable := errors.AsType[unableError](err); unable {
		return 3
	}
	return 1
}

// oneLine joins the lines of an error, without blank ones; what follows a question stands behind it.
func oneLine(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		switch said := b.String(); {
		case strings.HasSuffix(said, "?"):
			b.WriteByte(' ')
		case said != "":
			b.WriteString("; ")
		}
		b.WriteString(line)
	}
	return b.String()
}

// refuseUnknownShells has cobra's completion command refuse a shell that it does not know, as other groups do.
func refuseUnknownShells(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() == "completion" {
			cmd.Args = nil
			Group(cmd)
		}
	}
}

// Group makes a command that only holds others: alone it prints its help, and with a word that is none of its commands
// it says so.
func Group(cmd *cobra.Command, subs ...*cobra.Command) *cobra.Command {
	cmd.AddCommand(subs...)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			return UsageErrorf("unknown command %q", args[0])
		}
		return cmd.Help()
	}
	return cmd
}

// variable is the environment variable of a flag.
func variable(flag string) string {
	return "KVATLAS_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// fillFlags fills in the flags that the command line left out, from the environment, then from the file.
func fillFlags(cmd *cobra.Command) error {
	set := func(f *pflag.Flag, value, from string) error {
		if err := cmd.Flags().Set(f.Name, value); err != nil {
			return fmt.Errorf("%s: %q does not fit --%s: %w", from, value, f.Name, err)
		}
		return nil
	}
	var errs []error
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Changed || overruled(cmd, f) {
			return
		}
		names := []string{variable(f.Name), KnownNames[f.Name]}
		for _, old := range f.Annotations[oldNames] {
			names = append(names, variable(old))
		}
		for _, name := range names {
			if value, ok := os.LookupEnv(name); ok && name != "" && value != "" {
				errs = append(errs, set(f, value, name))
				return
			}
		}
	})
	path, _ := cmd.Flags().GetString("config")
	if path == "" {
		return errors.Join(errs...)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return errors.Join(append(errs, fmt.Errorf("read the settings: %w", err))...)
	}
	var settings map[string]any
	if err := yaml.Unmarshal(data, &settings); err != nil {
		return errors.Join(append(errs, fmt.Errorf("read the settings in %s: %w", path, err))...)
	}
	for name, value := range settings {
		f := cmd.Flags().Lookup(name)
		if f != nil && f.Name != name && settings[f.Name] != nil {
			continue // the file has the new name too
		}
		switch {
		case f == nil && !knownElsewhere(cmd.Root(), name):
			errs = append(errs, fmt.Errorf("%s: there is no setting %q", path, name))
		case f != nil && !f.Changed && !overruled(cmd, f):
			text := fmt.Sprint(value)
			if list, ok := value.([]any); ok {
				words := make([]string, len(list))
				for i, v := range list {
					words[i] = fmt.Sprint(v)
				}
				text = strings.Join(words, ",")
			}
			errs = append(errs, set(f, text, path))
		}
	}
	return errors.Join(errs...)
}

const oldNames = "kvatlas_old_names"

// Renamed keeps the old names of flags, as keys of renamed, where settings are read: command line, environment, file.
// Help shows the new names alone. In the environment and in a file the new name wins over the old one.
func Renamed(flags *pflag.FlagSet, renamed map[string]string) {
	for old, name := range renamed {
		if err := flags.SetAnnotation(name, oldNames, []string{old}); err != nil {
			panic(err) // there is no such flag
		}
	}
	flags.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(cmp.Or(renamed[name], name))
	})
}

const exclusive = "kvatlas_exclusive"

// Exclusive says that two flags exclude each other: where one is set, a weaker source cannot set the other.
func Exclusive(flags *pflag.FlagSet, a, b string) {
	for _, pair := range [][2]string{{a, b}, {b, a}} {
		if err := flags.SetAnnotation(pair[0], exclusive, []string{pair[1]}); err != nil {
			panic(err) // there is no such flag
		}
	}
}

// overruled reports whether a flag that excludes f is set.
func overruled(cmd *cobra.Command, f *pflag.Flag) bool {
	for _, other := range f.Annotations[exclusive] {
		if cmd.Flags().Changed(other) {
			return true
		}
	}
	return false
}

// knownElsewhere reports whether some command of the program has the flag, so that one file serves them all.
func knownElsewhere(cmd *cobra.Command, name string) bool {
	if cmd.Flags().Lookup(name) != nil || cmd.PersistentFlags().Lookup(name) != nil {
		return true
	}
	for _, sub := range cmd.Commands() {
		if knownElsewhere(sub, name) {
			return true
		}
	}
	return false
}

// LogFlags adds the flags of a program that logs. The function that it returns makes the logger once they are parsed.
// The lines of each statement that logs are limited.
func LogFlags(flags *pflag.FlagSet) func(w io.Writer) (*slog.Logger, error) {
	level := flags.String("log-level", "info", "least level that is logged: debug, info, warn, error")
	format := flags.String("log-format", "text", "form of log lines: text or json")
	return func(w io.Writer) (*slog.Logger, error) {
		var l slog.Level
		if err := l.UnmarshalText([]byte(*level)); err != nil {
			return nil, UsageErrorf("--log-level %q is none of debug, info, warn, error", *level)
		}
		opts := &slog.HandlerOptions{Level: l}
		switch *format {
		case "text":
			return slog.New(newLimited(slog.NewTextHandler(lineWriter{w}, opts), time.Now)), nil
		case "json":
			return slog.New(newLimited(slog.NewJSONHandler(w, opts), time.Now)), nil
		}
		return nil, UsageErrorf("--log-format %q is neither text nor json", *format)
	}
}

// PrintJSON prints v as one indented JSON value.
func PrintJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// Count writes a number and a noun that takes an s in the plural.
func Count(n uint64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// Bytes writes a number of bytes for people.
func Bytes[N int64 | uint64](n N) string {
	v, units := float64(n), []string{"B", "KiB", "MiB", "GiB", "TiB"}
	for len(units) > 1 && v >= 1024 {
		v, units = v/1024, units[1:]
	}
	if units[0] == "B" {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", v, units[0])
}
