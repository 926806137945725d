package top

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gdamore/tcell/v2"
	"github.com/rivo/uniseg"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var noon = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

// seen returns a look at three workers, the given seconds after noon.
func seen(seconds int, workers ...api.WorkerInfo) *Look {
	at := noon.Add(time.Duration(seconds) * time.Second)
	used, total := uint64(750), uint64(1000)
	if workers == nil {
		record := func(s api.WorkerState, role api.Role, reasons ...string) *api.WorkerRecord {
			return &api.WorkerRecord{State: s, Reasons: reasons, WorkerSpec: api.WorkerSpec{Role: role,
				Endpoint: "http://10.0.0.1:8000"}}
		}
		workers = []api.WorkerInfo{
			{Instance: "gpu-1", Model: "llama", BlockSize: 16, Partition: 1, Incarnation: 1, LastSeen: at.Add(-3 * time.Second),
				Blocks: api.TierCounts{Device: 123_456, Host: 40}, Stored: uint64(100 + 25*seconds), Engine: api.EngineConnected,
				Lease:  &api.Lease{State: "held", Host: "host-1"},
				Record: record(api.WorkerSchedulable, api.RoleAggregated)},
			{Instance: "gpu-2", Rank: 1, Model: "llama", BlockSize: 16, Partition: 2, Incarnation: 1, LastSeen: at,
				Blocks: api.TierCounts{Device: 7, Disk: 99_999}, Removed: uint64(3 * seconds), Engine: api.EngineConnected,
				Lease:  &api.Lease{State: "held", Host: "host-2"},
				Record: record(api.WorkerDraining, api.RoleDecode, "new driver")},
			{Instance: "gpu-3", Model: "qwen", BlockSize: 64, Partition: 2, Incarnation: 1, Engine: api.EngineGone},
		}
	}
	return &Look{At: at, Namespace: "default", Problems: []string{},
		Nodes: []api.NodeState{
			{Node: "a", Status: &api.Status{Ready: true, Partitions: []api.PartitionDetail{detail(1, 5), detail(2, 0)},
				Waiting: []api.WaitingStatus{{Model: "llama", Requests: 2}}}},
			{Node: "b", Status: &api.Status{Ready: true, Partitions: []api.PartitionDetail{detail(1, 12), detail(2, 9)}}},
		},
		Workers: &api.WorkerList{Complete: true, Workers: workers},
		Loads: &api.LoadList{Models: []api.ModelLoads{{Model: "llama", Requests: 3, Ranks: []api.RankLoad{
			{Worker: "gpu-1", ActiveRequests: 1, ActivePrefillTokens: 40, ActiveBlocks: 4},
			{Worker: "gpu-2", Rank: 1, ActiveRequests: 2, ActivePrefillTokens: 1200, ActiveBlocks: 90}}}}},
		Engines: &api.EngineLoads{Loads: []api.EngineLoad{{Worker: "gpu-1", UsedBlocks: &used, TotalBlocks: &total}}},
	}
}

func detail(p events.Partition, lag uint64) api.PartitionDetail {
	return api.PartitionDetail{PartitionStatus: api.PartitionStatus{Partition: p}, Lag: lag}
}

// screen is a simulated terminal that sends its content after each change.
type screen struct {
	tcell.SimulationScreen
	frames chan string
	sizes  chan [2]int // the size to set after the next frame
}

// text returns the content of the screen, without trailing spaces.
func (s *screen) text() string {
	cells, width, height := s.GetContents()
	var b strings.Builder
	for y := range height {
		row := ""
		for x := range width {
			row += string(cells[y*width+x].Runes)
		}
		b.WriteString(strings.TrimRight(row, " ") + "\n")
	}
	return strings.TrimRight(b.String(), "\n")
}

// Show is called by the loop under test.
func (s *screen) Show() {
	s.SimulationScreen.Show()
	select {
	case s.frames <- s.text():
	case <-time.After(time.Minute): // the test has ended
	}
	select {
	case size := <-s.sizes:
		s.SetSize(size[0], size[1])
		s.PostEvent(tcell.NewEventResize(size[0], size[1]))
	default:
	}
}

// shows draws a view on a terminal of a size and returns the content.
func shows(t *testing.T, v *View, width, height int) string {
	t.Helper()
	s := &screen{SimulationScreen: tcell.NewSimulationScreen("UTF-8"), frames: make(chan string, 1)}
	if err := s.Init(); err != nil {
		t.Fatal(err)
	}
	defer s.Fini()
	s.SetSize(width, height)
	draw(s, v)
	return <-s.frames
}

