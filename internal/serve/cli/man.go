package cli

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// manCommand describes the program's commands, for man and for docs/reference.md.
func manCommand() *cobra.Command {
	markdown := false
	cmd := &cobra.Command{
		Use:   "man DIR",
		Short: "Write the manual pages of all commands into a folder",
		Long: `man writes a manual page for each command into a folder, which is made if it is not there:

  indexer man ~/.local/share/man/man1
  man indexer-serve`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 == markdown {
				return UsageErrorf("give a folder, such as ~/.local/share/man/man1, or --markdown")
			}
			return cobra.MaximumNArgs(1)(cmd, args)
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
	}
	cmd.Flags().BoolVar(&markdown, "markdown", false, "print the pages in Markdown instead")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var err error
		if !markdown {
			if err = os.MkdirAll(args[0], 0o755); err != nil {
				return fmt.Errorf("create the folder of manual pages: %w", err)
			}
		}
		each(cmd.Root(), func(c *cobra.Command) {
			switch {
			case err != nil:
			case markdown:
				_, err = io.WriteString(cmd.OutOrStdout(), markdownOf(c))
			default:
				err = os.WriteFile(filepath.Join(args[0], manName(c)+".1"), []byte(manPage(c)), 0o644)
			}
		})
		if err != nil {
			return fmt.Errorf("write manual pages: %w", err)
		}
		return nil
	}
	return cmd
}

// each visits a command and its visible subcommands, except cobra's own commands.
func each(cmd *cobra.Command, visit func(*cobra.Command)) {
	visit(cmd)
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() && sub.Name() != "completion" {
			each(sub, visit)
		}
	}
}

func manName(cmd *cobra.Command) string { return strings.ReplaceAll(cmd.CommandPath(), " ", "-") }

func long(cmd *cobra.Command) string { return strings.TrimSpace(cmp.Or(cmd.Long, cmd.Short+".")) }

// option describes a flag.
type option struct{ form, value, meaning, variables string }

// options returns the visible flags of a command, sorted by name.
func options(flags *pflag.FlagSet) (list []option) {
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Deprecated != "" || f.Name == "help" || f.Name == "version" {
			return
		}
		kind, meaning := pflag.UnquoteUsage(f)
		o := option{form: "--" + f.Name, value: f.DefValue, meaning: meaning, variables: variable(f.Name)}
		if f.Shorthand != "" {
			o.form = "-" + f.Shorthand + ", " + o.form
		}
		if kind != "" {
			o.form += " " + kind
		}
		if slices.Contains([]string{"0", "0s", "false", "[]"}, o.value) {
			o.value = ""
		}
		if other := KnownNames[f.Name]; other != "" {
			o.variables += ", " + other
		}
		list = append(list, o)
	})
	return list
}

// roff escapes text for man. Indented lines stay unchanged.
func roff(text string) string {
	var b strings.Builder
	asIs := false
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if indented := strings.HasPrefix(line, "  "); line != "" && indented != asIs {
			b.WriteString(map[bool]string{true: ".PP\n.nf\n", false: ".fi\n"}[indented])
			asIs = indented
		}
		if line == "" && !asIs {
			b.WriteString(".PP\n")
			continue
		}
		line = strings.NewReplacer(`\`, `\e`, "-", `\-`, "`", "").Replace(line)
		if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
			line = `\&` + line
		}
		b.WriteString(line + "\n")
	}
	if asIs {
		b.WriteString(".fi\n")
	}
	return b.String()
}

