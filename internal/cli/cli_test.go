package cli

import (
	"os"
	"path/filepath"
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
