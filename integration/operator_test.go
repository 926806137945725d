package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/nats-io/nats.go/jetstream"
)

func checksums(t testing.TB, nats, args string) (list []string) {
	t.Helper()
	for _, p := range harness.IndexerJSON[api.Status](t, nats, "status --verify "+args).Partitions {
		list = append(list, p.Checksum)
	}
	return list
}

// TestOperator performs an operator's tasks with two workers: checksums, snapshots, a dump and a load, a resync.
func TestOperator(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	const rarely = "1h" // snapshots only on request and at the end
	x := harness.StartIndexer(t, data, "", "--snapshot-interval", rarely)
	one, two := harness.StartSimEngine(t), harness.StartSimEngine(t)
	first := harness.StartSimShim(t, one, x.NATS, "w1")
	harness.StartSimShim(t, two, x.NATS, "7")
	prompt, other := harness.Tokens(1, 12*harness.BlockSize), harness.Tokens(5000, 6*harness.BlockSize)
	branch := append(prompt[:4*harness.BlockSize:4*harness.BlockSize], other...)
	harness.ServePrompt(t, one, prompt)
	harness.ServePrompt(t, one, branch)
	harness.ServePrompt(t, two, other)
	all := func() {
		t.Helper()
		x.WaitDepth(t, "m", prompt, "w1", 12)
		x.WaitDepth(t, "m", branch, "w1", 10)
		x.WaitDepth(t, "m", other, "7", 6)
	}
	all()
	before := checksums(t, x.NATS, "")
	if len(before) != 4 || len(before[0]) != 16 {
		t.Fatalf("checksums %q", before)
	}
	if r := harness.Run(t, "indexer", "status", "--verify", "--nats", x.NATS); r.Code != 0 ||
		!strings.Contains(r.Stdout, "CHECKSUM") || !strings.Contains(r.Stdout, before[0]) {
		t.Fatalf("status --verify: %+v", r)
	}

	// Snapshots are listed and verified, with an error for a damaged snapshot.
	for range 2 {
		if r := harness.Run(t, "indexer", "snapshot", "now", "--nats", x.NATS); r.Code != 0 {
			t.Fatalf("snapshot now: %+v", r)
		}
	}
	list := harness.IndexerJSON[api.GenerationList](t, x.NATS, "snapshot list").Generations
	verified := harness.IndexerJSON[api.GenerationList](t, x.NATS, "snapshot verify").Generations
	ranks, holdings := 0, uint64(0)
	for i, g := range list {
		if g.Generation != uint64(2-i%2) || g.Unusable != "" || verified[i].Bad || !verified[i].Verified {
			t.Errorf("generation %+v, verified %+v", g, verified[i])
		}
		if i%2 == 0 {
			ranks, holdings = ranks+g.Ranks, holdings+g.Holdings
		}
	}
	if len(list) != 8 || ranks != 2 || holdings != 12+6+6 {
		t.Errorf("%d generations of %d ranks with %d holdings: %+v", len(list), ranks, holdings, list)
	}

	// The dump of all workers, and of a single worker.
	file := filepath.Join(t.TempDir(), "dump.ndjson")
	r := harness.Run(t, "indexer", "dump", "--nats", x.NATS)
	if r.Code != 0 || !regexp.MustCompile(`partition \d: \d+ events of 1 ranks, as of \d+ in the log`).MatchString(
		r.Stderr) ||
		!strings.Contains(r.Stdout,
			`{"worker_id":"w1","storage_tier":"device","event":{"event_id":1,"data":{"stored":{"parent_hash":null,`) ||
		!strings.Contains(r.Stdout, `{"worker_id":7,`) {
		t.Fatalf("dump: %+v", r)
	}
	if err := os.WriteFile(file, []byte(r.Stdout), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := harness.Run(t, "indexer", "dump", "--worker", "7", "--nats", x.NATS); r.Code != 0 ||
		strings.Contains(r.Stdout, "w1") || !strings.Contains(r.Stdout, `{"worker_id":7,`) {
		t.Errorf("dump --worker: %+v", r)
	}
	if r := harness.Run(t, "indexer", "dump", "--worker", "nobody", "--nats", x.NATS); r.Code != 1 ||
		!strings.Contains(r.Stderr, "nobody") {
		t.Errorf("dump of an unknown worker: %+v", r)
	}
	if r := harness.Run(t, "indexer", "import", "--model", "m", "--block-size", "16", "--nats", x.NATS,
		file); r.Code != 1 || !strings.Contains(r.Stderr, "line 1: another shim publishes") {
		t.Errorf("load over living shims: %+v", r)
	}
	copied := harness.Start(t, "indexer", "serve", "--nats", "nats://"+x.NATS, "--http-listen", "127.0.0.1:0",
		"--namespace", "copy", "--partitions", "4")
	copied.WaitFor("msg=ready")
	if r := harness.Run(t, "indexer", "import", "--model", "m", "--block-size", "16", "--nats", x.NATS, "--namespace",
		"copy", file); r.Code != 0 || !strings.Contains(r.Stdout, "of 2 ranks published, with 24 blocks") {
		t.Fatalf("load: %+v", r)
	}
	harness.Eventually(t, fmt.Sprintf("the copy has the checksums %q", before), func() (bool, string) {
		got := checksums(t, x.NATS, "--namespace copy")
		return slices.Equal(got, before), fmt.Sprintf("%q", got)
	})
	copied.Stop()
	if r := harness.Run(t, "indexer", "import", "--model", "m", "--block-size", "16", "--nats", x.NATS, "--namespace",
		"copy", "/dev/null/x"); r.Code != 2 {
		t.Errorf("load of a missing file: %+v", r)
	}

	// A resync by hand: the same blocks, in a new incarnation.
	incarnation := func() (v uint64) {
		for _, w := range harness.IndexerJSON[api.WorkerList](t, x.NATS, "workers").Workers {
			if w.Instance == "w1" {
				v = uint64(w.Incarnation)
			}
		}
		return v
	}
	was := incarnation()
	if r := harness.Run(t, "indexer", "resync", "--worker", "w1", "--nats", x.NATS); r.Code != 0 ||
		!strings.Contains(r.Stdout, "w1") {
		t.Fatalf("resync: %+v", r)
	}
	first.WaitFor("a node requested the engine's holdings again")
	testkit.Eventually(t, "the worker has a new incarnation", func() bool { return incarnation() != was })
	all()
	if r := harness.Run(t, "indexer", "resync", "--worker", "w9", "--nats", x.NATS); r.Code != 1 ||
		!strings.Contains(r.Stderr, "no shim answered") {
		t.Errorf("resync of an unknown worker: %+v", r)
	}

	// From a snapshot and the log, in another process, the same checksums; a damaged snapshot is found, and passed
	// over.
	x.Stop()
	x = harness.StartIndexer(t, data, x.NATS, "--snapshot-interval", rarely)
	all()
	if got := checksums(t, x.NATS, ""); strings.Join(got, " ") != strings.Join(before, " ") {
		t.Errorf("after a restart %q, before %q", got, before)
	}
	js, err := jetstream.New(connectNATS(t, "nats://"+x.NATS))
	if err != nil {
		t.Fatal(err)
	}
	ctx := harness.Context(t)
	kv, err := js.KeyValue(ctx, "kvatlas_default_snap")
	if err != nil {
		t.Fatal(err)
	}
	for p := range 4 {
		if _, err := kv.Put(ctx, "p"+string(rune('0'+p))+".manifest", []byte("damaged")); err != nil {
			t.Fatal(err)
		}
	}
	if r := harness.Run(t, "indexer", "snapshot", "verify", "--nats", x.NATS); r.Code != 1 ||
		!strings.Contains(r.Stderr, "4 of 8 snapshots differ from the written data") ||
		!strings.Contains(r.Stdout, "does not end with its checksum") {
		t.Errorf("verify: %+v", r)
	}
	x.Kill()
	x = harness.StartIndexer(t, data, x.NATS, "--snapshot-interval", rarely)
	x.WaitFor(`snapshot skipped.*reason=unreadable`)
	all()
	if s := harness.Status(t, x.NATS); s.Snapshots.Rejected["unreadable"] != 4 {
		t.Errorf("counted %+v", s.Snapshots)
	}
}

// TestTwoShimsForOneRank starts a second shim for a rank: it logs the owner of the rank and ends, and the first shim
// continues. After a kill of the first shim, a second shim may start.
func TestTwoShimsForOneRank(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	e := harness.StartSimEngine(t)
	first := harness.StartSimShim(t, e, x.NATS, "w1")
	prompt := harness.Tokens(1, 6*harness.BlockSize)
	harness.ServePrompt(t, e, prompt[:2*harness.BlockSize])
	x.WaitDepth(t, "m", prompt, "w1", 2)
	second := harness.StartSimShim(t, e, x.NATS, "w1", "--claim-wait", "0s")
	<-second.Done
	if code := second.Cmd.ProcessState.ExitCode(); code != 1 ||
		!strings.Contains(second.Said(), "another shim publishes for this worker and rank: w1/0 is served by process") {
		t.Fatalf("the second ended with %d:\n%s", code, second.Said())
	}
	harness.ServePrompt(t, e, prompt[:4*harness.BlockSize])
	x.WaitDepth(t, "m", prompt, "w1", 4)
	// a shim that waits for the end of the first
	third := harness.StartSimShim(t, e, x.NATS, "w1", "--claim-wait", "30m")
	third.WaitFor("waiting for the end of the rank's present shim")
	first.Kill()
	third.WaitFor("connected to the engine")
	harness.ServePrompt(t, e, prompt)
	x.WaitDepth(t, "m", prompt, "w1", 6)
	if strings.Contains(third.Said(), "new incarnation") {
		t.Fatalf("the third did not continue the first:\n%s", third.Said())
	}
}

// TestForget clears a worker that is gone: not while the shim lives, unless forced; then only once. A returning worker
// begins a new incarnation.
func TestForget(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	if r := harness.Run(t, "indexer", "status", "--nats", x.NATS); r.Code != 0 ||
		!strings.Contains(r.Stdout, "since start: nothing\n") {
		t.Errorf("the status of an indexer without workers: %+v", r)
	}
	if r := harness.Run(t, "indexer", "dump", "--now", "--nats", x.NATS); r.Code != 0 ||
		!strings.Contains(r.Stderr, "partition 0: 0 events of 0 ranks, as of 0 in the log") ||
		strings.Contains(r.Stderr, "no snapshot") {
		t.Errorf("the dump of an indexer without workers: %+v", r)
	}
	e := harness.StartSimEngine(t)
	shim := harness.StartSimShim(t, e, x.NATS, "w1")
	prompt := harness.Tokens(1, 6*harness.BlockSize)
	harness.ServePrompt(t, e, prompt[:4*harness.BlockSize])
	x.WaitDepth(t, "m", prompt, "w1", 4)
	if r := harness.Run(t, "indexer", "workers", "clear", "w1", "--nats", x.NATS); r.Code != 1 ||
		!strings.Contains(r.Stderr, "a shim serves w1/0: process") || r.Stdout != "" {
		t.Fatalf("while the shim lives: %+v", r)
	}
	if r := harness.Run(t, "indexer", "workers", "clear", "w9", "--nats", x.NATS); r.Code != 1 ||
		!strings.Contains(r.Stderr, "worker w9 is unknown") {
		t.Errorf("of nobody: %+v", r)
	}
	if r := harness.Run(t, "indexer", "workers", "clear", "w1", "--rank", "5", "--nats", x.NATS); r.Code != 1 ||
		!strings.Contains(r.Stderr, "w1/5") {
		t.Errorf("an unknown rank: %+v", r)
	}
	if r := harness.Run(t, "indexer", "workers", "clear", "w1", "--force", "--nats", x.NATS); r.Code != 0 ||
		!strings.Contains(r.Stdout, "cleared, at ") {
		t.Fatalf("by force: %+v", r)
	}
	harness.ServePrompt(t, e, prompt[:5*harness.BlockSize]) // the live shim publishes the engine's blocks again
	x.WaitDepth(t, "m", prompt, "w1", 5)
	shim.Kill()

	type forgotten struct {
		Forgotten []struct {
			Instance                    string
			Was, Incarnation, Seq, Rank uint64
			ClosedBefore                bool `json:"closed_before"`
		}
	}
	once := harness.IndexerJSON[forgotten](t, x.NATS, "workers clear w1").Forgotten
	if len(once) != 1 || once[0].Instance != "w1" || once[0].Incarnation != once[0].Was+1 || once[0].Seq == 0 ||
		once[0].ClosedBefore {
		t.Fatalf("forgotten: %+v", once)
	}
	harness.Eventually(t, "nobody is there", func() (bool, string) {
		list := harness.IndexerJSON[api.WorkerList](t, x.NATS, "workers").Workers
		return len(list) == 0 || list[0].Incarnation == 0, fmt.Sprintf("%+v", list)
	})
	if _, failure := x.Query(t, "--model", "m", "--tokens", "1"); failure == nil ||
		failure.Code != api.CodeUnknownModel {
		t.Errorf("the model is still there: %v", failure)
	}
	if twice := harness.IndexerJSON[forgotten](t, x.NATS, "workers clear w1 --rank 0").Forgotten; len(twice) != 1 ||
		!twice[0].ClosedBefore {
		t.Errorf("the second time: %+v", twice)
	}
	harness.ServePrompt(t, e, prompt)
	harness.StartSimShim(t, e, x.NATS, "w1")
	x.WaitDepth(t, "m", prompt, "w1", 6)
}

// TestNoRoom fills the NATS server's storage. The shim's events wait, with log lines at a bounded rate, and status and
// metrics have the reason. With free space the deployment continues without a restart and without a loss.
func TestNoRoom(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "", "--store-bytes", "16777216", "--log-bytes", "1048576", "--log-age",
		"2h", "--snapshot-bytes", "8388608", "--snapshot-interval", "1h")
	e := harness.StartSimEngine(t)
	shim := harness.StartSimShim(t, e, x.NATS, "w1", "--log-repeat", "1s")
	prompt := harness.Tokens(1, 6*harness.BlockSize)
	harness.ServePrompt(t, e, prompt[:2*harness.BlockSize])
	x.WaitDepth(t, "m", prompt, "w1", 2)
	registered := startRank(t, 0, harness.BlockSize) // the shim runs in the indexer
	if status, text, err := harness.Request(x.HTTP, "POST", "/register", fmt.Sprintf(
		`{"instance_id":7,"endpoint":%q,"replay_endpoint":%q,"model_name":"m","block_size":%d}`,
		registered.Endpoint(), registered.Replay(), harness.BlockSize)); err != nil || status != 201 {
		t.Fatal(status, text, err)
	}
	harness.ServePrompt(t, registered, prompt[:2*harness.BlockSize])
	x.WaitDepth(t, "m", prompt, "7", 2)
	js, err := jetstream.New(connectNATS(t, "nats://"+x.NATS))
	if err != nil {
		t.Fatal(err)
	}
	ctx := harness.Context(t)
	limits := map[string]int64{"KV_EVENTS_default_0": 1048576, "KV_EVENTS_default_3": 1048576,
		"KV_kvatlas_default_snap": 8388608}
	for name, want := range limits {
		s, err := js.Stream(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		if c := s.CachedInfo().Config; c.MaxBytes != want || strings.HasPrefix(name, "KV_EVENTS") &&
			c.MaxAge != 2*time.Hour {
			t.Errorf("stream %s has a limit of %d bytes and %v", name, c.MaxBytes, c.MaxAge)
		}
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "filler",
		Subjects: []string{"filler"}}); err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ {
		_, err := js.Publish(ctx, "filler", make([]byte, 512<<10))
		var refused *jetstream.APIError
		if errors.As(err, &refused) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if i > 100 {
			t.Fatal("the storage does not fill up")
		}
	}
	harness.ServePrompt(t, e, prompt[:4*harness.BlockSize])
	harness.ServePrompt(t, registered, prompt[:4*harness.BlockSize])
	shim.WaitFor(`the log does not accept events; the events wait.*no room`)
	x.WaitFor(`the log does not accept events of a registered engine; the events wait.*worker=7/0.*no room`)
	x.WaitFor(`filling up: the storage of the NATS server`)
	s := harness.Status(t, x.NATS)
	if !strings.Contains(strings.Join(s.Problems, "\n"), "the storage of the NATS server is") ||
		s.Store.Limit != 16777216 {
		t.Errorf("status %+v", s)
	}
	waiting := func(want bool) {
		t.Helper()
		harness.Eventually(t, fmt.Sprintf("the status lists waiting shims: %t", want), func() (bool, string) {
			problems := strings.Join(harness.Status(t, x.NATS).Problems, "\n")
			return want == (strings.Contains(problems, " shims wait, ") ||
				strings.Contains(problems, "the log takes nothing from the shims of")), problems
		})
	}
	waiting(true)
	if err := js.DeleteStream(ctx, "filler"); err != nil {
		t.Fatal(err)
	}
	harness.ServePrompt(t, e, prompt)
	x.WaitDepth(t, "m", prompt, "w1", 6)
	waiting(false)
	if strings.Contains(shim.Said(), "new incarnation") && strings.Count(shim.Said(), "new incarnation") > 1 {
		t.Errorf("the shim began a new incarnation:\n%s", shim.Said())
	}
}
