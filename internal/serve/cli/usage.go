package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// usageColumns is the width of help texts.
const usageColumns = 120

// printUsage writes the usage of a command in cobra's default form, with wrapped flag texts. It uses no template,
// because a program with text/template links every exported method of every linked type.
func printUsage(c *cobra.Command) error {
	var b strings.Builder
	b.WriteString("Usage:")
	if c.Runnable() {
		fmt.Fprintf(&b, "\n  %s", c.UseLine())
	}
	if c.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "\n  %s [command]", c.CommandPath())
	}
	if c.HasExample() {
		fmt.Fprintf(&b, "\n\nExamples:\n%s", c.Example)
	}
	b.WriteString(columnsHelp(c))
	if c.HasAvailableSubCommands() {
		b.WriteString("\n\nAvailable Commands:")
		for _, sub := range c.Commands() {
			if sub.IsAvailableCommand() || sub.Name() == "help" {
				fmt.Fprintf(&b, "\n  %-*s %s", sub.NamePadding(), sub.Name(), sub.Short)
			}
		}
	}
	for _, s := range append(sectionsOf(c.LocalFlags(), "Flags"), section{"Global Flags", c.InheritedFlags()}) {
		if text := strings.TrimRight(s.flags.FlagUsagesWrapped(usageColumns), " \n"); text != "" {
			fmt.Fprintf(&b, "\n\n%s:\n%s", s.title, text)
		}
	}
	if !c.HasParent() {
		b.WriteString(statusHelp())
	}
	if c.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "\n\nUse \"%s [command] --help\" for more information about a command.", c.CommandPath())
	}
	b.WriteString("\n")
	_, err := io.WriteString(c.OutOrStderr(), b.String())
	return err
}
