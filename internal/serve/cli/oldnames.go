package cli

import (
	"io"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Programs accept the old name of a flag or a command for one release: on the command line, in the environment and in
// the file of --config. Help, completion, manual pages and docs/reference.md have only the new name. A program logs all
// old names in use in a single warning.

// newName is the annotation of an old name: the new name of the flag, or the new command.
const newName = "kvatlas_new_name"

// oldName is an old name in use, with the new name.
type oldName struct{ old, new string }

// Old adds old names of a flag.
func (f Flag) Old(names ...string) Flag {
	add := f.add
	f.add = func(flags *pflag.FlagSet) {
		add(flags)
		for _, old := range names {
			OldFlag(flags, old, f.name)
		}
	}
	return f
}

// OldFlag adds an old name of a flag that is in no table.
func OldFlag(flags *pflag.FlagSet, old, name string) {
	f := flags.Lookup(name)
	flags.AddFlag(&pflag.Flag{
		Name: old, Usage: "old name of --" + name, Hidden: true, Annotations: map[string][]string{newName: {name}},
		Value: &oldValue{f.Value, flags, name}, DefValue: f.DefValue, NoOptDefVal: f.NoOptDefVal,
	})
}

// oldValue is the value of an old flag. Set sets the new flag.
type oldValue struct {
	pflag.Value
	flags *pflag.FlagSet
	name  string
}

func (v *oldValue) Set(text string) error { return v.flags.Set(v.name, text) }

// OldCommand adds old names of a command.
func OldCommand(cmd *cobra.Command, names ...string) *cobra.Command {
	cmd.Aliases = append(cmd.Aliases, names...)
	return cmd
}

// MovedCommand hides an old command with another place than its successor. to describes the successor for the warning.
func MovedCommand(cmd *cobra.Command, to string) *cobra.Command {
	cmd.Hidden = true
	cmd.Annotations = map[string]string{newName: to}
	return cmd
}

// current returns the flag of a name: the new flag for an old flag, otherwise the flag itself.
func current(flags *pflag.FlagSet, f *pflag.Flag) *pflag.Flag {
	if name := f.Annotations[newName]; name != nil {
		return flags.Lookup(name[0])
	}
	return f
}

// oldFlags returns the old names of flags, by new name.
func oldFlags(flags *pflag.FlagSet) map[string][]string {
	list := map[string][]string{}
	flags.VisitAll(func(f *pflag.Flag) {
		if to := current(flags, f); to != f {
			list[to.Name] = append(list[to.Name], f.Name)
		}
	})
	return list
}

// oldOnLine returns the old names on the command line.
func oldOnLine(cmd *cobra.Command) (list []oldName) {
	if to := cmd.Annotations[newName]; to != "" {
		list = append(list, oldName{cmd.CommandPath(), to})
	}
	if as := cmd.CalledAs(); as != "" && as != cmd.Name() && cmd.HasParent() {
		list = append(list, oldName{cmd.Parent().CommandPath() + " " + as, cmd.CommandPath()})
	}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if to := current(cmd.Flags(), f); to != f {
			list = append(list, oldName{"--" + f.Name, "--" + to.Name})
		}
	})
	return list
}

// warnOld writes a single warning about all old names in use: to the log of a command with a log, otherwise as a line.
func warnOld(cmd *cobra.Command, w io.Writer, list []oldName) {
	if len(list) == 0 {
		return
	}
	var old, remedies []string
	for _, n := range list {
		old = append(old, n.old)
		remedies = append(remedies, n.new+" in place of "+n.old)
	}
	const event = "the next release does not accept these old names"
	names, todo := strings.Join(old, ", "), "use "+strings.Join(remedies, ", ")
	if log := logOf(cmd, w); log != nil {
		log.Warn(event, "names", names, "what_to_do", todo)
		return
	}
	Fprintf(w, "%s: warning: %s: %s; what to do: %s\n", cmd.CommandPath(), event, names, todo)
}

// logOf returns the logger of a command with the flags of [LogFlags]; nil without valid flags.
func logOf(cmd *cobra.Command, w io.Writer) *slog.Logger {
	level, format := cmd.Flags().Lookup("log-level"), cmd.Flags().Lookup("log-format")
	if level == nil || format == nil {
		return nil
	}
	log, err := newLog(w, level.Value.String(), format.Value.String())
	if err != nil {
		return nil // the command reports the error
	}
	return log
}
