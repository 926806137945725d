package tables

import (
	"fmt"
	"io"
	"strings"

	"github.com/kvatlas/kvatlas/internal/operate/doctor"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

// Progress returns the line of a check.
func Progress(c doctor.Result) string {
	verdict, said := "ok", c.Looked
	switch {
	case c.NeedsOf != "":
		verdict, said = "not checked", "see "+c.NeedsOf+": "+c.Skipped
	case c.Unable:
		verdict, said = "NOT CHECKED", c.Skipped
	case c.Skipped != "":
		verdict, said = "-", c.Skipped
	case len(c.Findings) > 0:
		verdict = "see below" // findings with a common cause are joined at the end
	}
	return fmt.Sprintf("%-11s %-12s %s", c.Check, verdict, said)
}

// Findings prints a table of all findings, the worst first, and below the table the evidence and remedy of each
// finding. Equal findings of several places share a row.
func Findings(w io.Writer, r *doctor.Report) {
	all := append(r.Groups(doctor.Error), r.Groups(doctor.Warning)...)
	if len(all) == 0 {
		cli.Fprintln(w, "nothing found")
		return
	}
	rows := make([][]any, len(all))
	for i, f := range all {
		rows[i] = []any{i + 1, f.Severity, f.Check, f.Where(), f.What}
	}
	FindingsColumns.Table(w, rows)
	for i, f := range all {
		evidence, remedy := "evidence", "what to do"
		if len(f.Wheres) > 1 {
			of := " (of " + f.Wheres[0] + ")"
			evidence, remedy = evidence+of, remedy+of
		}
		cli.Fprintf(w, "\n%d. %s: %s\n   %s: %s\n", i+1, f.Where(), f.What, evidence, f.Evidence)
		if len(f.Causes) > 0 {
			cli.Fprintf(w, "   leads to: %s\n", strings.Join(faultNames(f.Causes), ", "))
		}
		cli.Fprintf(w, "   %s: %s\n", remedy, f.Remedy)
	}
}

// faultNames converts faults to strings.
func faultNames(list []doctor.Fault) (names []string) {
	for _, id := range list {
		names = append(names, string(id))
	}
	return names
}
