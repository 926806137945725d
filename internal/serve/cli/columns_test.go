package cli

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// TestColumns: the heading, the help, the manual page and the Markdown of a command have the same columns.
func TestColumns(t *testing.T) {
	more := Column{"BUSY", "share of the time with work, " + strings.Repeat("and more ", 20)}
	base := Columns{Row: "rank", List: []Column{{"", ""}, {"WORKER", "name of the worker"}}}
	all := base.And(more)
	if len(base.List) != 2 || len(all.List) != 3 {
		t.Fatalf("%d and %d columns", len(base.List), len(all.List))
	}
	var b strings.Builder
	if err := all.Table(&b, [][]any{{"*", "w1", 1}}); err != nil || !strings.HasPrefix(b.String(), "   WORKER  BUSY\n") {
		t.Errorf("%v, %q", err, b.String())
	}
	cmd := Explain(&cobra.Command{Use: "x", Run: func(*cobra.Command, []string) {}}, base, all)
	cmd.SetUsageFunc(printUsage)
	usage := cmd.UsageString()
	for _, text := range []string{usage, manPage(cmd), markdownOf(cmd)} {
		if strings.Count(text, "WORKER") != 2 || strings.Count(text, "name of the worker") != 2 ||
			strings.Count(text, "BUSY") != 1 || strings.Count(text, "row for each rank") != 2 {
			t.Errorf("columns are missing:\n%s", text)
		}
	}
	for line := range strings.Lines(usage) {
		if len(line) > usageColumns+1 {
			t.Errorf("a line of the help has %d columns: %s", len(line), line)
		}
	}
}

// TestDefine: the Markdown of a command has the list of names as a block.
func TestDefine(t *testing.T) {
	cmd := &cobra.Command{Use: "x", Run: func(*cobra.Command, []string) {}}
	if text := markdownOf(cmd); strings.Contains(text, "Arms") {
		t.Error(text)
	}
	Define(cmd, "Arms", "\n  random   knows nothing\n  sticky   one worker\n")
	const want = "Arms:\n\n    random   knows nothing\n    sticky   one worker\n\n"
	if text := markdownOf(cmd); !strings.Contains(text, want) {
		t.Error(text)
	}
}
