package top

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/rivo/uniseg"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// row is a rank of the table.
type row struct {
	api.FleetRank
	expired *api.ExpiredWorker // nil for a live rank; an expired rank has no numbers
}

// column is one column of the table.
type column struct {
	name string
	key  rune // key that sorts by the column
	help string
	rank int // order in which columns disappear on a narrow terminal: the highest first

	// number returns a rank's number, and false if the number is unknown; nil for a text column. text returns the
	// cell's text; nil formats the number.
	number func(*View, *row) (float64, bool)
	text   func(*View, *row) string
	style  func(*View, *row) Style // nil means plain
}

// leastName is the width to which worker names are shortened before a column disappears.
const leastName = 8

// columns are all columns, from left to right. The first column is always visible.
var columns = []column{
	{name: "WORKER", key: 'w', help: "worker and rank",
		text: func(_ *View, r *row) string { return place(r) }},
	{name: "STATE", key: 's', rank: 1, help: "whether it may be chosen, or the reason against it",
		text:  func(v *View, r *row) string { word, _ := v.state(r); return word },
		style: func(v *View, r *row) Style { _, style := v.state(r); return style }},
	{name: "ROLE", key: 'o', rank: 11, help: "prefill, decode, or both (aggregated)",
		text: func(_ *View, r *row) string { return string(r.Role) }},
	{name: "DEVICE", key: 'd', rank: 2, help: "blocks held in device memory",
		number: count(func(r *row) uint64 { return r.Blocks.Device })},
	{name: "HOST", key: 'h', rank: 3, help: "blocks held in host memory",
		number: count(func(r *row) uint64 { return r.Blocks.Host })},
	{name: "DISK", key: 'k', rank: 4, help: "blocks held on disk",
		number: count(func(r *row) uint64 { return r.Blocks.Disk })},
	{name: "EXTERNAL", key: 'x', rank: 12, help: "blocks held in the engine's own external store",
		number: count(func(r *row) uint64 { return r.Blocks.External })},
	{name: "+/S", key: '+', rank: 5, help: "blocks stored a second",
		number: func(v *View, r *row) (float64, bool) { return r.StoredRate, v.rated }},
	{name: "-/S", key: '-', rank: 6, help: "blocks removed a second",
		number: func(v *View, r *row) (float64, bool) { return r.RemovedRate, v.rated }},
	{name: "REQS", key: 'n', rank: 7, help: "requests in progress, as booked by routers",
		number: load(func(r *row) uint64 { return r.Requests })},
	{name: "PREFILL", key: 'p', rank: 8, help: "their prompt tokens that are not computed yet, without cached tokens",
		number: load(func(r *row) uint64 { return r.PrefillTokens })},
	{name: "DECODE", key: 'b', rank: 9, help: "blocks of these requests",
		number: load(func(r *row) uint64 { return r.ActiveBlocks })},
	{name: "USED%", key: 'u', rank: 13, help: "used device memory, as reported by the engine",
		number: func(_ *View, r *row) (float64, bool) {
			return 100 * float64(r.UsedBlocks) / float64(max(r.TotalBlocks, 1)), r.UsedBlocks > 0 && r.TotalBlocks > 0
		}},
	{name: "LAG", key: 'l', rank: 10, help: "messages of its partition's log that no node has applied yet",
		number: func(v *View, r *row) (float64, bool) {
			lag, known := v.lag[r.Partition]
			return float64(lag), known
		}},
	{name: "LEASE", key: 'e', rank: 14, help: "held, or expired: being cleared",
		text: func(_ *View, r *row) string { return r.Lease }},
	{name: "ENGINE", key: 'i', rank: 15, help: "state of the connection between shim and engine",
		text: func(_ *View, r *row) string { return string(r.Engine) }},
	{name: "SEEN", key: 'a', rank: 16, help: "time since the last event in the log",
		number: func(v *View, r *row) (float64, bool) {
			return max(v.look.At.Sub(r.LastSeen), 0).Seconds(), !r.LastSeen.IsZero()
		},
		text: func(v *View, r *row) string {
			if r.LastSeen.IsZero() {
				return ""
			}
			return v.ago(r.LastSeen).String()
		}},
	{name: "MODEL", key: 'm', rank: 17, help: "the served model",
		text: func(_ *View, r *row) string { return r.Model }},
}

// Explained returns the columns with their meanings.
func Explained() (meanings [][2]string) {
	for i := range columns {
		meanings = append(meanings, [2]string{columns[i].name, columns[i].help})
	}
	return meanings
}

// Columns returns the names of the columns.
func Columns() []string {
	names := make([]string, len(columns))
	for i := range columns {
		names[i] = strings.ToLower(columns[i].name)
	}
	return names
}

func count(of func(*row) uint64) func(*View, *row) (float64, bool) {
	return func(_ *View, r *row) (float64, bool) { return float64(of(r)), true }
}

func load(of func(*row) uint64) func(*View, *row) (float64, bool) {
	return func(v *View, r *row) (float64, bool) { return float64(of(r)), v.look.Loads != nil }
}

func place(r *row) string { return fmt.Sprintf("%s/%d", r.Instance, r.Rank) }

// ago returns the time since at, in seconds.
func (v *View) ago(at time.Time) time.Duration { return max(v.look.At.Sub(at), 0).Round(time.Second) }

