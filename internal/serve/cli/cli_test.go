package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

func TestSettingsComeFromFlagThenEnvironmentThenFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "settings.yaml")
	if err := os.WriteFile(file, []byte("a: file\nb: file\nc: file\nlist: [x, y]\nelsewhere: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KVATLAS_A", "env")
	t.Setenv("KVATLAS_B", "env")
	t.Setenv("NATS_URL", "nats://env")
	got := map[string]string{}
	root := &cobra.Command{Use: "p"}
	sub := &cobra.Command{Use: "do", RunE: func(cmd *cobra.Command, _ []string) error {
		for _, name := range []string{"a", "b", "c", "d", "nats", "list"} {
			got[name] = cmd.Flags().Lookup(name).Value.String()
		}
		return nil
	}}
	for _, name := range []string{"a", "b", "c", "d", "nats"} {
		sub.Flags().String(name, "default", "")
	}
	sub.Flags().StringSlice("list", nil, "")
	other := &cobra.Command{Use: "other", Run: func(*cobra.Command, []string) {}}
	other.Flags().Int("elsewhere", 0, "")
	root.AddCommand(sub, other)
	root.SetArgs([]string{"do", "--config", file, "--a", "flag"})
	if status := Main(root); status != 0 {
		t.Fatalf("status %d", status)
	}
	want := map[string]string{"a": "flag", "b": "env", "c": "file", "d": "default", "nats": "nats://env",
		"list": "[x,y]"}
	for name, v := range want {
		if got[name] != v {
			t.Errorf("%s is %q, want %q", name, got[name], v)
		}
	}
}

// TestRenamedFlags: an old name works in all sources, with the priority of the source, and help shows only the new
// name.
func TestRenamedFlags(t *testing.T) {
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "settings.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, c := range []struct {
		env  map[string]string
		args []string
		want string
	}{
		{nil, nil, "default"},
		{nil, []string{"--old", "1"}, "1"},
		{nil, []string{"--old=1"}, "1"},
		{nil, []string{"--new", "1"}, "1"},
		{map[string]string{"KVATLAS_OLD": "1"}, nil, "1"},
		{map[string]string{"KVATLAS_OLD": "1", "KVATLAS_NEW": "2"}, nil, "2"},
		{map[string]string{"KVATLAS_NEW": "2"}, []string{"--old", "1"}, "1"},
		{map[string]string{"KVATLAS_OLD": "2"}, []string{"--new", "1"}, "1"},
		{nil, []string{"--config", file("old: 1")}, "1"},
		{nil, []string{"--config", file("old: 1\nnew: 2")}, "2"},
		{nil, []string{"--config", file("new: 2\nold: 1")}, "2"},
		{nil, []string{"--config", file("new: 2"), "--old", "1"}, "1"},
		{map[string]string{"KVATLAS_OLD": "1"}, []string{"--config", file("new: 2")}, "1"},
	} {
		for name, value := range c.env {
			os.Setenv(name, value)
		}
		got := ""
		root := &cobra.Command{Use: "p"}
		sub := &cobra.Command{Use: "do"}
		value := sub.Flags().String("new", "default", "")
		OldFlag(sub.Flags(), "old", "new")
		sub.RunE = func(*cobra.Command, []string) error { got = *value; return nil }
		root.AddCommand(sub)
		root.SetArgs(append([]string{"do"}, c.args...))
		if status := Main(root); status != 0 || got != c.want {
			t.Errorf("%v %v: status %d, the setting is %q, want %q", c.env, c.args, status, got, c.want)
		}
		for name := range c.env {
			os.Unsetenv(name)
		}
		if usage := sub.Flags().FlagUsages(); strings.Contains(usage, "--old") || !strings.Contains(usage, "--new") {
			t.Errorf("help shows: %s", usage)
		}
	}
}

func TestExitStatus(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("no-such-setting: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want int
	}{
		{[]string{"ok"}, 0},
		{[]string{"fail"}, 1},
		{[]string{"nonsense"}, 2},
		{[]string{"nocommand"}, 2},
		{[]string{"group", "nocommand"}, 2},
		{[]string{"group"}, 0},
		{[]string{"completion", "bash"}, 0},
		{[]string{"completion", "tcsh"}, 2},
		{[]string{"ok", "--no-such-flag"}, 2},
		{[]string{"ok", "--n", "x"}, 2},
		{[]string{"ok", "extra"}, 2},
		{[]string{"ok", "--config", bad}, 2},
	} {
		root := &cobra.Command{Use: "p"}
		ok := &cobra.Command{Use: "ok", Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error { return nil }}
		ok.Flags().Int("n", 0, "")
		Group(root, ok, Group(&cobra.Command{Use: "group"},
			&cobra.Command{Use: "member", Run: func(*cobra.Command, []string) {}}),
			&cobra.Command{Use: "fail", RunE: func(*cobra.Command, []string) error { return os.ErrNotExist }},
			&cobra.Command{Use: "nonsense",
				RunE: func(*cobra.Command, []string) error { return UsageErrorf("--x is odd") }},
		)
		root.SetArgs(c.args)
		if got := Main(root); got != c.want {
			t.Errorf("%v ends with %d, want %d", c.args, got, c.want)
		}
	}
}

func TestErrorsAreOneLine(t *testing.T) {
	for text, want := range map[string]string{
		"plain": "plain", "one\ntwo": "one; two",
		"unknown \"quer\"\n\nDid you mean this?\n\tquery\n\n": "unknown \"quer\"; Did you mean this? query",
	} {
		if got := oneLine(text); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
