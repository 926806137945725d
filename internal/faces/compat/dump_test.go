package compat

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// fleet is a fake indexer with a fixed list of workers.
type fleet struct {
	Server
	workers []api.WorkerInfo
}

func (f *fleet) Workers(context.Context, api.WorkersRequest) (*api.WorkerList, error) {
	return &api.WorkerList{Workers: f.workers}, nil
}

func (f *fleet) Snapshot(context.Context) (*api.SnapshotList, error) { return &api.SnapshotList{}, nil }

func info(instance events.WorkerID, model string, size uint32) (w api.WorkerInfo) {
	w.Instance, w.Model, w.BlockSize = instance, model, size
	return w
}

// dumping serves /dump. The function lines writes the lines of every worker.
func dumping(t *testing.T, lines func(ctx context.Context, worker events.WorkerID, out io.Writer) error,
	workers ...api.WorkerInfo) (url string, outcomes chan string) {
	outcomes = make(chan string, 100)
	mux := web.NewMux()
	Register(mux, Config{
		Server: &fleet{workers: workers}, Shims: NewShims(nil, nil, "one", Engines{}, nil),
		Dump: func(ctx context.Context, of []events.WorkerID, out io.Writer) error {
			for _, worker := range of {
				if err := lines(ctx, worker, out); err != nil {
					return err
				}
			}
			return nil
		},
		Dumps: make(chan struct{}, MaxDumps),
		Ended: func(op, outcome string) { outcomes <- op + " " + outcome },
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL + "/dump", outcomes
}

func line(worker events.WorkerID, id events.EventID) []byte {
	return events.AppendRouterEvent(nil, events.RankKey{Instance: worker}, id,
		&events.Event{Kind: events.Removed, Tier: events.Device, Blocks: []events.BlockHash{7}})
}

func get(t *testing.T, url string) (status int, body string) {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(text)
}

// TestDumpForm checks that a streamed dump is equal to the JSON encoding of the whole value.
func TestDumpForm(t *testing.T) {
	type model struct {
		Size   uint32            `json:"block_size"`
		Events []json.RawMessage `json:"events"`
	}
	want := map[string]*model{
		"m:default": {16, nil}, "<b>:default": {32, []json.RawMessage{}}, "a\"n:default": {4, nil},
	}
	workers := []api.WorkerInfo{info("7", "m", 16), info("<w>\u2028", "a\"n", 4), info("silent", "<b>", 32)}
	for id := range events.EventID(3) {
		want["m:default"].Events = append(want["m:default"].Events, line("7", id+1))
		want[`a"n:default`].Events = append(want[`a"n:default`].Events, line("<w>\u2028", id+1))
	}
	text, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	lines := func(_ context.Context, worker events.WorkerID, out io.Writer) error {
		for id := events.EventID(1); id <= 3 && worker != "silent"; id++ {
			if _, err := out.Write(line(worker, id)); err != nil {
				return err
			}
		}
		return nil
	}
	url, _ := dumping(t, lines, workers...)
	if status, body := get(t, url); status != 200 || body != string(text) {
		t.Errorf("%d %s\nwant %s", status, body, text)
	}
	url, _ = dumping(t, lines)
	if status, body := get(t, url); status != 200 || body != "{}" {
		t.Errorf("without workers: %d %s", status, body)
	}
}

// TestDumpsAreBounded checks that dumps are streamed in little memory. Two dumps may run at a time, and the error of a
// third dump names the remedy.
func TestDumpsAreBounded(t *testing.T) {
	const before = 400_000 // lines, 40 MB
	more := make(chan struct{})
	url, outcomes := dumping(t, func(ctx context.Context, worker events.WorkerID, out io.Writer) error {
		text := line(worker, 1)
		for range before {
			if _, err := out.Write(text); err != nil {
				return err
			}
		}
		select {
		case <-more:
		case <-ctx.Done():
		}
		_, err := out.Write(text)
		return err
	}, info("w", "m", 16))
	var bodies []*bufio.Reader
	for range MaxDumps {
		r, err := http.Get(url)
		if err != nil || r.StatusCode != 200 {
			t.Fatal(r, err)
		}
		defer r.Body.Close()
		bodies = append(bodies, bufio.NewReader(r.Body))
	}
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	start := stats.HeapAlloc
	for i, body := range bodies {
		if n, err := io.CopyN(io.Discard, body, before*int64(len(line("w", 1)))-128<<10); err != nil {
			t.Fatalf("dump %d: %d bytes, and then %v", i, n, err)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&stats)
	if grown := int64(stats.HeapAlloc) - int64(start); grown > 4<<20 {
		t.Errorf("two dumps of %d lines need %d MiB", before, grown>>20)
	}
	status, body := get(t, url)
	if status != 429 || !strings.Contains(body, "2 dumps are running") || !strings.Contains(body, "retry") ||
		!strings.Contains(body, `"busy"`) {
		t.Errorf("a third dump: %d %s", status, body)
	}
	close(more)
	for i, body := range bodies {
		if rest, err := io.ReadAll(body); err != nil || !strings.HasSuffix(string(rest), "}]}}") {
			t.Errorf("dump %d ends %.40q, %v", i, rest[max(0, len(rest)-40):], err)
		}
	}
	for range 3 {
		<-outcomes
	}
	if status, _ := get(t, url); status != 200 {
		t.Errorf("a dump after the others: %d", status)
	}
}

// TestDumpsThatFail checks errors of a dump. Before the first byte, the client gets an error reply. Later, the server
// closes the connection. After an error, another dump can start.
func TestDumpsThatFail(t *testing.T) {
	for _, lines := range []int{0, 10_000} {
		url, outcomes := dumping(t, func(_ context.Context, worker events.WorkerID, out io.Writer) error {
			for range lines {
				if _, err := out.Write(line(worker, 1)); err != nil {
					return err
				}
			}
			return errors.New("the bucket has gone")
		}, info("w", "m", 16))
		for range MaxDumps + 1 {
			r, err := http.Get(url)
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(r.Body)
			r.Body.Close()
			cut := err != nil
			said := fmt.Sprint(r.StatusCode, " ", string(text[:min(len(text), 200)]))
			if lines == 0 && (cut || !strings.Contains(said, "503") || !strings.Contains(said, "the bucket has gone")) ||
				lines > 0 && !cut {
				t.Errorf("%d lines: %s, %v", lines, said, err)
			}
			<-outcomes
		}
	}
}
