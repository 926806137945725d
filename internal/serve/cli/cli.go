// Package cli contains the common command-line parts of both programs: settings, output and exit statuses.
//
// The sources of a setting are the flag, the environment, the file of --config, and the default, in this order. The
// flag --snapshot-interval is KVATLAS_SNAPSHOT_INTERVAL in the environment and snapshot-interval in the file, which is
// YAML (and so may be JSON). Settings of the NATS connection also have the usual names of NATS: NATS_URL, NATS_CREDS,
// NATS_NKEY, NATS_USER, NATS_PASSWORD, NATS_TOKEN, NATS_CERT, NATS_KEY, NATS_CA. Settings of traces have the names of
// OpenTelemetry, such as OTEL_EXPORTER_OTLP_ENDPOINT.
//
// The exit statuses are 0 for success, 1 for a failure or a negative answer, and 2 for invalid input: the command line,
// a setting, an impossible name, a missing or invalid file. After status 2 the input must be corrected, and a retry is
// useless. Status 3 belongs to `indexer doctor`: the command found no errors, but some checks failed.
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

	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// UsageErrorf returns an error of invalid input, which ends the program with status 2.
func UsageErrorf(format string, args ...any) error { return usage.Errorf(format, args...) }

// Complaints are the errors in a command's flags.
type Complaints = usage.Complaints

// unableError is a failed examination.
type unableError struct{ error }

// UnableErrorf returns an error for a question without an answer, which ends the program with status 3.
func UnableErrorf(format string, args ...any) error { return unableError{fmt.Errorf(format, args...)} }

// KnownNames are the usual environment variables of NATS and OpenTelemetry, by flag.
var KnownNames = map[string]string{
	"nats": "NATS_URL", "nats-creds": "NATS_CREDS", "nats-nkey": "NATS_NKEY", "nats-user": "NATS_USER",
	"nats-password": "NATS_PASSWORD",
	"nats-token":    "NATS_TOKEN", "nats-cert": "NATS_CERT", "nats-key": "NATS_KEY", "nats-ca": "NATS_CA",
	"otlp-endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT",
}

// Main runs a program's root command and returns its exit status. SIGINT or SIGTERM ends the command's context; a
// second signal kills the process.
func Main(root *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	running := false
	root.Version = Version()
	root.AddCommand(versionCommand(), manCommand())
	root.SilenceErrors, root.SilenceUsage = true, true
	root.PersistentFlags().String("config", "", "file of settings, YAML; flags and environment have priority")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := fillFlags(cmd); err != nil {
			return err
		}
		running = true
		return nil
	}
	refuseUnknownShells(root)
	root.SetUsageFunc(printUsage)
	cmd, err := root.ExecuteContextC(ctx)
	message := ""
	if err != nil {
		message = oneLine(err.Error())
	}
	switch _, invalid := errors.AsType[*usage.Error](err); {
	case err == nil:
		return 0
	case !running || invalid || errors.Is(err, jetstream.ErrBadName):
		Fprintf(os.Stderr, "%s: %s (see %s --help)\n", cmd.CommandPath(), message, cmd.CommandPath())
		return 2
	}
	Fprintf(os.Stderr, "%s: %s\n", cmd.CommandPath(), message)
	if _, unable := errors.AsType[unableError](err); unable {
		return 3
	}
	return 1
}

// oneLine joins the non-blank lines of an error. The separator is a space after a question, otherwise a
// semicolon.
func oneLine(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		switch message := b.String(); {
		case strings.HasSuffix(message, "?"):
			b.WriteByte(' ')
		case message != "":
			b.WriteString("; ")
		}
		b.WriteString(line)
	}
	return b.String()
}

// refuseUnknownShells makes cobra's completion command refuse unknown shells, as other groups do.
func refuseUnknownShells(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() == "completion" {
			cmd.Args = nil
			Group(cmd)
		}
	}
}

// Group returns a command that contains other commands. Without a subcommand it prints its help, and an unknown
// subcommand is an error.
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

// variable returns the environment variable of a flag.
func variable(flag string) string {
	return "KVATLAS_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// fillFlags sets the flags that are missing on the command line, from the environment, then from the file.
func fillFlags(cmd *cobra.Command) error {
	set := func(f *pflag.Flag, value, from string) error {
		if err := cmd.Flags().Set(f.Name, value); err != nil {
			return fmt.Errorf("%s: invalid value %q for --%s: %w", from, value, f.Name, err)
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
			continue // the file also contains the new name
		}
		switch {
		case f == nil && !knownElsewhere(cmd.Root(), name):
			errs = append(errs, fmt.Errorf("%s: unknown setting %q", path, name))
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

// Renamed keeps the old names of flags, the keys of renamed, in all sources: command line, environment, file. Help
// shows only the new names. In the environment and in a file the new name has priority over the old name.
func Renamed(flags *pflag.FlagSet, renamed map[string]string) {
	for old, name := range renamed {
		if err := flags.SetAnnotation(name, oldNames, []string{old}); err != nil {
			panic(err) // no such flag
		}
	}
	flags.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(cmp.Or(renamed[name], name))
	})
}

const exclusive = "kvatlas_exclusive"

// Exclusive makes two flags mutually exclusive: if one is set, a source of lower priority cannot set the other.
func Exclusive(flags *pflag.FlagSet, a, b string) {
	for _, pair := range [][2]string{{a, b}, {b, a}} {
		if err := flags.SetAnnotation(pair[0], exclusive, []string{pair[1]}); err != nil {
			panic(err) // no such flag
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

// knownElsewhere reports whether any command of the program has the flag, so one file can serve all commands.
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

// LogFlags adds the flags of a program with a log. The returned function creates the logger after the flags are parsed.
// The number of lines of each log statement is limited.
func LogFlags(flags *pflag.FlagSet) func(w io.Writer) (*slog.Logger, error) {
	level := flags.String("log-level", "info", "minimum level of log lines: debug, info, warn, error")
	format := flags.String("log-format", "text", "form of log lines: text or json")
	return func(w io.Writer) (*slog.Logger, error) {
		var l slog.Level
		if err := l.UnmarshalText([]byte(*level)); err != nil {
			return nil, UsageErrorf("--log-level %q is not debug, info, warn or error", *level)
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

// Count formats a number and a noun with a plural s.
func Count(n uint64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// Bytes formats a number of bytes for readers.
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
