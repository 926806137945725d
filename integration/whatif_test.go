package integration

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/whatif"
)

// TestWhatIf records conversations on three nodes with eight engines, one request after another. The replay of recorded
// blocks reproduces the reuse of the engines, and the stream and an export give the same report. The engines need no
// time, so the replay with own choices, which depend on the load, is not compared here but in judges/whatif.
func TestWhatIf(t *testing.T) {
	t.Parallel()
	const size, room, workers, requests = harness.BlockSize, 60, 8, 500
	fleet := harness.StartFleet(t, harness.FleetConfig{Nodes: 3, Workers: workers, Capacity: room,
		Serve: []string{"--record", "--record-span", "16"}})
	ctx := harness.Context(t)
	r := rand.New(rand.NewPCG(5, 6))
	var open []api.Tokens
	var session []string
	tokens, reused := 0, 0
	for i := range requests {
		c := r.IntN(len(open) + 1)
		if c == len(open) {
			open, session = append(open, harness.Tokens(1, 5*size)), append(session, fmt.Sprint("s", i))
		}
		open[c] = append(open[c][:len(open[c]):len(open[c])], harness.Tokens(1000*i, (1+r.IntN(6))*size)...)
		prompt, of, id := open[c], session[c], fmt.Sprint("r", i)
		if len(prompt) > 40*size {
			open, session = append(open[:c], open[c+1:]...), append(session[:c], session[c+1:]...)
		}
		node := fleet.Asks[i%len(fleet.Asks)]
		s, err := node.Select(ctx, &api.SelectRequest{RequestID: id, Book: true, SessionID: of,
			Query: api.Query{Model: "m", BlockSize: size, Tokens: prompt}})
		if err != nil {
			t.Fatal(err)
		}
		hit, err := fleet.Engines[s.Worker].Serve(prompt, nil)
		if err != nil {
			t.Fatal(err)
		}
		hit = min(hit, len(prompt)/size-1)
		if i >= requests/2 {
			tokens, reused = tokens+len(prompt), reused+hit*size
		}
		for _, err := range []error{node.PrefillComplete(ctx, "m", id),
			node.Report(ctx, &api.Report{RequestID: id, CachedTokens: uint64(hit * size)}), node.Free(ctx, "m", id)} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	fleet.AwaitRecords(t, 3*requests)
	ask := func(args ...string) *whatif.Report {
		t.Helper()
		out := harness.Run(t, "indexer", append([]string{"what-if", "--json", "--quiet", "--seeds", "1"}, args...)...)
		rep := &whatif.Report{}
		if err := json.Unmarshal([]byte(out.Stdout), rep); err != nil || out.Code != 0 {
			t.Fatalf("%q: %+v, %v", args, out, err)
		}
		return rep
	}
	rep := ask("--nats", fleet.NATS, "--since", "1h", "--capacity", "2x", "--workers", "+2")
	want := float64(reused) / float64(tokens)
	// In the replay a request may overlap the next one, because its simulated time differs: a few blocks differ.
	if math.Abs(rep.Measured.HitRate-want) > 1e-9 || math.Abs(rep.HistoryError.HitRate) > 0.02 {
		t.Errorf("the engines reused %v, measured %v, the replay %v", want, rep.Measured.HitRate, rep.History.HitRate)
	}
	if c := rep.Counts; c.Read != requests || c.Replayed != requests || c.Unreported != 0 || rep.Changed == nil ||
		len(rep.Workers) != workers || len(rep.ChangedFleet) != workers+2 || rep.Workers[0].DeviceBlocks != room ||
		rep.ChangedFleet[9].DeviceBlocks != 2*room {
		t.Errorf("%+v\n%+v\n%+v", c, rep, rep.Changed)
	}

	dir := t.TempDir()
	save := func(name string, args ...string) string {
		t.Helper()
		out := harness.Run(t, "indexer", append(args, "--nats", fleet.NATS)...)
		if out.Code != 0 {
			t.Fatal(out.Stderr)
		}
		if err := os.WriteFile(dir+"/"+name, []byte(out.Stdout), 0o600); err != nil {
			t.Fatal(err)
		}
		return dir + "/" + name
	}
	file := save("requests.jsonl", "record", "export", "--format", "json", "--block-tokens", "16")
	list := save("workers.json", "workers", "--json")
	offline := ask("--file", file, "--fleet", list)
	if math.Abs(offline.History.HitRate-rep.History.HitRate) > 1e-9 || offline.Measured.HitRate != rep.Measured.HitRate ||
		offline.Changed != nil {
		t.Errorf("from files: %+v, %v in place of %v", offline, offline.History.HitRate, rep.History.HitRate)
	}
	trace := save("trace.jsonl", "record", "export")
	for _, x := range []struct {
		code int
		want string
		args []string
	}{
		{2, "--policy", []string{"--nats", fleet.NATS, "--policy", "none"}},
		{2, "--token-bytes", []string{"--nats", fleet.NATS, "--host-tier", "200GiB"}},
		{2, "--workers", []string{"--nats", fleet.NATS, "--workers", "2"}},
		{2, "--fleet", []string{"--file", file}},
		{1, "leaves none", []string{"--nats", fleet.NATS, "--workers", "-8"}},
		{1, "of model", []string{"--nats", fleet.NATS, "--model", "other", "--fleet-capacity", "100"}},
		{1, "--format json", []string{"--file", trace, "--fleet", list}},
		{1, "--record", []string{"--nats", fleet.NATS, "--namespace", "other"}},
		{0, "error of the replay of the history", []string{"--file", file, "--fleet-capacity", fmt.Sprint(room * size)}},
	} {
		out := harness.Run(t, "indexer", append([]string{"what-if", "--quiet"}, x.args...)...)
		if out.Code != x.code || !strings.Contains(out.Stdout+out.Stderr, x.want) {
			t.Errorf("%q: %+v, want %q", x.args, out, x.want)
		}
	}
}
