package cli

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// KnownNames are the usual environment variables of NATS and OpenTelemetry, by flag.
var KnownNames = map[string]string{
	"nats": "NATS_URL", "nats-creds": "NATS_CREDS", "nats-nkey": "NATS_NKEY", "nats-user": "NATS_USER",
	"nats-password": "NATS_PASSWORD",
	"nats-token":    "NATS_TOKEN", "nats-cert": "NATS_CERT", "nats-key": "NATS_KEY", "nats-ca": "NATS_CA",
	"otlp-endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT",
}

// variable returns the environment variable of a flag.
func variable(flag string) string {
	return "KVATLAS_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// settings are the values of a command's flags from the environment and the file.
type settings struct {
	flags *pflag.FlagSet
	errs  []error
	old   []oldName // old names in use
}

// Fill sets the flags of a command that are missing on the command line: from the environment, then from the file of
// --config.
func Fill(cmd *cobra.Command) error {
	_, err := fillFlags(cmd)
	return err
}

// fillFlags is Fill. It returns the old names in use, of all sources.
func fillFlags(cmd *cobra.Command) ([]oldName, error) {
	s := &settings{flags: cmd.Flags(), old: oldOnLine(cmd)}
	s.environment()
	if path, _ := cmd.Flags().GetString("config"); path != "" {
		s.file(path, func(name string) bool { return knownElsewhere(cmd.Root(), name) })
	}
	return s.old, errors.Join(s.errs...)
}

// set sets a flag with a value of a source.
func (s *settings) set(f *pflag.Flag, value, source string) {
	if err := s.flags.Set(f.Name, value); err != nil {
		s.errs = append(s.errs, fmt.Errorf("%s: invalid value %q for --%s: %w", source, value, f.Name, err))
	}
}

// missing reports whether no source has set a flag, or a flag that excludes it.
func (s *settings) missing(f *pflag.Flag) bool {
	return !f.Changed && !slices.ContainsFunc(f.Annotations[exclusive], s.flags.Changed)
}

// environment reads the variables. The variable of the new name has priority over the variables of old names.
func (s *settings) environment() {
	old := oldFlags(s.flags)
	s.flags.VisitAll(func(f *pflag.Flag) {
		if current(s.flags, f) != f || !s.missing(f) {
			return
		}
		for _, name := range []string{variable(f.Name), KnownNames[f.Name]} {
			if value := os.Getenv(name); value != "" {
				s.set(f, value, name)
				return
			}
		}
		for _, name := range old[f.Name] {
			if value := os.Getenv(variable(name)); value != "" {
				s.old = append(s.old, oldName{variable(name), variable(f.Name)})
				s.set(f, value, variable(name))
				return
			}
		}
	})
}

// file reads the settings in a YAML file. elsewhere reports whether a setting belongs to other commands.
func (s *settings) file(path string, elsewhere func(name string) bool) {
	data, err := os.ReadFile(path)
	if err != nil {
		s.errs = append(s.errs, fmt.Errorf("read the settings: %w", err))
		return
	}
	var values map[string]any
	if err := yaml.Unmarshal(data, &values); err != nil {
		s.errs = append(s.errs, fmt.Errorf("read the settings in %s: %w", path, err))
		return
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		given := s.flags.Lookup(name)
		if given == nil {
			if !elsewhere(name) {
				s.errs = append(s.errs, fmt.Errorf("%s: unknown setting %q", path, name))
			}
			continue
		}
		f := current(s.flags, given)
		if !s.missing(f) || f != given && values[f.Name] != nil { // the file also contains the new name
			continue
		}
		if f != given {
			s.old = append(s.old, oldName{fmt.Sprintf("%s in %s", name, path), f.Name})
		}
		s.set(f, settingText(values[name]), path)
	}
}

// settingText converts a value of a YAML file to the value of a flag.
func settingText(value any) string {
	list, ok := value.([]any)
	if !ok {
		return fmt.Sprint(value)
	}
	words := make([]string, len(list))
	for i, v := range list {
		words[i] = fmt.Sprint(v)
	}
	return strings.Join(words, ",")
}

const exclusive = "kvatlas_exclusive" // annotation of a flag: the excluded flag

// Exclusive makes two flags mutually exclusive: if one is set, a source of lower priority cannot set the other.
func Exclusive(flags *pflag.FlagSet, a, b string) {
	for _, pair := range [][2]string{{a, b}, {b, a}} {
		if err := flags.SetAnnotation(pair[0], exclusive, []string{pair[1]}); err != nil {
			panic(err) // no such flag
		}
	}
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