func newView(t *testing.T, order, filter string, looks ...*Look) *View {
	t.Helper()
	v, err := New(order, filter)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range looks {
		v.Learn(l)
	}
	return v
}

func press(v *View, keys string) {
	for _, k := range keys {
		switch k {
		case '\n':
			v.Press(tcell.NewEventKey(tcell.KeyEnter, 0, 0))
		case '\x1b':
			v.Press(tcell.NewEventKey(tcell.KeyEscape, 0, 0))
		case '↓':
			v.Press(tcell.NewEventKey(tcell.KeyDown, 0, 0))
		case '⇟':
			v.Press(tcell.NewEventKey(tcell.KeyPgDn, 0, 0))
		case '⤒':
			v.Press(tcell.NewEventKey(tcell.KeyHome, 0, 0))
		case '⤓':
			v.Press(tcell.NewEventKey(tcell.KeyEnd, 0, 0))
		case '⌫':
			v.Press(tcell.NewEventKey(tcell.KeyBackspace2, 0, 0))
		default:
			v.Press(tcell.NewEventKey(tcell.KeyRune, k, 0))
		}
	}
}

// TestFrames shows the same fleet on a small and on a wide terminal, and as text.
func TestFrames(t *testing.T) {
	t.Parallel()
	v := newView(t, "worker", "", seen(0), seen(2))
	const small = `kvatlas default  12:00:02 UTC  nodes 2/2 ready  workers 3  ranks 3  partitions 2
blocks  device 123k  host 40  disk 99999  external 0  stored 25/s  removed 3/s
load    requests 3  prefill 1240 tokens  decode 94 blocks  waiting 2  lag 5

WORKER  STATE       ROLE       DEVICE HOST  DISK +/S -/S REQS PREFILL DECODE LAG
gpu-1/0 schedulable aggregated   123k   40     0  25   0    1      40      4   5
gpu-2/1 draining    decode          7    0 99999   0   3    2    1200     90   0
gpu-3/0 engine-gone -               0    0     0   0   0    0       0      0   0




gpu-1/0 schedulable; lease held (host-1); engine connected; aggregated; model l…
q quit  / filter  < > sort  ? help  by WORKER up`
	if got := shows(t, v, 80, 14); got != small {
		t.Errorf("80 columns:\n%s\nwant\n%s", got, small)
	}
	const wide = `WORKER   STATE        ROLE        DEVICE  HOST   DISK  EXTERNAL  +/S  -/S  REQS  ` +
		`PREFILL  DECODE  USED%  LAG  LEASE  ENGINE     SEEN  MODEL
gpu-1/0  schedulable  aggregated    123k    40      0         0   25    0     1       40       4     75    5  held   ` +
		`connected    3s  llama
gpu-2/1  draining     decode           7     0  99999         0    0    3     2     1200      90      -    0  held   ` +
		`connected    0s  llama
gpu-3/0  engine-gone  -                0     0      0         0    0    0     0        0       0      -    0  -      ` +
		`gone          -  qwen
`
	if got := shows(t, v, 160, 14); !strings.Contains(got, wide) {
		t.Errorf("160 columns:\n%s\nwant in it\n%s", got, wide)
	}
	all := "blocks  device 123463  host 40  disk 99999  external 0  stored 25/s  removed 3/s\n"
	table := strings.ReplaceAll(wide, "   123k", " 123456")
	if got := v.Text(); !strings.Contains(got, all) || !strings.HasSuffix(got, table) {
		t.Errorf("as text:\n%s\nwant in it\n%s%s", got, all, table)
	}
}

