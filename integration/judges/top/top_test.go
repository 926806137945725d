//go:build judges

package top

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// terminal is a terminal of a separate tmux server.
type terminal struct {
	*testing.T
	socket string
}

// newTerminal runs a command in a terminal of a size, and keeps the terminal when the command ends.
func newTerminal(t *testing.T, width, height int, command string) *terminal {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "top") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	x := &terminal{t, filepath.Join(dir, "s")}
	t.Cleanup(func() {
		exec.Command("tmux", "-S", x.socket, "kill-server").Run()
		os.RemoveAll(dir)
	})
	x.tmux("-u", "-f", "/dev/null", "new-session", "-d", "-x", fmt.Sprint(width), "-y", fmt.Sprint(height),
		command+"; echo ended with $?; cat")
	return x
}

func (x *terminal) tmux(args ...string) string {
	x.Helper()
	c := exec.Command("tmux", append([]string{"-S", x.socket}, args...)...)
	c.Env = append(harness.Environment(nil), "LC_ALL=C.UTF-8")
	out, err := c.CombinedOutput()
	if err != nil {
		x.Fatalf("tmux %q: %v: %s (go run ./integration/judges/fetch installs tmux)", args, err, out)
	}
	return string(out)
}

// press sends keys by their tmux names.
func (x *terminal) press(keys ...string) { x.tmux(append([]string{"send-keys"}, keys...)...) }

// await waits until the screen satisfies so.
func (x *terminal) await(what string, so func(screen string) bool) {
	x.Helper()
	harness.Eventually(x, what, func() (bool, string) {
		screen := x.tmux("capture-pane", "-p")
		return so(screen), "\n" + screen
	})
}

func (x *terminal) shows(text string) {
	x.Helper()
	x.await("it shows "+text, func(screen string) bool { return strings.Contains(screen, text) })
}

// table parses the table of a screen or frame: the cells of every rank by column, in order.
func table(text string) (ranks []map[string]string) {
	var heading []string
	for line := range strings.Lines(text) {
		cells := strings.Fields(line)
		switch {
		case len(cells) > 2 && slices.Contains(cells, "WORKER") && slices.Contains(cells, "STATE"):
			heading = cells
		case len(heading) == 0 || len(cells) != len(heading) || !strings.Contains(cells[0], "/"):
		default:
			row := map[string]string{}
			for i, cell := range cells {
				row[heading[i]] = cell
			}
			ranks = append(ranks, row)
		}
	}
	return ranks
}

func names(ranks []map[string]string) (list []string) {
	for _, r := range ranks {
		list = append(list, r["WORKER"])
	}
	return list
}

// expect returns the expected table from the output of indexer workers and indexer loads. quiet reports whether the
// fleet is quiet: every shim holds a lease, is connected to the engine, and has caught up.
func expect(t *testing.T, nats string) (ranks []map[string]string, quiet bool) {
	t.Helper()
	list := harness.Run(t, "indexer", "workers", "--json", "--nats", nats)
	under := harness.Run(t, "indexer", "loads", "--json", "--nats", nats)
	quiet = list.Code == 0 && under.Code == 0
	loads := map[string]api.RankLoad{}
	for _, m := range harness.Decode[api.LoadList](under).Models {
		for _, r := range m.Ranks {
			loads[fmt.Sprintf("%s/%d", r.Worker, r.Rank)] = r
		}
	}
	for _, w := range harness.Decode[api.WorkerList](list).Workers {
		name := fmt.Sprintf("%s/%d", w.Instance, w.Rank)
		l := loads[name]
		row := map[string]string{"WORKER": name, "STATE": "unregistered", "DEVICE": fmt.Sprint(w.Blocks.Device),
			"HOST": fmt.Sprint(w.Blocks.Host), "DISK": fmt.Sprint(w.Blocks.Disk), "REQS": fmt.Sprint(l.ActiveRequests),
			"PREFILL": fmt.Sprint(l.ActivePrefillTokens), "DECODE": fmt.Sprint(l.ActiveBlocks)}
		if w.Record != nil {
			row["STATE"], row["ROLE"] = string(w.Record.State), string(w.Record.Role)
			quiet = quiet && w.Engine == api.EngineConnected && !w.CatchingUp && w.Lease != nil &&
				w.Lease.State == "held" && w.Blocks.Device > 0
		}
		ranks = append(ranks, row)
	}
	return ranks, quiet
}

// same waits until show's result is equal to the commands' output before and after show, of a quiet fleet. A single
// output may be of another moment.
func same(t *testing.T, nats, what string, show func() string) {
	t.Helper()
	harness.Eventually(t, what, func() (bool, string) {
		want, quiet := expect(t, nats)
		shown := show()
		after, still := expect(t, nats)
		return quiet && still && equal(want, after) && equal(table(shown), want),
			fmt.Sprintf("\n%s\nbefore %v, quiet: %v\nafter %v, quiet: %v", shown, want, quiet, after, still)
	})
}

// equal reports whether a table has all expected cells.
func equal(got, want []map[string]string) bool {
	return slices.EqualFunc(got, want, func(g, w map[string]string) bool {
		for name, cell := range w {
			if shown, there := g[name]; there && shown != cell || !there && name != "ROLE" {
				return false
			}
		}
		return true
	})
}

