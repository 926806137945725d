package node

import (
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var update = flag.Bool("update", false, "rewrite testdata/*.txt from the tests' results")

// act adds an action of the test to the transcript.
func (w *site) act(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.script = append(w.script, "> "+fmt.Sprintf(format, args...))
}

// logger returns a logger that records the node's events, with the state of the partition, for the transcript and for
// [site.recorded].
func (w *site) logger() *slog.Logger {
	line := func(format string, args ...any) {
		w.mu.Lock()
		defer w.mu.Unlock()
		text := "  " + stable(fmt.Sprintf(format, args...))
		if n := len(w.script); n == 0 || w.script[n-1] != text { // a repeated event is recorded once
			w.script = append(w.script, text)
		}
	}
	// requests is line for repeated requests that overlap other actions. It records one request after a restore, and one
	// after the start of a shim.
	requests := func(format string, args ...any) {
		w.mu.Lock()
		text := "  " + stable(fmt.Sprintf(format, args...))
		since := len(w.script)
		for since > 0 && !strings.HasPrefix(w.script[since-1], "  begins with") && w.script[since-1] != shimStarts {
			since--
		}
		present := slices.Contains(w.script[since:], text)
		w.mu.Unlock()
		if !present {
			line(format, args...)
		}
	}
	state := func(p events.Partition) api.PartitionState {
		o := w.node.parts[p]
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.phase.state()
	}
	whole := false // the last restore had no loss
	lost := ""     // by the restore in the next log line
	return logtest.New(func(l logtest.Line) {
		attr := func(key string) string { return fmt.Sprint(l.Attrs[key]) }
		p, _ := l.Attrs["partition"].(events.Partition)
		switch l.Text {
		case "resync needed":
			lost = attr("why")
		case "restored":
			text := "no snapshot"
			if attr("ranks") != "0" {
				text = "the snapshot at " + attr("seq")
			}
			line("begins with %s; lost: %s", text, strings.TrimSpace(lost+" "))
			w.mu.Lock()
			w.caughtUp, whole = make(chan struct{}), lost == ""
			w.mu.Unlock()
			w.record("restored at %s, %s ranks, lost %q", attr("seq"), attr("ranks"), lost)
			lost = ""
		case "snapshot skipped":
			line("passes over a snapshot: %s", attr("reason"))
			w.record("rejected: %s: %s", attr("reason"), attr("error"))
		case "caught up":
			now := state(p)
			w.mu.Lock()
			done := w.caughtUp
			if whole && now == api.PartitionResync { // the node detected the need of a rank meanwhile
				now = api.PartitionServing
			}
			w.mu.Unlock()
			line("has caught up; state %s", now)
			close(done)
		case "the log differs from the applied log; restoring again":
			line("the log is unfit: %s", attr("found"))
			w.record("unfit: %s", attr("found"))
		case "resync requested from the shims":
			w.mu.Lock()
			done := w.caughtUp
			w.mu.Unlock()
			select {
			case <-done: // another goroutine logs the catch-up
			case <-w.stopping:
			}
			cause, _, _ := strings.Cut(attr("why"), "; rounds of requests: ")
			requests("sends requests to the shims, state %s: %s", state(p), cause)
			w.record("requested: %s: %s", attr("why"), attr("answered"))
		case "resync is over":
			line("is whole again; state %s", state(p))
			w.record("resynced")
		case "messages were lost between the log and the index; the log is read again":
			w.record("reread from %s", attr("from"))
		case "the bucket of snapshots was gone; it is recreated":
			w.record("snapshot bucket recreated")
		}
	})
}

const shimStarts = "> the engine's shim starts"

var unstable = []struct {
	re *regexp.Regexp
	by string
}{
	{regexp.MustCompile(`epoch changed from \S+Z to \S+Z, which has \d+ to \d+`),
		"epoch changed from E1 to E2, with the messages since then"},
	{regexp.MustCompile(`(at|before|is|beyond|message|sequence|wanted|was applied, the stream ends at) \d+`), "$1 N"},
	{regexp.MustCompile(`regressed: \d+`), "regressed: N"},
	{regexp.MustCompile(`; lost: $`), ""},
}

// stable replaces varying parts of a text by names.
func stable(text string) string {
	for _, u := range unstable {
		text = u.re.ReplaceAllString(text, u.by)
	}
	return text
}

// compareTranscript compares the transcript with testdata/NAME.txt.
func (w *site) compareTranscript(name string) {
	w.Helper()
	w.mu.Lock()
	got := strings.Join(w.script, "\n") + "\n"
	w.mu.Unlock()
	path := filepath.Join("testdata", name+".txt")
	if *update {
		w.must(os.MkdirAll("testdata", 0o750))
		w.must(os.WriteFile(path, []byte(got), 0o600))
		return
	}
	want, err := os.ReadFile(path)
	w.must(err)
	if string(want) != got {
		w.Errorf("these actions and events differ from %s (-update writes the file):\n%s", path, got)
	}
}
