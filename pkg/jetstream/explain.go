package jetstream

import (
	"slices"
	"strings"
)

// recoveries are parts of lines that look worse than they are (nats-server server/filestore.go, recoverFullState and
// who calls it).
var recoveries = []string{
	"Stream state outdated",
	"Stream state detected prior state",
	"Recovering stream state from index errored: prior state file",
	"state is outdated; attempting to recover",
}

// explain returns attributes for a line of the NATS server's log that has an explanation; none for another.
func explain(line string) []any {
	if !slices.ContainsFunc(recoveries, func(says string) bool { return strings.Contains(line, says) }) {
		return nil
	}
	return []any{"means", "the server ended before it could write down what it knew of this stream, as after kill -9 or a " +
		"power failure; it reads the stream's own files instead, which takes a moment and loses nothing",
		"what_to_do", "nothing"}
}
