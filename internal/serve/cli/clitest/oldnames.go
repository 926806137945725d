// Package clitest checks the command line of a program: old names, help and completion.
package clitest

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

// OldNames checks every old name of a program: an old flag sets the new flag from the command line, the environment and
// a settings file, an old command runs, and a single warning has the old name, the new name and the remedy. Help and
// completion omit old names. root creates the program's commands. OldNames returns the old names of flags, as
// "COMMAND --OLD", and of commands.
func OldNames(t *testing.T, root func() *cobra.Command) (names []string) {
	t.Helper()
	walk(root(), func(cmd *cobra.Command) {
		path := strings.Fields(cmd.CommandPath())[1:]
		for _, old := range cmd.Aliases {
			names = append(names, cmd.Parent().CommandPath()+" "+old)
			oldCommand(t, root, append(slices.Clone(path[:len(path)-1]), old), cmd.CommandPath())
		}
		if cmd.Hidden {
			names = append(names, cmd.CommandPath())
			oldCommand(t, root, path, "indexer ")
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if name, is := strings.CutPrefix(f.Usage, "old name of --"); is {
				names = append(names, cmd.CommandPath()+" --"+f.Name)
				oldFlag(t, root, path, f.Name, name)
			}
		})
	})
	return names
}

// walk visits a command and its subcommands.
func walk(cmd *cobra.Command, visit func(*cobra.Command)) {
	visit(cmd)
	for _, sub := range cmd.Commands() {
		walk(sub, visit)
	}
}

// values are values of flags that differ from all defaults, by type.
var values = map[string]string{"string": "x", "int": "5", "uint32": "7", "duration": "7s", "bool": "true",
	"stringSlice": "x"}

// oldFlag checks the old name of a flag.
func oldFlag(t *testing.T, root func() *cobra.Command, path []string, old, name string) {
	t.Helper()
	value := values[find(t, root(), path).Flags().Lookup(name).Value.Type()]
	if value == "" {
		t.Fatalf("--%s has a type without a value here", name)
	}
	variable := func(flag string) string { return "KVATLAS_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_")) }
	file := filepath.Join(t.TempDir(), "settings.yaml")
	if err := os.WriteFile(file, []byte(old+": "+value+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, source := range []struct {
		args     []string
		variable string
		old, new string // in the warning
	}{
		{[]string{"--" + old + "=" + value}, "", "--" + old, "--" + name},
		{nil, variable(old), variable(old), variable(name)},
		{[]string{"--config", file}, "", old + " in " + file, name},
	} {
		if source.variable != "" {
			t.Setenv(source.variable, value)
		}
		got := ""
		status, said := run(t, root(), append(slices.Clone(path), source.args...), func(cmd *cobra.Command) {
			if f := cmd.Flags().Lookup(name); f.Changed {
				got = strings.Trim(f.Value.String(), "[]")
			}
		})
		if status != 0 || got != value {
			t.Errorf("%q %s: status %d, --%s is %q, want %q: %s", path, source.old, status, name, got, value, said)
		}
		warned(t, said, source.old, source.new)
		if source.variable != "" {
			os.Unsetenv(source.variable)
		}
	}
	if usage := find(t, root(), path).UsageString(); strings.Contains(usage, "--"+old+" ") {
		t.Errorf("the help of %q has --%s", path, old)
	}
	if offered := Complete(t, root(), append(slices.Clone(path), "--"+old)...); slices.Contains(offered, "--"+old) {
		t.Errorf("completion of %q offers --%s", path, old)
	}
}

// oldCommand checks the old name of a command.
func oldCommand(t *testing.T, root func() *cobra.Command, path []string, new string) {
	t.Helper()
	ran := false
	if status, said := run(t, root(), path, func(*cobra.Command) { ran = true }); status != 0 || !ran {
		t.Errorf("%q: status %d: %s", path, status, said)
	} else {
		warned(t, said, strings.Join(path, " "), new)
	}
	parent, last := path[:len(path)-1], path[len(path)-1]
	if strings.Contains(find(t, root(), parent).UsageString(), "\n  "+last+" ") {
		t.Errorf("the help of %q has the old name %s", parent, last)
	}
	if offered := Complete(t, root(), path...); slices.Contains(offered, last) {
		t.Errorf("completion of %q offers the old name %s", parent, last)
	}
}

// warned checks that a standard error is one warning.
func warned(t *testing.T, said, old, new string) {
	t.Helper()
	remedy := strings.Contains(said, "what_to_do=") || strings.Contains(said, "what to do:")
	if strings.Count(said, "\n") != 1 || !remedy || !strings.Contains(said, old) || !strings.Contains(said, new) {
		t.Errorf("the warning about %q, now %q, is %q", old, new, said)
	}
}

// find returns the command of a path.
func find(t *testing.T, root *cobra.Command, path []string) *cobra.Command {
	t.Helper()
	cmd, _, err := root.Find(path)
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}

// run runs a command line without the work of the command, and returns the exit status and the standard error. did is
// called in place of the work.
func run(t *testing.T, root *cobra.Command, args []string, did func(*cobra.Command)) (status int, said string) {
	t.Helper()
	walk(root, func(cmd *cobra.Command) {
		cmd.Args = nil
		cmd.RunE = func(cmd *cobra.Command, _ []string) error { did(cmd); return nil }
	})
	root.SetArgs(args)
	said = standardError(t, func() { status = cli.Main(root) })
	return status, said
}

// standardError returns the standard error of do.
func standardError(t *testing.T, do func()) string {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	before := os.Stderr
	os.Stderr = f
	defer func() { os.Stderr = before }()
	do()
	text, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Complete returns the words that shell completion offers for the last word of a command line.
func Complete(t *testing.T, root *cobra.Command, args ...string) (words []string) {
	t.Helper()
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetArgs(append([]string{cobra.ShellCompRequestCmd}, args...))
	if said := standardError(t, func() {
		if status := cli.Main(root); status != 0 {
			t.Errorf("completion of %q: status %d", args, status)
		}
	}); strings.Contains(said, "rror:") {
		t.Errorf("completion of %q: %s", args, said)
	}
	for line := range strings.Lines(out.String()) {
		word, _, _ := strings.Cut(strings.TrimRight(line, "\n"), "\t")
		if !strings.HasPrefix(word, ":") { // the directive for the shell
			words = append(words, word)
		}
	}
	return words
}
