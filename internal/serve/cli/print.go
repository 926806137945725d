package cli

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/kvatlas/kvatlas/internal/base/escape"
)

// Programs print for people with the functions below, which escape all arguments: names and messages come from others,
// and a terminal would execute their control characters. See package escape.

// Fprintf is [fmt.Fprintf] with arguments escaped by [escape.Text].
func Fprintf(w io.Writer, format string, args ...any) (n int, err error) {
	return fmt.Fprintf(w, format, escaped(args)...)
}

// Fprintln is [fmt.Fprintln] with arguments escaped by [escape.Text].
func Fprintln(w io.Writer, args ...any) (n int, err error) { return fmt.Fprintln(w, escaped(args)...) }

// Table prints rows under a heading, in columns. Cells are formatted with %v and escaped by [escape.Text]. The heading
// may contain results of the run, as in the commands of tools. A table with fixed columns uses [Columns.Table], which
// calls Table, and whose columns the help of the command explains.
func Table(w io.Writer, heading []string, rows [][]any) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(cells []any) {
		for i, cell := range escaped(cells) {
			if i > 0 {
				fmt.Fprint(tw, "\t")
			}
			fmt.Fprint(tw, cell)
		}
		fmt.Fprintln(tw)
	}
	fmt.Fprintln(tw, strings.Join(heading, "\t"))
	for _, row := range rows {
		line(row)
	}
	return tw.Flush()
}

// escaped wraps arguments so that they are printed escaped.
func escaped(args []any) []any {
	list := make([]any, len(args))
	for i, arg := range args {
		switch v := arg.(type) {
		case int, uint64, uint32, float64, bool:
			list[i] = v // also the width for a *
		default:
			list[i] = shown{v}
		}
	}
	return list
}

// shown formats a value with any verb, and escapes the result.
type shown struct{ value any }

func (s shown) Format(f fmt.State, verb rune) {
	if text, is := s.value.(string); is && (verb == 's' || verb == 'v' && !f.Flag('#')) {
		_, _ = fmt.Fprintf(f, fmt.FormatString(f, verb), escape.Text(text)) // padded to the displayed width
		return
	}
	_, _ = io.WriteString(f, escape.Text(fmt.Sprintf(fmt.FormatString(f, verb), s.value)))
}

// lineWriter writes lines of [slog.TextHandler], escaped by [escape.Text]. The handler calls Write once per line. It
// quotes most control characters, but not DEL and not all invisible characters.
type lineWriter struct{ to io.Writer }

func (w lineWriter) Write(line []byte) (int, error) {
	if _, err := io.WriteString(w.to, escape.Text(strings.TrimSuffix(string(line), "\n"))+"\n"); err != nil {
		return 0, err
	}
	return len(line), nil
}
