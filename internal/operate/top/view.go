// Package top is the terminal view of a fleet: workers, tiers, load and lag.
//
// A [View] is the model. Its inputs are the state of the fleet ([View.Learn], [View.Fail]) and keys ([View.Press]). Its
// outputs are lines ([View.Frame], [View.Text]). It uses no terminal, network or clock. [Run] is the loop on a
// terminal; [Once] prints one frame.
package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/gdamore/tcell/v2"
	"github.com/rivo/uniseg"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/operate/watch"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Look is the state of a namespace at a time.
type Look struct {
	At        time.Time
	Namespace string
	Nodes     []api.NodeState // sorted by name
	Problems  []string        // problems that nodes report
	Workers   *api.WorkerList

	// nil means unknown. NoLoads is the error if Loads are missing.
	Loads   *api.LoadList
	NoLoads error
	Engines *api.EngineLoads
}

// Style is the style of a part of a line.
type Style uint8

// The styles.
const (
	Plain Style = iota
	Bold
	Dim
	Warning
	Bad
)

// Span is a part of a line in one style. Its text contains no control characters.
type Span struct {
	Text  string
	Style Style
}

// Line is one line of a frame. Reverse exchanges its colours.
type Line struct {
	Spans   []Span
	Reverse bool
}

// View is the content of the display. It is for one goroutine at a time.
type View struct {
	look  *Look // the latest look; nil before the first
	rated bool  // an earlier look exists, so rates are available
	err   error // error of the last look; nil after a success
	since time.Time

	ranks []api.FleetRank // sorted by instance and rank
	rows  []row           // ranks, followed by the expired ranks
	lag   map[events.Partition]uint64

	sort   int  // index of the sort column
	down   bool // descending order
	filter string
	typing bool // the reader is typing the filter
	help   bool

	// Derived fields, which arrange updates.
	shown  []*row // in order
	widths []int  // of each column: the widest cell so far, including its name

	exact bool // numbers in full

	// The current row follows its rank. nil selects the first row. first is the index of the top row, and page the
	// number of visible rows; Frame sets both.
	current     *api.RankPlace
	first, page int
}

// New returns a view, sorted by the column with the given name (see [Columns]), with a filter on the rows.
func New(order, filter string) (*View, error) {
	v := &View{filter: filter, widths: make([]int, len(columns))}
	i := slices.IndexFunc(columns, func(c column) bool { return strings.EqualFold(c.name, order) })
	if i < 0 {
		return nil, fmt.Errorf("%q is not a column; the columns are %s", order, strings.Join(Columns(), ", "))
	}
	v.sort, v.down = i, columns[i].number != nil
	return v, nil
}

// Learn replaces the state of the fleet.
func (v *View) Learn(l *Look) {
	var since time.Duration
	if v.rated = v.look != nil; v.rated {
		since = l.At.Sub(v.look.At)
	}
	v.ranks = watch.Ranks(l.Workers, l.Loads, l.Engines, v.ranks, since)
	v.rows = v.rows[:0]
	for i := range v.ranks {
		v.rows = append(v.rows, row{FleetRank: v.ranks[i]})
	}
	for i := range l.Workers.Expired {
		w := &l.Workers.Expired[i]
		v.rows = append(v.rows, row{api.FleetRank{Instance: w.Instance, Rank: w.Rank, Model: w.Model,
			Lease: w.Lease.State, LeaseHost: w.Lease.Host}, w})
	}
	v.look, v.err = l, nil
	v.lag = map[events.Partition]uint64{}
	for _, n := range l.Nodes {
		if n.Status == nil {
			continue
		}
		for _, p := range n.Status.Partitions {
			if lag, known := v.lag[p.Partition]; !known || p.Lag < lag {
				v.lag[p.Partition] = p.Lag
			}
		}
	}
	v.arrange()
}

// Fail records the error of a failed look. The earlier state remains.
func (v *View) Fail(err error, at time.Time) {
	if v.err == nil {
		v.since = at
	}
	v.err = err
}

