package cli

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// TestSections: help has the sections in order, each flag once, the rest at the end, and no old names.
func TestSections(t *testing.T) {
	cmd := &cobra.Command{Use: "x", Run: func(*cobra.Command, []string) {}}
	for _, name := range []string{"a", "nats", "nats-key", "rest"} {
		cmd.Flags().String(name, "", "")
	}
	OldFlag(cmd.Flags(), "nats-old", "nats-key")
	Sections(cmd.Flags(), Section{"First", []string{"nats"}}, Section{"Second", []string{"nats*", "a"}})
	cmd.SetUsageFunc(printUsage)
	text := cmd.UsageString()
	at := 0
	for _, part := range []string{"\nFirst:\n", "--nats string", "\nSecond:\n", "--a string", "--nats-key string",
		"\nFurther flags:\n", "--rest string"} {
		i := strings.Index(text[at:], part)
		if i < 0 {
			t.Fatalf("%q is missing or too early:\n%s", part, text)
		}
		at += i
	}
	if strings.Count(text, "--nats string") != 1 || strings.Contains(text, "nats-old") ||
		strings.Contains(text, "\nFlags:") {
		t.Error(text)
	}
}