// TestExpired: expired ranks come after all others in every order, with the time since the expiry. The sums do not
// count them.
func TestExpired(t *testing.T) {
	t.Parallel()
	l := seen(2)
	gone := func(name events.WorkerID, ago time.Duration) api.ExpiredWorker {
		expires := l.At.Add(-ago)
		return api.ExpiredWorker{Instance: name, Model: "llama", Lease: api.Lease{State: "expired", Host: "host-1", PID: 7,
			Expires: expires, Renewed: expires.Add(-10 * time.Second)}}
	}
	l.Workers.Expired = []api.ExpiredWorker{gone("gpu-0", 12*time.Minute+3*time.Second)}
	v := newView(t, "worker", "", seen(0), l)
	press(v, "⤓")
	const want = `kvatlas default  12:00:02 UTC  nodes 2/2 ready  workers 3  ranks 3  partitions 2
blocks  device 123k  host 40  disk 99999  external 0  stored 25/s  removed 3/s
load    requests 3  prefill 1240 tokens  decode 94 blocks  waiting 2  lag 5
the lease of gpu-0/0 has expired: its shim is gone
WORKER  STATE       ROLE       DEVICE HOST  DISK +/S -/S REQS PREFILL DECODE LAG
gpu-1/0 schedulable aggregated   123k   40     0  25   0    1      40      4   5
gpu-2/1 draining    decode          7    0 99999   0   3    2    1200     90   0
gpu-3/0 engine-gone -               0    0     0   0   0    0       0      0   0
gpu-0/0 expired-12m -               -    -     -   -   -    -       -      -   -



gpu-0/0 expired 12m3s ago; process 7 on host-1 renewed its lease last 12m13s ag…
q quit  / filter  < > sort  ? help  by WORKER up`
	if got := shows(t, v, 80, 14); got != want {
		t.Errorf("80 columns:\n%s\nwant\n%s", got, want)
	}
	if got := v.Text(); !strings.Contains(got, "\ngpu-0/0  expired-12m  -") {
		t.Errorf("as text:\n%s", got)
	}
	for _, keys := range []string{"w", "d", "d", "s", "s", "e", "a", "m", "m"} {
		press(v, keys)
		if got := rows(t, v); len(got) != 4 || got[3] != "gpu-0/0" {
			t.Errorf("after %q: %v", keys, got)
		}
	}
	press(v, "w/expired\n")
	if got := shows(t, v, 120, 14); !strings.Contains(got, "workers 0  ranks 0 of 3  partitions 2") ||
		fmt.Sprint(rows(t, v)) != "[gpu-0/0]" {
		t.Errorf("the expired ranks:\n%s", got)
	}
	l = seen(3)
	l.Workers.Expired = []api.ExpiredWorker{gone("gpu-0", 59*time.Minute), gone("gpu-9", time.Second)}
	v.Learn(l)
	if got := shows(t, v, 120, 14); !strings.Contains(got, "the leases of 2 ranks have expired: their shims are gone") ||
		!strings.Contains(got, "gpu-9/0  expired-1s") {
		t.Errorf("two expired ranks:\n%s", got)
	}
	v.Learn(seen(4))
	press(v, "\x1b")
	if got := shows(t, v, 120, 14); strings.Contains(got, "expired") || len(rows(t, v)) != 3 {
		t.Errorf("after the last expired rank:\n%s", got)
	}
}

// TestFitsEverySize: a frame fills the terminal exactly, for all sizes and names.
func TestFitsEverySize(t *testing.T) {
	t.Parallel()
	var many []api.WorkerInfo
	for i := range 40 {
		many = append(many, api.WorkerInfo{Instance: events.WorkerID(fmt.Sprintf("wörker-名前-\x1b[31m-%s-%02d",
			strings.Repeat("x", i), i)), Model: "m\n", Stored: 1 << 60})
	}
	many = slices.SortedFunc(slices.Values(many), func(a, b api.WorkerInfo) int {
		return strings.Compare(string(a.Instance), string(b.Instance))
	})
	v := newView(t, "worker", "")
	for _, l := range []*Look{nil, seen(0), seen(1, many...), seen(2, []api.WorkerInfo{}...)} {
		if l != nil {
			v.Learn(l)
		}
		for _, keys := range []string{"", "⤓", "/x", "\n", "?"} {
			press(v, keys)
			for width := 0; width < 140; width += 7 {
				for height := range 26 {
					frame := v.Frame(width, height)
					if len(frame) != height {
						t.Fatalf("%d by %d: %d lines", width, height, len(frame))
					}
					for _, l := range frame {
						text := l.text()
						if uniseg.StringWidth(text) > width || strings.ContainsAny(text, "\x1b\n") {
							t.Fatalf("%d by %d: %q", width, height, text)
						}
					}
				}
			}
		}
		press(v, "?\x1b")
	}
}

// rows returns the first cells of the table's rows.
func rows(t *testing.T, v *View) (names []string) {
	t.Helper()
	table := false
	for _, line := range strings.Split(shows(t, v, 80, 24), "\n") {
		switch {
		case strings.HasPrefix(line, "WORKER "):
			table = true
		case table && line == "":
			return names
		case table:
			names = append(names, strings.Fields(line)[0])
		}
	}
	return names
}