// arrange filters and sorts the ranks.
func (v *View) arrange() {
	wanted := strings.Fields(strings.ToLower(v.filter))
	v.shown = v.shown[:0]
	for i := range v.rows {
		r := &v.rows[i]
		word, _ := v.state(r)
		text := strings.ToLower(fmt.Sprintf("%s/%d %s %s %s %s %s", r.Instance, r.Rank, r.Model, r.Role, word,
			r.LeaseHost, r.Endpoint))
		if !slices.ContainsFunc(wanted, func(w string) bool { return !strings.Contains(text, w) }) {
			v.shown = append(v.shown, r)
		}
	}
	by := &columns[v.sort]
	slices.SortStableFunc(v.shown, func(a, b *row) int { return by.compare(v, a, b) })
	for i := range columns {
		c := &columns[i]
		v.widths[i] = max(v.widths[i], len(c.name))
		for _, r := range v.shown {
			text, _ := c.cell(v, r)
			v.widths[i] = max(v.widths[i], uniseg.StringWidth(text))
		}
	}
}

// currentIndex returns the index of the current row; -1 for an empty table.
func (v *View) currentIndex() int {
	if v.current != nil {
		at := slices.IndexFunc(v.shown, func(r *row) bool { return r.Place() == *v.current })
		if at >= 0 {
			return at
		}
	}
	return min(0, len(v.shown)-1)
}

// move selects a row, or the nearest existing row.
func (v *View) move(to int) {
	v.current = nil
	if to = min(to, len(v.shown)-1); to > 0 {
		place := v.shown[to].Place()
		v.current = &place
	}
}

// order sorts by a column. A second call with the same column reverses the order.
func (v *View) order(column int) {
	if v.sort == column {
		v.down = !v.down
	} else {
		v.sort, v.down = column, columns[column].number != nil
	}
	v.arrange()
}

// Press handles a key. quit reports that the reader wants to quit.
func (v *View) Press(e *tcell.EventKey) (quit bool) {
	key := e.Key()
	switch {
	case key == tcell.KeyCtrlC:
		return true
	case v.typing:
		v.write(e)
		return false
	case v.help:
		v.help = false
		return false
	}
	at := v.currentIndex()
	switch key {
	case tcell.KeyUp:
		v.move(at - 1)
	case tcell.KeyDown:
		v.move(at + 1)
	case tcell.KeyPgUp:
		v.move(at - v.page)
	case tcell.KeyPgDn:
		v.move(at + v.page)
	case tcell.KeyHome:
		v.move(0)
	case tcell.KeyEnd:
		v.move(len(v.shown) - 1)
	case tcell.KeyEscape:
		v.filter = ""
		v.arrange()
	}
	if key != tcell.KeyRune {
		return false
	}
	switch k := e.Rune(); k {
	case 'q':
		return true
	case '/':
		v.typing = true
	case '?':
		v.help = true
	case '<':
		v.order((v.sort + len(columns) - 1) % len(columns))
	case '>':
		v.order((v.sort + 1) % len(columns))
	default:
		if i := slices.IndexFunc(columns, func(c column) bool { return c.key == k }); i >= 0 {
			v.order(i)
		}
	}
	return false
}

// maxFilter bounds the filter, in bytes.
const maxFilter = 256

// write handles a key while the reader types the filter.
func (v *View) write(e *tcell.EventKey) {
	switch e.Key() {
	case tcell.KeyEnter:
		v.typing = false
	case tcell.KeyEscape:
		v.typing, v.filter = false, ""
	case tcell.KeyBackspace, tcell.KeyBackspace2:
		if text := []rune(v.filter); len(text) > 0 {
			v.filter = string(text[:len(text)-1])
		}
	case tcell.KeyCtrlU:
		v.filter = ""
	case tcell.KeyRune:
		if len(v.filter) < maxFilter && unicode.IsPrint(e.Rune()) {
			v.filter += string(e.Rune())
		}
	}
	v.arrange()
}

// Frame returns the lines of a screen.
func (v *View) Frame(width, height int) []Line {
	above := append(v.summary(), v.notice())
	if v.help {
		return v.fill(above, v.keys(), nil, width, height)
	}
	widths := v.fit(width)
	below := []Line{v.details(), v.bottom()}
	v.page = max(height-len(above)-1-len(below), 1)
	at := v.currentIndex()
	v.first = max(min(v.first, at, len(v.shown)-v.page), at-v.page+1, 0)
	rows := []Line{v.heading(widths, gap(width))}
	for i := v.first; i < min(v.first+v.page, len(v.shown)); i++ {
		row := v.row(v.shown[i], widths, gap(width))
		row.Reverse = i == at
		rows = append(rows, row)
	}
	if len(v.shown) == 0 {
		rows = append(rows, line(Dim, v.empty()))
	}
	return v.fill(above, rows, below, width, height)
}

