package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/operate/recording"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/routesim"
	"github.com/kvatlas/kvatlas/tools/trace"
)

var recordedTrace = flag.String("recorded-trace", "", "a trace for TestRecordedTrace; empty: generated traces")

// batches is a stream in memory.
type batches struct{ list []jetstream.RecordedBatch }

func (b *batches) Store(_ context.Context, node, _ string, data []byte) error {
	b.list = append(b.list, jetstream.RecordedBatch{Seq: events.StreamSeq(len(b.list) + 1), Node: node, Data: data})
	return nil
}

func (b *batches) Ensure(context.Context) error { return nil }

func (b *batches) Info(context.Context) (jetstream.RecordingInfo, error) {
	return jetstream.RecordingInfo{First: 1, Last: events.StreamSeq(len(b.list))}, nil
}

func (b *batches) Next(_ context.Context, from events.StreamSeq) (jetstream.RecordedBatch, error) {
	return b.list[from-1], nil
}

// unnamed stands for an id of less than a block, which recordings do not name.
const unnamed = 1 << 62

// canonical numbers the ids of a trace in order of their first use, and begins at time 0.
func canonical(reqs []trace.Request, blockSize int) []trace.Request {
	numbers, out := map[uint64]uint64{}, []trace.Request{}
	for _, r := range reqs {
		ids := []uint64{}
		for i, h := range r.HashIDs {
			if r.InputLength-i*trace.BlockTokens < blockSize {
				ids = append(ids, unnamed)
				continue
			}
			if _, known := numbers[h]; !known {
				numbers[h] = uint64(len(numbers))
			}
			ids = append(ids, numbers[h])
		}
		r.HashIDs, r.Timestamp = ids, r.Timestamp-reqs[0].Timestamp
		out = append(out, r)
	}
	return out
}