// TestKeys covers sorting, filtering and moving.
func TestKeys(t *testing.T) {
	t.Parallel()
	v := newView(t, "worker", "", seen(0), seen(2))
	for _, c := range []struct{ keys, want string }{
		{"", "gpu-1/0 gpu-2/1 gpu-3/0"},
		{"w", "gpu-3/0 gpu-2/1 gpu-1/0"},
		{"w", "gpu-1/0 gpu-2/1 gpu-3/0"},
		{"p", "gpu-2/1 gpu-1/0 gpu-3/0"},        // the largest first
		{"p", "gpu-3/0 gpu-1/0 gpu-2/1"},        // the smallest first
		{"u", "gpu-1/0 gpu-2/1 gpu-3/0"},        // unknown values come last
		{"uu", "gpu-1/0 gpu-2/1 gpu-3/0"},       // in both directions
		{"s", "gpu-3/0 gpu-2/1 gpu-1/0"},        // the worst first
		{">", "gpu-3/0 gpu-1/0 gpu-2/1"},        // ROLE
		{"<<", "gpu-1/0 gpu-2/1 gpu-3/0"},       // WORKER
		{"/gpu-2", "gpu-2/1"},                   // while the filter is typed
		{"⌫", "gpu-1/0 gpu-2/1 gpu-3/0"},        // gpu-
		{"\x1b/draining q", "no"},               // q is a letter here; "no rank matches"
		{"⌫⌫\n", "gpu-2/1"},                     // and does not quit
		{"\x1b/qwen\n", "gpu-3/0"},              // a model
		{"\x1b/llama host-1", "gpu-1/0"},        // all words
		{"\x1b", "gpu-1/0 gpu-2/1 gpu-3/0"},     // no filter
		{"/AGGREGATED\n\x1b/DECODE", "gpu-2/1"}, // upper case is lower case
	} {
		press(v, c.keys)
		if got := strings.Join(rows(t, v), " "); got != c.want {
			t.Errorf("after %q: %s, want %s", c.keys, got, c.want)
		}
	}
	press(v, "\x1b")
	press(v, "?")
	if !strings.Contains(shows(t, v, 80, 24), "blocks stored a second") {
		t.Error("? does not explain the columns")
	}
	if v.Press(tcell.NewEventKey(tcell.KeyRune, 'q', 0)) {
		t.Error("the key that closes the help ends the program")
	}
	if !v.Press(tcell.NewEventKey(tcell.KeyRune, 'q', 0)) || !v.Press(tcell.NewEventKey(tcell.KeyCtrlC, 0, 0)) {
		t.Error("q and Ctrl-C do not end the program")
	}
}

// TestCurrentRow: the selected row follows its worker through changes. Without a selection, the first row is the
// current row.
func TestCurrentRow(t *testing.T) {
	t.Parallel()
	var many []api.WorkerInfo
	for i := range 100 {
		many = append(many, api.WorkerInfo{Instance: events.WorkerID(fmt.Sprintf("w%02d", i)), Model: "m",
			Blocks: api.TierCounts{Device: uint64(i)}})
	}
	v := newView(t, "worker", "", seen(0, many...))
	current := func() string {
		for _, l := range v.Frame(80, 24) {
			if l.Reverse {
				return strings.Fields(l.text())[0]
			}
		}
		return "none"
	}
	for _, c := range []struct{ keys, want string }{
		{"", "w00/0"}, {"d", "w99/0"}, {"dw", "w00/0"}, {"↓↓", "w02/0"}, {"d", "w02/0"}, {"w", "w02/0"},
		{"⇟", "w19/0"}, {"⤓", "w99/0"}, {"/w1", "w10/0"}, {"\x1b", "w99/0"}, {"⤒", "w00/0"},
	} {
		press(v, c.keys)
		if got := current(); got != c.want {
			t.Errorf("after %q: %s, want %s", c.keys, got, c.want)
		}
	}
	press(v, "↓↓↓")
	v.Learn(seen(1, many[2:]...))
	if got := current(); got != "w03/0" {
		t.Errorf("w00 and w01 went: %s, want w03/0", got)
	}
	v.Learn(seen(2, many[50:]...))
	if got := current(); got != "w50/0" {
		t.Errorf("the selected worker went: %s, want w50/0", got)
	}
}

