package cli

import (
	"fmt"
	"strings"
)

// The exit statuses of both programs.
const (
	StatusOK     = 0
	StatusFailed = 1
	StatusUsage  = 2
	StatusUnable = 3
)

// Statuses are the meanings of the exit statuses, for the help, the manual pages, docs/reference.md and
// docs/commands.md.
var Statuses = [...]string{
	StatusOK:     "The command succeeded.",
	StatusFailed: "The command failed, or the answer is negative.",
	StatusUsage:  "Invalid input: the command line, a setting, a name or a file. A retry is useless.",
	StatusUnable: "No errors were found, but some checks failed (only `indexer doctor`).",
}

// statusHelp returns the part of a program's help about exit statuses.
func statusHelp() string {
	var b strings.Builder
	b.WriteString("\n\nExit statuses:")
	for status, meaning := range Statuses {
		fmt.Fprintf(&b, "\n  %d  %s", status, strings.ReplaceAll(meaning, "`", ""))
	}
	return b.String()
}