// fill builds a frame of the parts at the top, in the middle and at the bottom. If the room is not enough, the top is
// cut first.
func (v *View) fill(above, between, below []Line, width, height int) []Line {
	if least := 2 + len(below); height < len(above)+least {
		above = above[:max(height-least, 0)]
	}
	frame := append(above, between...)
	for len(frame) < height-len(below) {
		frame = append(frame, Line{})
	}
	frame = append(frame[:max(height-len(below), 0)], below...)
	frame = frame[:min(len(frame), height)]
	for i := range frame {
		left := width
		for j := range frame[i].Spans {
			s := &frame[i].Spans[j]
			s.Text = cut(s.Text, left)
			left -= uniseg.StringWidth(s.Text)
		}
		if frame[i].Reverse && left > 0 {
			frame[i].Spans = append(frame[i].Spans, Span{Text: strings.Repeat(" ", left)})
		}
	}
	return frame
}

// Fleet returns the ranks and the expired leases that the filter shows, in the order of the sort column.
func (v *View) Fleet() *api.FleetEvent {
	e := &api.FleetEvent{At: v.look.At, Full: true, Ranks: []api.FleetRank{}, Missing: v.look.Workers.Missing}
	for _, r := range v.shown {
		if r.expired != nil {
			e.Expired = append(e.Expired, *r.expired)
		} else {
			e.Ranks = append(e.Ranks, r.FleetRank)
		}
	}
	return e
}

// Text returns the complete content as text for programs, with all columns, rows and digits.
func (v *View) Text() string {
	v.exact = true
	clear(v.widths)
	v.arrange()
	lines := v.summary()
	if n := v.notice(); len(n.Spans) > 0 {
		lines = append(lines, n)
	}
	lines = append(lines, v.heading(v.widths, 2))
	for _, r := range v.shown {
		lines = append(lines, v.row(r, v.widths, 2))
	}
	if len(v.shown) == 0 {
		lines = append(lines, line(Plain, v.empty()))
	}
	var b strings.Builder
	for _, l := range lines {
		b.WriteString(l.text() + "\n")
	}
	return b.String()
}

func (l Line) text() string {
	var b strings.Builder
	for _, s := range l.Spans {
		b.WriteString(s.Text)
	}
	return strings.TrimRight(b.String(), " ")
}

func line(s Style, text string) Line { return Line{Spans: []Span{{Text: escape.Text(text), Style: s}}} }