// TestNotices: the most severe message is shown first, and the earlier state remains.
func TestNotices(t *testing.T) {
	t.Parallel()
	v := newView(t, "worker", "")
	says := func(want string, rows bool) {
		t.Helper()
		got := shows(t, v, 120, 20)
		if !strings.Contains(got, want) || strings.Contains(got, "gpu-2") != rows {
			t.Errorf("want %q, and rows: %v; have\n%s", want, rows, got)
		}
	}
	says("asking the indexers", false)
	v.Fail(errors.New("no answer"), noon)
	says("no data yet: no answer", false)
	l := seen(1)
	l.Loads, l.NoLoads = nil, errors.New("not allowed")
	v.Learn(l)
	says("loads are unknown: not allowed", true)
	says("load    not known", true)
	l = seen(2)
	l.Problems = []string{"the disk\x07 is full", "another"}
	v.Learn(l)
	says("1 of 2 problems (indexer status has all): the disk\\a is full", true)
	l.Workers.Complete, l.Workers.Missing = false, []events.Partition{3}
	v.Learn(l)
	says("INCOMPLETE: partitions [3] could not be examined", true)
	v.Fail(errors.New("NATS is away"), noon.Add(5*time.Second))
	v.Fail(errors.New("NATS is away"), noon.Add(9*time.Second))
	says("not up to date since 12:00:05 UTC: NATS is away", true)
	v.Learn(seen(3))
	if got := shows(t, v, 120, 20); strings.Contains(got, "not up to date") {
		t.Errorf("after a successful look:\n%s", got)
	}
	l = seen(5)
	l.Nodes[1].Status = nil
	v.Learn(l)
	says("nodes 1/2 ready", true)
}

// TestZones: a line shows the nodes of each zone, zones with missing nodes first, if any node has a zone.
func TestZones(t *testing.T) {
	t.Parallel()
	l := seen(2)
	ready := &api.Status{Ready: true}
	l.Nodes = append(l.Nodes, api.NodeState{Node: "c", Zone: "rack-1", Status: ready},
		api.NodeState{Node: "d", Zone: "rack-2", Status: ready})
	l.Nodes[1].Zone, l.Nodes[1].Status = "rack-2", &api.Status{}
	v := newView(t, "worker", "", seen(0), l)
	const line = "\nzones   rack-2 1/2 (not b)  rack-1 1/1  none 1/1\n"
	if got := shows(t, v, 80, 14); !strings.Contains(got, line) {
		t.Errorf("80 columns:\n%s\nwant in it%s", got, line)
	}
	if got := v.Text(); !strings.Contains(got, line) {
		t.Errorf("as text:\n%s\nwant in it%s", got, line)
	}
	l.Nodes[0].Status = nil
	v.Learn(l)
	if got := v.Text(); !strings.Contains(got, "\nzones   rack-2 1/2 (not b)  none 0/1 (not a)  rack-1 1/1\n") {
		t.Errorf("with a node that does not answer:\n%s", got)
	}
	v.Learn(seen(3))
	if got := shows(t, v, 80, 14); strings.Contains(got, "zones") {
		t.Errorf("no node has a zone:\n%s", got)
	}
}

// TestNumbers: a number has at most five columns, or is written in full.
func TestNumbers(t *testing.T) {
	t.Parallel()
	for x, want := range map[float64][2]string{
		0: {"0", "0"}, 0.5: {"0.5", "0.5"}, 99.94: {"99.9", "99.9"}, 99.99: {"100", "100"}, 100.4: {"100", "100.4"},
		99_999: {"99999", "99999"}, 99_999.6: {"100k", "99999.6"}, 123_456: {"123k", "123456"},
		999_499: {"999k", "999499"}, 999_500: {"1.00M", "999500"}, 1_234_567: {"1.23M", "1234567"},
		99_960_000: {"100M", "99960000"}, 1e18: {"1.00E", "1000000000000000000"}, 1.8e19: {"18.0E", "18000000000000000000"},
	} {
		v := &View{}
		short := v.number(x)
		v.exact = true
		if got := [2]string{short, v.number(x)}; got != want || len(short) > 5 {
			t.Errorf("%f: %q, want %q", x, got, want)
		}
	}
}