// TestRecordedTrace records the requests of a trace at their times, with several spans, and exports the recording. The
// export equals the trace except for the names of ids. A simulation of both gives the same reuse.
func TestRecordedTrace(t *testing.T) {
	t.Parallel()
	reqs := trace.Generate(trace.Options{Seed: 3, Requests: 2000, Clump: 2})
	if *recordedTrace != "" {
		var err error
		if reqs, err = trace.ReadFile(*recordedTrace, 0); err != nil {
			t.Fatal(err)
		}
	}
	const blockSize = 16
	hasher, err := events.NewHasher(blockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	keys, err := recording.NewKeys(bytes.Repeat([]byte{1}, recording.SecretBytes))
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC).UnixMilli()
	want := canonical(reqs, blockSize)
	for _, span := range []uint32{512, 64} {
		stream := &batches{}
		var tokens []uint32
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // each Run stores the present requests and ends
		r := recording.New(recording.Config{Node: "n", Keys: keys, Stream: stream, Span: span})
		for i, q := range reqs {
			tokens = q.PromptTokens(tokens[:0], blockSize)
			r.Request(&recording.Observed{Request: recording.Request{Time: begin + q.Timestamp, Model: "m", BlockSize: blockSize,
				Tokens: uint64(q.InputLength), Output: uint64(q.OutputLength)}, ID: fmt.Sprint(i), SessionID: q.SessionID,
				Sequence: events.SeqHashes(nil, hasher.Hash(nil, tokens))})
			if i%100 == 99 {
				r.Run(ctx)
			}
		}
		r.Run(ctx)
		var out bytes.Buffer
		e, err := recording.NewExporter(&out, recording.Mooncake, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := recording.Read(t.Context(), stream, recording.Filter{}, e.Write); err != nil {
			t.Fatal(err)
		}
		if err := e.Flush(); err != nil {
			t.Fatal(err)
		}
		got, err := trace.Import(&out, "", 0)
		if err != nil || got.Format != trace.Mooncake || len(got.Requests) != len(want) {
			t.Fatalf("%d requests of %d, format %q, %v", len(got.Requests), len(want), got.Format, err)
		}
		for i, q := range canonical(got.Requests, blockSize) {
			if !reflect.DeepEqual(q, want[i]) {
				t.Fatalf("span %d, request %d is %+v, recorded %+v", span, i, q, want[i])
			}
		}
		for _, capacity := range []int{150_000, 600_000} {
			if a, b := reused(t, reqs, capacity), reused(t, got.Requests, capacity); a != b || a == 0 {
				t.Errorf("span %d, capacity %d: the trace reuses %v of its tokens, the export %v", span, capacity, a, b)
			}
		}
	}
}

// reused returns the hit rate of a trace on four simulated engines.
func reused(t *testing.T, reqs []trace.Request, capacity int) float64 {
	t.Helper()
	w, err := routesim.FromTrace("trace", reqs, 64, 0)
	if err != nil {
		t.Fatal(err)
	}
	w.Engine.Capacity = capacity
	report, err := routesim.Compare(t.Context(), routesim.Options{Workloads: []routesim.Workload{w}, Workers: 4,
		Arms: []routesim.Arm{routesim.ArmExactShared}, Routers: []int{1}, Seed: 1, Routing: routing.DefaultConfig(),
		TableTokens: -1, TableDepth: -1})
	if err != nil {
		t.Fatal(err)
	}
	return report.Points[0].Runs[0].Total.HitRate
}

// TestRecording runs two nodes that record, and restarts NATS between requests. The export has every request with its
// choice, end and report, and no text of a request.
func TestRecording(t *testing.T) {
	t.Parallel()
	addr, data := loopback.Reserve(t), t.TempDir()
	startNATS := func() *harness.Process {
		p := harness.Start(t, "nats-server", "-js", "-sd", data, "-a", "127.0.0.1", "-p",
			addr[strings.LastIndex(addr, ":")+1:])
		p.WaitFor(`Server is ready`)
		return p
	}
	nats := startNATS()
	ctx := harness.Context(t)
	var asks []*client.Client
	for i := range 2 {
		x := harness.Start(t, "indexer", "serve", "--nats", addr, "--node-id", fmt.Sprint("n", i), "--partitions", "2",
			"--http-listen", "127.0.0.1:0", "--record", "--record-bytes", "16777216", "--record-age", "2h")
		http := x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		c := harness.Ask(t, http)
		asks = append(asks, c)
		if i == 0 {
			status, text, err := harness.Request(http, "POST", "/v1/workers",
				`{"instance":"w1","model":"m","block_size":16,"events":"none"}`)
			if err != nil || status != 200 {
				t.Fatal(status, text, err)
			}
		}
	}
	serve := func(i int) {
		t.Helper()
		id := fmt.Sprint("secret-request-", i)
		tokens := harness.Tokens(1, 1200)
		if i%2 == 1 {
			tokens = append(tokens[:600:600], harness.Tokens(1000*i, 200)...)
		}
		out, err := asks[0].Select(ctx, &api.SelectRequest{Query: api.Query{Model: "m", Tokens: tokens}, RequestID: id,
			Book: true, SessionID: "secret-session"})
		if err != nil || out.Worker != "w1" {
			t.Fatalf("%+v, %v", out, err)
		}
		for range 3 {
			if err := asks[0].OutputBlock(ctx, &api.RequestRef{Model: "m", RequestID: id}); err != nil {
				t.Fatal(err)
			}
		}
		if err := asks[1].PrefillComplete(ctx, "m", id); err != nil { // the other node waits for the booking
			t.Fatal(err)
		}
		if err := asks[0].Report(ctx, &api.Report{RequestID: id, CachedTokens: uint64(16 * i)}); err != nil {
			t.Fatal(err)
		}
		if err := asks[1].Free(ctx, "m", id); err != nil {
			t.Fatal(err)
		}
	}
	harness.Eventually(t, "both nodes know the worker", func() (bool, string) {
		for _, c := range asks {
			if _, err := c.Select(ctx, &api.SelectRequest{Query: api.Query{Model: "m", Tokens: harness.Tokens(1, 16),
				Diagnostic: true}}); err != nil {
				return false, err.Error()
			}
		}
		return true, ""
	})
	for i := range 4 {
		serve(i)
	}
	records := func(want uint64) {
		t.Helper()
		harness.Eventually(t, "the records are stored", func() (bool, string) {
			r := harness.Run(t, "indexer", "record", "status", "--nats", addr, "--json")
			var s struct {
				On               bool
				Records, Dropped uint64
				Stream           *api.RecordingStream
				Nodes            []struct{ State *api.RecordingStatus }
			}
			if err := json.Unmarshal([]byte(r.Stdout), &s); err != nil {
				return false, r.Stdout + r.Stderr
			}
			stored := uint64(0)
			for _, n := range s.Nodes {
				if n.State != nil {
					stored += n.State.Stored
				}
			}
			return s.On && s.Records == want && stored == want && s.Dropped == 0 && s.Stream != nil &&
				s.Stream.MaxBytes == 16<<20 && s.Stream.MaxAgeMS == 2*3600*1000 && s.Stream.Oldest != nil, r.Stdout
		})
	}
	records(12)
	nats.Kill()
	// While NATS is away, a booking is applied on its node and recorded there.
	if _, err := asks[0].Select(ctx, &api.SelectRequest{RequestID: "away", Book: true,
		Query: api.Query{Model: "m", Tokens: harness.Tokens(1, 1200)}}); err != nil {
		t.Fatal(err)
	}
	if err := asks[0].Free(ctx, "m", "away"); err != nil {
		t.Fatal(err)
	}
	startNATS()
	records(14)

	exported := harness.Run(t, "indexer", "record", "export", "--nats", addr, "--format", "json", "--since", "1h",
		"--model", "m")
	if exported.Code != 0 || strings.Contains(exported.Stdout, "secret") {
		t.Fatalf("%d %s %s", exported.Code, exported.Stdout, exported.Stderr)
	}
	var lines []recording.Line
	for line := range strings.Lines(exported.Stdout) {
		var l recording.Line
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, l)
	}
	if len(lines) != 5 {
		t.Fatalf("%d lines: %s", len(lines), exported.Stdout)
	}
	for i, l := range lines[:4] {
		if l.Model != "m" || l.BlockSize != 16 || l.Node != "n0" || !l.Booked || l.Choice == nil || l.Choice.Worker != "w1" ||
			!l.Freed || l.ReportedTokens == nil || *l.ReportedTokens != uint64(16*i) || l.OutputLength != 48 || !l.OutputKnown ||
			l.SessionID != "s0" || l.FirstTokenMS > l.LifeMS || len(l.HashIDs) != (int(l.InputLength)+511)/512 {
			t.Errorf("request %d: %+v", i, l)
		}
	}
	if a, b := lines[0], lines[2]; !reflect.DeepEqual(a.HashIDs, b.HashIDs) || a.HashIDs[0] != lines[1].HashIDs[0] ||
		reflect.DeepEqual(lines[1].HashIDs, lines[3].HashIDs) {
		t.Errorf("ids are %v", []any{a.HashIDs, lines[1].HashIDs, b.HashIDs, lines[3].HashIDs})
	}
	if l := lines[4]; !l.Freed || l.Choice == nil || l.SessionID != "" {
		t.Errorf("in the outage: %+v", l)
	}
	file := t.TempDir() + "/trace.jsonl"
	if r := harness.Run(t, "indexer", "record", "export", "--nats", addr, "--output", file); r.Code != 0 {
		t.Fatal(r.Stderr)
	}
	if text, err := os.ReadFile(file); err != nil || bytes.Count(text, []byte("\n")) != 5 {
		t.Errorf("%s, %v", text, err)
	}
	for _, args := range [][]string{{"--block-tokens", "100"}, {"--since", "x"}, {"--format", "x"}, {"--since", "1m",
		"--until", "1h"}} {
		if r := harness.Run(t, "indexer", append([]string{"record", "export", "--nats", addr}, args...)...); r.Code == 0 {
			t.Errorf("%q is accepted: %s", args, r.Stdout)
		}
	}
}