// summary returns the state of the nodes and the sums of the rows.
func (v *View) summary() []Line {
	if v.look == nil {
		return []Line{line(Bold, "kvatlas"), {}, {}}
	}
	ready, waiting, all := 0, 0, uint64(0)
	for _, n := range v.look.Nodes {
		if n.Status == nil {
			continue
		}
		if n.Status.Ready {
			ready++
		}
		for _, w := range n.Status.Waiting {
			waiting += w.Requests
		}
	}
	for _, lag := range v.lag {
		all += lag
	}
	var sum api.FleetRank
	workers, ranks := map[events.WorkerID]bool{}, 0
	for _, r := range v.shown {
		if r.expired != nil {
			continue
		}
		ranks++
		workers[r.Instance] = true
		sum.Blocks.Device += r.Blocks.Device
		sum.Blocks.Host += r.Blocks.Host
		sum.Blocks.Disk += r.Blocks.Disk
		sum.Blocks.External += r.Blocks.External
		sum.StoredRate += r.StoredRate
		sum.RemovedRate += r.RemovedRate
		sum.Requests += r.Requests
		sum.PrefillTokens += r.PrefillTokens
		sum.ActiveBlocks += r.ActiveBlocks
	}
	of := ""
	if ranks < len(v.ranks) {
		of = fmt.Sprintf(" of %d", len(v.ranks))
	}
	head := line(Bold, "kvatlas "+v.look.Namespace)
	nodes := Span{Text: fmt.Sprintf("nodes %d/%d ready", ready, len(v.look.Nodes))}
	if ready < len(v.look.Nodes) {
		nodes.Style = Bad
	}
	head.Spans = append(head.Spans, Span{v.look.At.UTC().Format("  15:04:05 UTC  "), Dim}, nodes,
		Span{Text: fmt.Sprintf("  workers %d  ranks %d%s  partitions %d", len(workers), ranks, of, len(v.lag))})
	n := func(x float64) string { return v.number(x) }
	rates := "  stored -  removed -"
	if v.rated {
		rates = fmt.Sprintf("  stored %s/s  removed %s/s", n(sum.StoredRate), n(sum.RemovedRate))
	}
	b := &sum.Blocks
	blocks := fmt.Sprintf("blocks  device %s  host %s  disk %s  external %s", n(float64(b.Device)),
		n(float64(b.Host)), n(float64(b.Disk)), n(float64(b.External)))
	if v.rated && !v.exact && len(blocks+rates) > 80 { // the names of the columns
		rates = fmt.Sprintf("  +%s/s  -%s/s", n(sum.StoredRate), n(sum.RemovedRate))
	}
	load := "load    not known"
	if v.look.Loads != nil {
		load = fmt.Sprintf("load    requests %s  prefill %s tokens  decode %s blocks", n(float64(sum.Requests)),
			n(float64(sum.PrefillTokens)), n(float64(sum.ActiveBlocks)))
	}
	lines := []Line{head, line(Plain, blocks+rates),
		line(Plain, fmt.Sprintf("%s  waiting %d  lag %s", load, waiting, n(float64(all))))}
	if zones := v.zones(); zones != nil {
		lines = append(lines, *zones)
	}
	return lines
}

// zones returns the number of ready nodes in each zone, with the names of the other nodes. Zones with such nodes come
// first, then zones by name. Nodes without a zone come last in both groups. The result is nil if no node has a zone.
func (v *View) zones() *Line {
	type zone struct {
		name       string
		ready, all int
		not        []string
	}
	var list []*zone
	by, zoned := map[string]*zone{}, false
	for _, n := range v.look.Nodes {
		zoned = zoned || n.Zone != ""
		z := by[n.Zone]
		if z == nil {
			z = &zone{name: n.Zone}
			by[n.Zone], list = z, append(list, z)
		}
		z.all++
		if n.Status != nil && n.Status.Ready {
			z.ready++
		} else {
			z.not = append(z.not, n.Node)
		}
	}
	if !zoned {
		return nil
	}
	slices.SortFunc(list, func(a, b *zone) int {
		if (len(a.not) > 0) != (len(b.not) > 0) {
			return len(b.not) - len(a.not)
		}
		if (a.name == "") != (b.name == "") {
			return len(b.name) - len(a.name)
		}
		return strings.Compare(a.name, b.name)
	})
	l := line(Plain, "zones ")
	for _, z := range list {
		text, style := fmt.Sprintf("%s %d/%d", cmp.Or(z.name, "none"), z.ready, z.all), Plain
		if len(z.not) > 0 {
			text, style = text+" (not "+strings.Join(z.not, ", ")+")", Bad
		}
		l.Spans = append(l.Spans, Span{Text: "  "}, Span{escape.Text(text), style})
	}
	return &l
}

// notice returns the most severe message; an empty line without a message.
func (v *View) notice() Line {
	switch {
	case v.err != nil && v.look == nil:
		return line(Bad, "no data yet: "+v.err.Error())
	case v.err != nil:
		return line(Bad, fmt.Sprintf("not up to date since %s: %v", v.since.UTC().Format("15:04:05 UTC"), v.err))
	case v.look == nil:
		return line(Dim, "asking the indexers")
	case !v.look.Workers.Complete:
		return line(Bad, fmt.Sprintf("INCOMPLETE: partitions %v could not be examined; see indexer status",
			v.look.Workers.Missing))
	case len(v.look.Problems) > 0:
		if n := len(v.look.Problems); n > 1 {
			return line(Bad, fmt.Sprintf("1 of %d problems (indexer status has all): %s", n, v.look.Problems[0]))
		}
		return line(Bad, "problem: "+v.look.Problems[0])
	case v.look.NoLoads != nil:
		return line(Warning, "loads are unknown: "+v.look.NoLoads.Error())
	}
	switch gone := v.look.Workers.Expired; len(gone) {
	case 0:
		return Line{}
	case 1:
		return line(Warning, fmt.Sprintf("the lease of %s/%d has expired: its shim is gone", gone[0].Instance, gone[0].Rank))
	default:
		return line(Warning, fmt.Sprintf("the leases of %d ranks have expired: their shims are gone", len(gone)))
	}
}

