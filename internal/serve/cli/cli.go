// Package cli contains the common command-line parts of both programs: settings, output and exit statuses.
//
// The sources of a setting are the flag, the environment, the file of --config, and the default, in this order. The
// flag --snapshot-interval is KVATLAS_SNAPSHOT_INTERVAL in the environment and snapshot-interval in the file, which is
// YAML (and so may be JSON). Settings of the NATS connection also have the usual names of NATS: NATS_URL, NATS_CREDS,
// NATS_NKEY, NATS_USER, NATS_PASSWORD, NATS_TOKEN, NATS_CERT, NATS_KEY, NATS_CA. Settings of traces have the names of
// OpenTelemetry, such as OTEL_EXPORTER_OTLP_ENDPOINT. Old names of flags and commands work for a release, with a
// warning (oldnames.go).
//
// The exit statuses are 0 for success, 1 for a failure or a negative answer, and 2 for invalid input: the command line,
// a setting, an impossible name, a missing or invalid file. After status 2 the input must be corrected, and a retry is
// useless. Status 3 belongs to `indexer doctor`: the command found no errors, but some checks failed.
package cli

import (
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
)

// UsageErrorf returns an error of invalid input, which ends the program with status 2.
func UsageErrorf(format string, args ...any) error { return usage.Errorf(format, args...) }

// Complaints are the errors in a command's flags.
type Complaints = usage.Complaints

// unableError is a failed examination.
type unableError struct{ error }

// UnableErrorf returns an error for a question without an answer, which ends the program with status 3.
func UnableErrorf(format string, args ...any) error { return unableError{fmt.Errorf(format, args...)} }

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
		old, err := fillFlags(cmd)
		if err != nil {
			return err
		}
		warnOld(cmd, os.Stderr, old)
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
		return StatusOK
	case !running || invalid || errors.Is(err, jetstream.ErrBadName):
		Fprintf(os.Stderr, "%s: %s (see %s --help)\n", cmd.CommandPath(), message, cmd.CommandPath())
		return StatusUsage
	}
	Fprintf(os.Stderr, "%s: %s\n", cmd.CommandPath(), message)
	if _, unable := errors.AsType[unableError](err); unable {
		return StatusUnable
	}
	return StatusFailed
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

// LogFlags adds the flags of a program with a log. The returned function creates the logger after the flags are parsed.
// The number of lines of each log statement is limited.
func LogFlags(flags *pflag.FlagSet) func(w io.Writer) (*slog.Logger, error) {
	level := flags.String("log-level", "info", "minimum level of log lines: debug, info, warn, error")
	format := flags.String("log-format", "text", "form of log lines: text or json")
	return func(w io.Writer) (*slog.Logger, error) { return newLog(w, *level, *format) }
}

// newLog returns a logger with the values of --log-level and --log-format.
func newLog(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, UsageErrorf("--log-level %q is not debug, info, warn or error", level)
	}
	opts := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(newLimited(slog.NewTextHandler(lineWriter{w}, opts), time.Now)), nil
	case "json":
		return slog.New(newLimited(slog.NewJSONHandler(w, opts), time.Now)), nil
	}
	return nil, UsageErrorf("--log-format %q is neither text nor json", format)
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