// TestTop performs a user's typical steps.
func TestTop(t *testing.T) {
	t.Parallel()
	addr, data := loopback.Reserve(t), t.TempDir()
	serveNATS := func() *harness.Process {
		p := harness.Start(t, "nats-server", "-js", "-sd", data, "-a", "127.0.0.1", "-p", strings.Split(addr, ":")[1])
		p.WaitFor(`Server is ready`)
		return p
	}
	server := serveNATS()
	for _, id := range []string{"node-a", "node-b"} {
		harness.Start(t, "indexer", "serve", "--nats", addr, "--node-id", id,
			"--partition-replicas", "2", "--partitions", "4",
			"--http-listen", "127.0.0.1:0", "--request-expiry", "1h").WaitFor(`msg=ready`)
	}
	var engines []*enginesim.Engine
	for i, role := range []string{"aggregated", "prefill", "decode"} {
		e := harness.StartSimEngine(t)
		engines = append(engines, e)
		harness.StartSimShim(t, e, addr, fmt.Sprintf("gpu-%d", i+1), "--role", role, "--lease", "1h")
		harness.ServePrompt(t, e, harness.Tokens(1000*i, 16*(20-5*i)))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*harness.Patience)
	defer cancel()
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{"nats://" + addr}, Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ns, err := jetstream.OpenNamespace(ctx, conn, "default")
	if err != nil {
		t.Fatal(err)
	}
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	locals := hasher.Hash(nil, harness.Tokens(50_000, 3*harness.BlockSize))
	harness.PublishAs(t, ctx, ns, "tiers", &events.Batch{Incarnation: 1, FirstID: 1, Model: "m",
		BlockSize: harness.BlockSize, Events: []events.Event{
			{Kind: events.Stored, Tier: events.Host, Blocks: []events.BlockHash{1, 2}, Locals: locals[:2]},
			{Kind: events.Stored, Tier: events.Disk, HasParent: true, Parent: 2, Blocks: []events.BlockHash{3},
				Locals: locals[2:]}}})
	harness.Eventually(t, "all workers are listed", func() (bool, string) {
		list, quiet := expect(t, addr)
		return quiet && len(list) == 4 && list[3]["DISK"] == "1", fmt.Sprint(list)
	})
	router := harness.Client(t, conn, "default", client.Options{})
	for i, worker := range []events.WorkerID{"gpu-1", "gpu-2", "gpu-2"} {
		if _, err := router.Book(ctx, &api.BookRequest{RequestID: fmt.Sprint("r", i), Worker: worker,
			Prompt:                 api.Prompt{Model: "m", Tokens: harness.Tokens(1000*i, 16*(i+3))},
			EffectivePrefillTokens: uint64(10 * (i + 1))}); err != nil {
			t.Fatal(err)
		}
	}

	same(t, addr, "--once prints the same", func() string {
		r := harness.Run(t, "indexer", "top", "--once", "--nats", addr, "--interval", "1ms")
		if r.Code != 0 {
			return r.Stderr
		}
		return r.Stdout
	})
	if r := harness.Run(t, "indexer", "top", "--nats", addr); r.Code != 2 || !strings.Contains(r.Stderr, "--once") {
		t.Errorf("without a terminal: %+v", r)
	}

	x := newTerminal(t, 80, 24, harness.Program(t, "indexer")+" top --interval 100ms --nats "+addr)
	screen := func() string { return x.tmux("capture-pane", "-p") }
	same(t, addr, "the screen shows the same", screen)
	x.shows("nodes 2/2 ready  workers 4  ranks 4  partitions 4")
	order := func(want ...string) {
		t.Helper()
		x.await(fmt.Sprint("the rows are ", want), func(screen string) bool {
			return slices.Equal(names(table(screen)), want)
		})
	}
	x.press("h")
	order("tiers/0", "gpu-1/0", "gpu-2/0", "gpu-3/0")
	x.press("p")
	order("gpu-2/0", "gpu-1/0", "gpu-3/0", "tiers/0")
	x.press("w")
	order("gpu-1/0", "gpu-2/0", "gpu-3/0", "tiers/0")
	x.press("/", "d", "e", "c", "o", "d", "e")
	order("gpu-3/0")
	x.press("Enter", "Down")
	x.shows("ranks 1 of 4")
	x.press("Escape")
	order("gpu-1/0", "gpu-2/0", "gpu-3/0", "tiers/0")
	x.press("Down")
	x.shows("gpu-2/0 schedulable; lease held")
	x.press("?")
	x.shows("blocks removed a second")
	x.press("?")
	x.tmux("resize-window", "-x", "180", "-y", "40")
	x.shows("MODEL")
	same(t, addr, "the wide screen shows the same", screen)

	server.Kill()
	x.shows("NATS at " + addr + " does not answer")
	order("gpu-1/0", "gpu-2/0", "gpu-3/0", "tiers/0") // the last rows stay
	serveNATS()
	x.await("the screen is up to date again", func(screen string) bool {
		return strings.Contains(screen, "nodes 2/2 ready") && !strings.Contains(screen, "not up to date")
	})
	harness.ServePrompt(t, engines[2], harness.Tokens(70_000, 16*7))
	x.await("gpu-3 holds 17 blocks", func(screen string) bool {
		rows := table(screen)
		return len(rows) == 4 && rows[2]["DEVICE"] == "17"
	})
	same(t, addr, "the screen shows the same again", screen)

	shim := harness.StartSimShim(t, harness.StartSimEngine(t), addr, "gpu-0", "--lease", "1s")
	shim.WaitFor("msg=registered")
	shim.Kill()
	x.await("gpu-0 has expired, is listed last and is not counted", func(screen string) bool {
		rows := table(screen)
		return len(rows) == 5 && rows[4]["WORKER"] == "gpu-0/0" && strings.HasPrefix(rows[4]["STATE"], "expired-") &&
			rows[4]["DEVICE"] == "-" && strings.Contains(screen, "workers 4  ranks 4  partitions 4")
	})
	x.press("End")
	x.shows("gpu-0/0 expired ")
	x.press("q")
	x.await("the program has ended, and the terminal is restored", func(screen string) bool {
		return strings.HasPrefix(screen, "ended with 0\n") && !strings.Contains(screen, "gpu-1")
	})
}