func (v *View) empty() string {
	switch {
	case v.look == nil:
		return ""
	case len(v.rows) > 0:
		return "no rank matches the filter; Esc clears the filter"
	}
	return "no worker has published events yet; start a shim with worker-shim run"
}

// details returns facts about the current row that have no column.
func (v *View) details() Line {
	at := v.currentIndex()
	if at < 0 {
		return Line{}
	}
	r := v.shown[at]
	if r.expired != nil {
		l := &r.expired.Lease
		return line(Dim, fmt.Sprintf("%s expired %s ago; process %d on %s renewed its lease last %s ago; its blocks are "+
			"cleared; model %s", place(r), v.ago(l.Expires), l.PID, l.Host, v.ago(l.Renewed), r.Model))
	}
	word, _ := v.state(r)
	parts := []string{place(r) + " " + word}
	add := func(what string, parenthesis string) {
		if parenthesis != "" {
			what += " (" + parenthesis + ")"
		}
		parts = append(parts, what)
	}
	if r.Why != "" {
		add(r.Why, "")
	}
	add("lease "+cmp.Or(r.Lease, "none"), r.LeaseHost)
	if r.Engine != "" {
		add("engine "+string(r.Engine), r.EngineWhy)
	}
	if r.Role != "" {
		add(string(r.Role), "")
	}
	add("model "+r.Model, fmt.Sprintf("blocks of %d", r.BlockSize))
	if r.Endpoint != "" {
		add(r.Endpoint, "")
	}
	return line(Dim, strings.Join(parts, "; "))
}

// bottom returns the line of help, or the filter while the reader types.
func (v *View) bottom() Line {
	if v.typing {
		return Line{Spans: []Span{{"filter: " + escape.Text(v.filter), Bold}, {Text: "_  Enter keeps it, Esc clears it"}}}
	}
	way := "up"
	if v.down {
		way = "down"
	}
	text := "q quit  / filter  < > sort  ? help  by " + columns[v.sort].name + " " + way
	if v.filter != "" {
		text += "  filter: " + v.filter
	}
	return line(Dim, text)
}

// keys explains keys and columns.
func (v *View) keys() []Line {
	lines := []Line{line(Plain, "Arrows, PgUp, PgDn, Home, End move. These keys sort; a second press reverses the order:")}
	for i := range columns {
		c := &columns[i]
		lines = append(lines, Line{Spans: []Span{{fmt.Sprintf(" %c  %-8s ", c.key, c.name), Bold}, {Text: c.help}}})
	}
	return lines
}

// cut shortens a text to a width, at the end.
func cut(text string, width int) string {
	if uniseg.StringWidth(text) <= width {
		return text
	}
	if width <= 0 {
		return ""
	}
	end, state := 0, -1
	for rest, left := text, width-1; ; {
		var one string
		var w int
		if one, rest, w, state = uniseg.FirstGraphemeClusterInString(rest, state); w > left {
			return text[:end] + "…"
		}
		end, left = end+len(one), left-w
	}
}

// shorten shortens a name to a width, in the middle: names of workers differ at the end.
func shorten(name string, width int) string {
	r := []rune(name)
	if uniseg.StringWidth(name) <= width {
		return name
	}
	head, tail := (width-1)/3, width-1-(width-1)/3
	for head+tail > 0 {
		if tail <= len(r)-head {
			if text := string(r[:head]) + "…" + string(r[len(r)-tail:]); uniseg.StringWidth(text) <= width {
				return text
			}
		}
		if head >= tail {
			head--
		} else {
			tail--
		}
	}
	return "…"
}
