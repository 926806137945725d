package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// Column is a column of a table.
type Column struct{ Name, Meaning string }

// Columns are the fixed columns of a table, for the heading and for the help of the command. [Table] prints a table
// whose heading depends on the run.
type Columns struct {
	Row  string // content of a row, such as "rank"
	List []Column
}

// And returns the columns with further ones on the right.
func (c Columns) And(more ...Column) Columns {
	c.List = append(c.List[:len(c.List):len(c.List)], more...)
	return c
}

// Table prints rows under the names of the columns, as [Table].
func (c Columns) Table(w io.Writer, rows [][]any) error {
	names := make([]string, len(c.List))
	for i, column := range c.List {
		names[i] = column.Name
	}
	return Table(w, names, rows)
}

// explained is the annotation of a command with tables: the columns, as "ROW" and "NAME\tMEANING" in a line each.
const explained = "kvatlas_columns"

// Explain adds the columns of a command's tables to the help, the manual page and docs/reference.md.
func Explain(cmd *cobra.Command, tables ...Columns) *cobra.Command {
	var b strings.Builder
	for _, table := range tables {
		fmt.Fprintf(&b, "%s\n", table.Row)
		for _, c := range table.List {
			if c.Name != "" {
				fmt.Fprintf(&b, "%s\t%s\n", c.Name, c.Meaning)
			}
		}
	}
	if cmd.Annotations == nil {
		cmd.Annotations = map[string]string{}
	}
	cmd.Annotations[explained] = b.String()
	return cmd
}

// defined is the annotation of a command with terms: the title, and the indented list in the other lines.
const defined = "kvatlas_terms"

// Define adds an indented list of names, which the help has in Long, to the command's part of docs/reference.md.
func Define(cmd *cobra.Command, title, list string) {
	if cmd.Annotations == nil {
		cmd.Annotations = map[string]string{}
	}
	cmd.Annotations[defined] = title + "\n" + strings.Trim(list, "\n")
}

// columnsOf returns the columns of a command's tables.
func columnsOf(cmd *cobra.Command) (tables []Columns) {
	for line := range strings.Lines(cmd.Annotations[explained]) {
		name, meaning, column := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		if !column {
			tables = append(tables, Columns{Row: name})
			continue
		}
		last := &tables[len(tables)-1]
		last.List = append(last.List, Column{name, meaning})
	}
	return tables
}

// columnsHelp returns the part of the help about the tables of a command.
func columnsHelp(cmd *cobra.Command) string {
	var b strings.Builder
	for _, table := range columnsOf(cmd) {
		fmt.Fprintf(&b, "\n\nColumns, with a row for each %s:", table.Row)
		width := 0
		for _, c := range table.List {
			width = max(width, len(c.Name))
		}
		for _, c := range table.List {
			indent := strings.Repeat(" ", 2+width+2)
			fmt.Fprintf(&b, "\n  %-*s  %s", width, c.Name, wrap(c.Meaning, indent, len(indent)))
		}
	}
	return b.String()
}
