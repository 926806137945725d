package bench

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// print writes a report for people.
func (r *Report) print(to io.Writer) error {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) { fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	line("corpus", "%s", r.Corpus)
	line("mode", "%s, %d writers, %d readers", r.Mode, r.Writers, r.Readers)
	if r.BlocksPerSec > 0 {
		line(map[bool]string{true: "first pass", false: "writer"}[r.Mode == Events], "%.2f M blocks/s",
			r.BlocksPerSec/1e6)
	}
	if r.BlocksPerSecSecond > 0 {
		line("second pass", "%.2f M blocks/s", r.BlocksPerSecSecond/1e6)
	}
	if l := r.Latency; l != nil {
		line("query", "p50 %.2f, p99 %.2f, p99.9 %.2f, max %.1f µs of %d", l.P50, l.P99, l.P999, l.Max, l.N)
		if l.P999Typical > 0 {
			line("", "p99.9 %.2f µs with the median time of every query", l.P999Typical)
		}
		line("queries", "%.0f a second", r.QueriesPerSec)
	}
	if r.Digest != "" {
		verdict := "the expected digest of this corpus is unknown"
		if r.Expected != "" {
			verdict = map[bool]string{true: "right", false: "WRONG, want " + r.Expected}[r.Digest == r.Expected]
		}
		line("all operations", "%.3f s", r.Seconds)
		line("digest", "%s, %s", r.Digest, verdict)
	}
	if r.Mode == Memory {
		line("holdings", "%d", r.Holdings)
		line("bytes per holding", "%.2f resident, %.2f counted", r.BytesPerHolding, r.Counted)
		if s := r.Stats; s != nil {
			line("blocks", "%d (%d dead) in %d nodes; %d splits", s.Blocks, s.Dead, s.Nodes, s.Splits)
			line("bytes", "blocks %d, names %d, nodes %d, holes %d, ranks %d", s.Bytes.Blocks, s.Bytes.Names,
				s.Bytes.Nodes, s.Bytes.Holes, s.Bytes.Ranks)
		}
	}
	if m := r.Image; m != nil {
		line("holdings", "%d", r.Holdings)
		line("export", "%.1f ms, %d runs, %.2f bytes per holding", m.Export, m.Runs, m.BytesPerHolding)
		line("longest step", "%.2f ms, in steps of %d blocks", m.LongestStep, m.StepBlocks)
		line("import", "%.1f ms, same checksums: %v", m.Import, m.Same)
		line("clear of a rank", "p50 %.3f, max %.3f ms", m.ClearP50, m.ClearMax)
	}
	return w.Flush()
}