// short formats a duration in its largest unit.
func short(d time.Duration) string {
	switch {
	case d >= time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	case d >= time.Minute:
		return fmt.Sprintf("%dm", d/time.Minute)
	}
	return fmt.Sprintf("%ds", d/time.Second)
}

// state returns the state of a rank as a word, and the style for its severity.
func (v *View) state(r *row) (string, Style) {
	switch {
	case r.expired != nil:
		return "expired-" + short(v.ago(r.expired.Lease.Expires)), Dim
	case r.Engine == api.EngineGone:
		return "engine-gone", Bad
	case r.Engine == api.EngineAsleep && r.State != api.WorkerDraining:
		return "engine-asleep", Dim
	case r.Lease == "expired":
		return "lease-expired", Bad
	case r.State == api.WorkerDraining:
		return string(r.State), Warning
	case r.State == api.WorkerUnschedulable:
		return string(r.State), Bad
	case r.Engine == api.EngineSilent:
		return "engine-silent", Warning
	case r.State == api.WorkerIncomplete:
		return string(r.State), Warning
	case r.CatchingUp:
		return "catching-up", Warning
	case r.State == "":
		return "unregistered", Dim
	}
	return string(r.State), Plain
}

// value returns a rank's number, and whether the number is available.
func (c *column) value(v *View, r *row) (float64, bool) {
	if r.expired != nil {
		return 0, false
	}
	return c.number(v, r)
}

// cell returns the text and the style of a cell.
func (c *column) cell(v *View, r *row) (string, Style) {
	text := "-"
	if c.text != nil {
		text = cmp.Or(escape.Text(c.text(v, r)), "-")
	} else if n, known := c.value(v, r); known {
		text = v.number(n)
	}
	if c.style != nil {
		return text, c.style(v, r)
	}
	return text, Plain
}

// compare orders ranks by the column, in the view's direction. Unknown values come last, and expired ranks after all
// others.
func (c *column) compare(v *View, a, b *row) int {
	if gone := a.expired != nil; gone != (b.expired != nil) {
		if gone {
			return 1
		}
		return -1
	}
	order := 0
	if c.number != nil {
		x, knownX := c.value(v, a)
		y, knownY := c.value(v, b)
		if knownX != knownY {
			if knownX {
				return -1
			}
			return 1
		}
		order = cmp.Compare(x, y)
	} else {
		if c.style != nil {
			order = cmp.Compare(c.style(v, b), c.style(v, a)) // the worst first
		}
		order = cmp.Or(order, cmp.Compare(c.text(v, a), c.text(v, b)))
	}
	if v.down {
		return -order
	}
	return order
}

// number formats a number in at most five columns, or in full.
func (v *View) number(x float64) string {
	switch {
	case v.exact:
		return strconv.FormatFloat(math.Round(10*x)/10, 'f', -1, 64)
	case x < 100:
		return strings.TrimSuffix(strconv.FormatFloat(x, 'f', 1, 64), ".0")
	case x < 99_999.5:
		return strconv.FormatFloat(x, 'f', 0, 64)
	}
	units := "kMGTPE"
	for x /= 1000; x >= 999.5 && len(units) > 1; x /= 1000 {
		units = units[1:]
	}
	decimals := 0
	switch {
	case x < 9.995:
		decimals = 2
	case x < 99.95:
		decimals = 1
	}
	return strconv.FormatFloat(x, 'f', decimals, 64) + units[:1]
}

// gap returns the number of spaces between columns.
func gap(width int) int {
	if width < 100 {
		return 1
	}
	return 2
}

// fit computes the widths of the columns for a line. A hidden column has the width 0.
func (v *View) fit(width int) []int {
	widths := make([]int, len(columns))
	widths[0] = min(v.widths[0], leastName)
	left := width - widths[0]
	byRank := make([]int, len(columns))
	for i := range columns {
		byRank[columns[i].rank] = i
	}
	for _, i := range byRank[1:] {
		if left < gap(width)+v.widths[i] {
			break
		}
		widths[i] = v.widths[i]
		left -= gap(width) + widths[i]
	}
	widths[0] = min(v.widths[0], widths[0]+max(left, 0))
	return widths
}

// heading returns the names of the columns, with the sort column in bold.
func (v *View) heading(widths []int, gap int) Line {
	return table(widths, gap, func(i int) (string, Style) {
		if i == v.sort {
			return columns[i].name, Bold
		}
		return columns[i].name, Dim
	})
}

func (v *View) row(r *row, widths []int, gap int) Line {
	return table(widths, gap, func(i int) (string, Style) {
		text, style := columns[i].cell(v, r)
		return shorten(text, widths[i]), style
	})
}

// table returns one line of the table, with left-aligned texts and right-aligned numbers.
func table(widths []int, gap int, cell func(int) (string, Style)) (l Line) {
	for i, width := range widths {
		if width == 0 {
			continue
		}
		text, style := cell(i)
		pad := strings.Repeat(" ", max(width-uniseg.StringWidth(text), 0))
		if columns[i].number != nil {
			text = pad + text
		} else {
			text += pad
		}
		if i > 0 {
			l.Spans = append(l.Spans, Span{Text: strings.Repeat(" ", gap)})
		}
		l.Spans = append(l.Spans, Span{text, style})
	}
	return l
}