// manPage returns the manual page of a command.
func manPage(cmd *cobra.Command) string {
	var b strings.Builder
	name := manName(cmd)
	fmt.Fprintf(&b, ".TH %q 1 \"\" \"kvatlas %s\" \"kvatlas\"\n", strings.ToUpper(name), Version())
	b.WriteString(".SH NAME\n" + roff(name+" - "+cmd.Short))
	b.WriteString(".SH SYNOPSIS\n" + roff(cmd.UseLine()))
	b.WriteString(".SH DESCRIPTION\n" + roff(long(cmd)))
	for _, of := range []struct {
		heading string
		flags   *pflag.FlagSet
	}{{"OPTIONS", cmd.NonInheritedFlags()}, {"OPTIONS OF ALL COMMANDS", cmd.InheritedFlags()}} {
		list := options(of.flags)
		if len(list) == 0 {
			continue
		}
		b.WriteString(".SH " + of.heading + "\n")
		for _, o := range list {
			b.WriteString(".TP\n\\fB" + strings.TrimSpace(roff(o.form)) + "\\fR\n" + roff(o.meaning))
			if o.value != "" {
				b.WriteString(roff("(default " + o.value + ")"))
			}
			b.WriteString(".br\n" + roff("Environment: "+o.variables))
		}
	}
	if schema := cmd.Annotations[jsonSchema]; schema != "" {
		b.WriteString(".SH JSON\n" + roff(schema))
	}
	for _, table := range columnsOf(cmd) {
		b.WriteString(".SH COLUMNS\n" + roff("The table has a row for each "+table.Row+"."))
		for _, c := range table.List {
			b.WriteString(".TP\n\\fB" + strings.TrimSpace(roff(c.Name)) + "\\fR\n" + roff(c.Meaning))
		}
	}
	b.WriteString(".SH EXIT STATUS\n")
	for status, meaning := range Statuses {
		fmt.Fprintf(&b, ".TP\n%d\n%s", status, roff(meaning))
	}
	var also []string
	if cmd.HasParent() {
		also = append(also, manName(cmd.Parent()))
	}
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() && sub.Name() != "completion" {
			also = append(also, manName(sub))
		}
	}
	for i, page := range also {
		also[i] = ".BR " + strings.TrimSpace(roff(page)) + " (1)"
	}
	if len(also) > 0 {
		b.WriteString(".SH SEE ALSO\n" + strings.Join(also, " ,\n") + "\n")
	}
	return b.String()
}

// cell escapes text for a cell of a Markdown table.
var cell = strings.NewReplacer("|", `\|`, "<", `\<`, "*", `\*`, "\n", " ")

// wrap breaks text into lines of at most 116 columns. The first line begins at a column; all other lines are indented.
func wrap(text, indent string, column int) string {
	var b strings.Builder
	for i, word := range strings.Fields(text) {
		switch {
		case i > 0 && column+1+len(word) > 116:
			b.WriteString("\n" + indent)
			column = len(indent)
		case i > 0:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += len(word)
	}
	return b.String()
}

// markdownOf returns a command in Markdown.
func markdownOf(cmd *cobra.Command) string {
	var b strings.Builder
	fmt.Fprintf(&b, "### %s\n\n%s\n\n    %s\n\n", cmd.CommandPath(), wrap(cell.Replace(cmd.Short)+".", "", 0),
		wrap(cmd.UseLine(), "        ", 0))
	if list := options(cmd.NonInheritedFlags()); len(list) > 0 {
		b.WriteString("| flag | default | meaning |\n|---|---|---|\n")
		for _, o := range list {
			if o.value != "" {
				o.value = "`" + o.value + "`"
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", o.form, o.value, cell.Replace(o.meaning))
		}
		b.WriteString("\n")
	}
	if title, list, found := strings.Cut(cmd.Annotations[defined], "\n"); found {
		fmt.Fprintf(&b, "%s:\n\n  %s\n\n", title, strings.ReplaceAll(list, "\n", "\n  "))
	}
	if schema := cmd.Annotations[jsonSchema]; schema != "" {
		fmt.Fprintf(&b, "Output with `--json`:\n\n    %s\n\n", wrap(schema, "      ", 4))
	}
	for _, table := range columnsOf(cmd) {
		fmt.Fprintf(&b, "| column | meaning, with a row for each %s |\n|---|---|\n", table.Row)
		for _, c := range table.List {
			fmt.Fprintf(&b, "| %s | %s |\n", cell.Replace(c.Name), cell.Replace(c.Meaning))
		}
		b.WriteString("\n")
	}
	return b.String()
}