// TestSummaryFits80Columns: the summary of a busy fleet uses the signs of the rate columns.
func TestSummaryFits80Columns(t *testing.T) {
	t.Parallel()
	busy := func(seconds int) *Look {
		return seen(seconds, api.WorkerInfo{Instance: "gpu-1", Model: "llama", BlockSize: 16, Partition: 1, Incarnation: 1,
			Blocks: api.TierCounts{Device: 16_000}, Stored: uint64(11_960 * seconds), Removed: uint64(11_961 * seconds)})
	}
	v := newView(t, "worker", "", busy(0), busy(2))
	got := strings.Split(shows(t, v, 80, 14), "\n")[1]
	if want := "blocks  device 16000  host 0  disk 0  external 0  +11960/s  -11961/s"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestNamesAreShortenedInTheirMiddle: the distinctive part of a worker's name is at the end.
func TestNamesAreShortenedInTheirMiddle(t *testing.T) {
	t.Parallel()
	for width, want := range map[int]string{30: "vllm-decode-7d9f8c6b5-x2x4z/0",
		12: "vll…-x2x4z/0", 8: "vl…x4z/0", 1: "…"} {
		if got := shorten("vllm-decode-7d9f8c6b5-x2x4z/0", width); got != want {
			t.Errorf("%d columns: %q, want %q", width, got, want)
		}
	}
}

// TestColumnsAreUnique: every column has a unique key, and a unique place in the order of disappearance.
func TestColumnsAreUnique(t *testing.T) {
	t.Parallel()
	keys, ranks := map[rune]bool{'q': true, '/': true, '?': true, '<': true, '>': true}, map[int]bool{}
	for _, c := range columns {
		if keys[c.key] || ranks[c.rank] || c.rank >= len(columns) || c.number == nil && c.text == nil {
			t.Errorf("column %s: key %q, rank %d", c.name, c.key, c.rank)
		}
		keys[c.key], ranks[c.rank] = true, true
	}
	if _, err := New("blocks", ""); err == nil || !strings.Contains(err.Error(), "worker, state, role") {
		t.Errorf("an unknown column: %v", err)
	}
}

// TestRun runs the loop on a simulated terminal: it shows the fleet, displays an error, recovers, follows the
// terminal's size, handles keys, and ends.
func TestRun(t *testing.T) {
	t.Parallel()
	s := &screen{tcell.NewSimulationScreen("UTF-8"), make(chan string), make(chan [2]int, 1)}
	v := newView(t, "worker", "")
	looks := make(chan error, 1)
	n := 0
	look := func(ctx context.Context) (*Look, error) {
		select {
		case err := <-looks:
			n++
			return seen(n), err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	ended := make(chan error, 1)
	go func() { ended <- Run(t.Context(), s, v, look, time.Nanosecond) }()
	await := func(want string) (frame string) {
		t.Helper()
		for deadline := time.After(time.Minute); ; {
			select {
			case frame = <-s.frames:
				if strings.Contains(frame, want) {
					return frame
				}
			case err := <-ended:
				t.Fatalf("Run ended with %v", err)
			case <-deadline:
				t.Fatalf("the screen does not show %q but\n%s", want, frame)
			}
		}
	}
	await("asking the indexers")
	looks <- nil
	await("gpu-2/1")
	looks <- errors.New("NATS is away")
	if frame := await("NATS is away"); !strings.Contains(frame, "gpu-2/1") {
		t.Errorf("the earlier state is gone:\n%s", frame)
	}
	looks <- nil
	await("12:00:03")
	s.sizes <- [2]int{160, 30}
	s.InjectKey(tcell.KeyRune, 'z', 0) // an unused key
	await("EXTERNAL")
	s.InjectKey(tcell.KeyRune, 'd', 0)
	await("by DEVICE down")
	s.InjectKey(tcell.KeyRune, 'q', 0)
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("q does not end Run")
	}
}

// TestOnce looks twice, so the text and the ranks have rates, and returns the error of a failed look.
func TestOnce(t *testing.T) {
	t.Parallel()
	n := 0
	look := func(context.Context) (*Look, error) { n += 2; return seen(n), nil }
	v := newView(t, "+/s", "")
	if err := Once(t.Context(), v, look, time.Nanosecond); err != nil ||
		!strings.Contains(v.Text(), "stored 25/s  removed 3/s") {
		t.Errorf("%v\n%s", err, v.Text())
	}
	fleet, rate := v.Fleet(), 0.0
	for i := range fleet.Ranks {
		rate += fleet.Ranks[i].StoredRate
	}
	if len(fleet.Ranks) != len(v.ranks) || len(fleet.Expired) != len(v.rows)-len(v.ranks) || rate != 25 {
		t.Errorf("%d of %d ranks with a rate of %v, and %d expired", len(fleet.Ranks), len(v.ranks), rate, len(fleet.Expired))
	}
	failed := errors.New("failed")
	if err := Once(t.Context(), newView(t, "worker", ""), func(context.Context) (*Look, error) { return nil, failed },
		time.Nanosecond); !errors.Is(err, failed) {
		t.Errorf("%v, want %v", err, failed)
	}
}
