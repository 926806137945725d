package jetstream

import "strings"

// explanation is what a line of the NATS server's log means to who runs kvatlas.
type explanation struct {
	says      string // part of the line
	means, do string
}

const (
	notWritten = "the server ended before it could write down what it knew of this stream, as after kill -9 or a power failure; " +
		"it reads the stream's own files instead, which takes a moment and loses nothing"
	nothing = "nothing"
)

// explanations of lines that look worse than they are (nats-server server/filestore.go, recoverFullState and who calls
// it).
var explanations = []explanation{
	{"Stream state outdated", notWritten, nothing},
	{"Stream state detected prior state", notWritten, nothing},
	{"Recovering stream state from index errored: prior state file", notWritten, nothing},
	{"state is outdated; attempting to recover", notWritten, nothing},
}

// explain returns attributes for a line that has an explanation; none for another.
func explain(line string) []any {
	for _, e := range explanations {
		if strings.Contains(line, e.says) {
			return []any{"means", e.means, "what_to_do", e.do}
		}
	}
	return nil
}
