package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/enginesim"
	"github.com/nats-io/nats.go/jetstream"
)

// simEngine starts a simulated engine that lives until the test ends.
func simEngine(t testing.TB) *enginesim.Engine {
	t.Helper()
	e, err := enginesim.Start(context.Background(), enginesim.Config{BlockSize: blockSize, Capacity: 1000})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Crash)
	return e
}

func shimOf(t testing.TB, e *enginesim.Engine, nats, instance string, args ...string) *process {
	t.Helper()
	return start(t, "worker-shim", append([]string{"run", "--engine", e.Endpoint(), "--replay", e.Replay(), "--instance", instance,
		"--model", "m", "--block-size", "16", "--nats", nats}, args...)...)
}

func serve(t testing.TB, e *enginesim.Engine, prompt []uint32) {
	t.Helper()
	if _, err := e.Serve(prompt, nil); err != nil {
		t.Fatal(err)
	}
}

// ask runs indexer with words and --json, and decodes what it prints.
func ask[T any](t testing.TB, nats, words string) (out T) {
	t.Helper()
	r := run(t, "indexer", append(strings.Fields(words), "--nats", nats, "--json")...)
	if err := json.Unmarshal([]byte(r.stdout), &out); err != nil || r.code != 0 {
		t.Fatalf("%s: %+v: %v", words, r, err)
	}
	return out
}

func checksums(t testing.TB, nats, args string) (list []string) {
	t.Helper()
	for _, p := range ask[api.Status](t, nats, "status --verify "+args).Partitions {
		list = append(list, p.Checksum)
	}
	return list
}

// TestOperator looks after two workers as an operator would: checksums, snapshots, a dump that is loaded elsewhere, a resync.
func TestOperator(t *testing.T) {
	data := t.TempDir()
	const rarely = "1h" // snapshots are written when they are asked for, and at the end
	x := startIndexer(t, data, "", "--snapshot-interval", rarely)
	one, two := simEngine(t), simEngine(t)
	first := shimOf(t, one, x.nats, "w1")
	shimOf(t, two, x.nats, "7")
	prompt, other := tokens(1, 12*blockSize), tokens(5000, 6*blockSize)
	branch := append(prompt[:4*blockSize:4*blockSize], other...)
	serve(t, one, prompt)
	serve(t, one, branch)
	serve(t, two, other)
	all := func() {
		t.Helper()
		x.waitDepth(t, "m", prompt, "w1", 12)
		x.waitDepth(t, "m", branch, "w1", 10)
		x.waitDepth(t, "m", other, "7", 6)
	}
	all()
	before := checksums(t, x.nats, "")
	if len(before) != 4 || len(before[0]) != 16 {
		t.Fatalf("checksums %q", before)
	}
	if r := run(t, "indexer", "status", "--verify", "--nats", x.nats); r.code != 0 || !strings.Contains(r.stdout, "CHECKSUM") || !strings.Contains(r.stdout, before[0]) {
		t.Fatalf("status --verify: %+v", r)
	}

	// Snapshots are listed and verified, and tell the truth when one is damaged.
	for range 2 {
		if r := run(t, "indexer", "snapshot", "now", "--nats", x.nats); r.code != 0 {
			t.Fatalf("snapshot now: %+v", r)
		}
	}
	list := ask[api.GenerationList](t, x.nats, "snapshot list").Generations
	verified := ask[api.GenerationList](t, x.nats, "snapshot verify").Generations
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

	// The dump of all, and of one worker.
	file := filepath.Join(t.TempDir(), "dump.ndjson")
	r := run(t, "indexer", "dump", "--nats", x.nats)
	if r.code != 0 || !regexp.MustCompile(`partition \d: \d+ events of 1 ranks, as of \d+ in its log`).MatchString(r.stderr) ||
		!strings.Contains(r.stdout, `{"worker_id":"w1","storage_tier":"device","event":{"event_id":1,"data":{"stored":{"parent_hash":null,`) ||
		!strings.Contains(r.stdout, `{"worker_id":7,`) {
		t.Fatalf("dump: %+v", r)
	}
	if err := os.WriteFile(file, []byte(r.stdout), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := run(t, "indexer", "dump", "--worker", "7", "--nats", x.nats); r.code != 0 || strings.Contains(r.stdout, "w1") || !strings.Contains(r.stdout, `{"worker_id":7,`) {
		t.Errorf("dump --worker: %+v", r)
	}
	if r := run(t, "indexer", "dump", "--worker", "nobody", "--nats", x.nats); r.code != 1 || !strings.Contains(r.stderr, "nobody") {
		t.Errorf("dump of nobody: %+v", r)
	}
	if r := run(t, "indexer", "load", "--model", "m", "--block-size", "16", "--nats", x.nats, file); r.code != 1 || !strings.Contains(r.stderr, "line 1: another shim publishes") {
		t.Errorf("load over living shims: %+v", r)
	}
	copied := start(t, "indexer", "serve", "--nats", "nats://"+x.nats, "--http-listen", "127.0.0.1:0", "--namespace", "copy", "--partitions", "4")
	copied.waitFor("msg=ready")
	if r := run(t, "indexer", "load", "--model", "m", "--block-size", "16", "--nats", x.nats, "--namespace", "copy", file); r.code != 0 || !strings.Contains(r.stdout, "of 2 ranks published, with 24 blocks") {
		t.Fatalf("load: %+v", r)
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		got := checksums(t, x.nats, "--namespace copy")
		if strings.Join(got, " ") == strings.Join(before, " ") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the copy has %q, the original %q", got, before)
		}
	}
	copied.stop()
	if r := run(t, "indexer", "load", "--model", "m", "--block-size", "16", "--nats", x.nats, "--namespace", "copy", "/dev/null/x"); r.code != 2 {
		t.Errorf("load of what is not there: %+v", r)
	}

	// A resync by hand: the same blocks, in a new incarnation.
	incarnation := func() (v uint64) {
		for _, w := range ask[api.WorkerList](t, x.nats, "workers").Workers {
			if w.Instance == "w1" {
				v = uint64(w.Incarnation)
			}
		}
		return v
	}
	was := incarnation()
	if r := run(t, "indexer", "resync", "--worker", "w1", "--nats", x.nats); r.code != 0 || !strings.Contains(r.stdout, "w1") {
		t.Fatalf("resync: %+v", r)
	}
	first.waitFor("asked to say again what the engine holds")
	for deadline := time.Now().Add(patience); incarnation() == was; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no new incarnation")
		}
	}
	all()
	if r := run(t, "indexer", "resync", "--worker", "w9", "--nats", x.nats); r.code != 1 || !strings.Contains(r.stderr, "no shim answered") {
		t.Errorf("resync of nobody: %+v", r)
	}

	// From a snapshot and the log, in another process, the same checksums; a damaged snapshot is found, and passed over.
	x.stop()
	x = startIndexer(t, data, x.nats, "--snapshot-interval", rarely)
	all()
	if got := checksums(t, x.nats, ""); strings.Join(got, " ") != strings.Join(before, " ") {
		t.Errorf("after a restart %q, before %q", got, before)
	}
	js, err := jetstream.New(connectNATS(t, "nats://"+x.nats))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	kv, err := js.KeyValue(ctx, "kvatlas_default_snap")
	if err != nil {
		t.Fatal(err)
	}
	for p := range 4 {
		if _, err := kv.Put(ctx, "p"+string(rune('0'+p))+".manifest", []byte("damaged")); err != nil {
			t.Fatal(err)
		}
	}
	if r := run(t, "indexer", "snapshot", "verify", "--nats", x.nats); r.code != 1 || !strings.Contains(r.stderr, "4 of 8 snapshots are not what was written") || !strings.Contains(r.stdout, "does not end with its checksum") {
		t.Errorf("verify: %+v", r)
	}
	x.kill()
	x = startIndexer(t, data, x.nats, "--snapshot-interval", rarely)
	x.waitFor(`snapshot passed over.*reason=unreadable`)
	all()
	if s := ask[api.Status](t, x.nats, "status"); s.Snapshots.Rejected["unreadable"] != 4 {
		t.Errorf("counted %+v", s.Snapshots)
	}
}

// TestTwoShimsForOneRank starts a second shim by mistake: it says whose the rank is and ends, and the first goes on. After the first was
// killed the second may be started.
func TestTwoShimsForOneRank(t *testing.T) {
	x := startIndexer(t, t.TempDir(), "")
	e := simEngine(t)
	first := shimOf(t, e, x.nats, "w1")
	prompt := tokens(1, 6*blockSize)
	serve(t, e, prompt[:2*blockSize])
	x.waitDepth(t, "m", prompt, "w1", 2)
	second := shimOf(t, e, x.nats, "w1", "--claim-wait", "0s")
	<-second.done
	if code := second.cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(second.saying(), "another shim publishes for this worker and rank: w1/0 is served by process") {
		t.Fatalf("the second ended with %d:\n%s", code, second.saying())
	}
	serve(t, e, prompt[:4*blockSize])
	x.waitDepth(t, "m", prompt, "w1", 4)
	third := shimOf(t, e, x.nats, "w1", "--claim-wait", "30m") // one that is told to wait for the first one's end
	third.waitFor("waiting for the shim that has this rank to end")
	first.kill()
	third.waitFor("connected to the engine")
	serve(t, e, prompt)
	x.waitDepth(t, "m", prompt, "w1", 6)
	if strings.Contains(third.saying(), "new incarnation") {
		t.Fatalf("the third did not go on where the first was:\n%s", third.saying())
	}
}

// TestForget says for a worker that is gone that it holds nothing: not while its shim lives, unless by force; then once. If it comes back
// it begins anew.
func TestForget(t *testing.T) {
	x := startIndexer(t, t.TempDir(), "")
	if r := run(t, "indexer", "status", "--nats", x.nats); r.code != 0 || !strings.Contains(r.stdout, "since start: nothing\n") {
		t.Errorf("the status of an indexer that knows nobody: %+v", r)
	}
	if r := run(t, "indexer", "dump", "--now", "--nats", x.nats); r.code != 0 || !strings.Contains(r.stderr, "partition 0: 0 events of 0 ranks, as of 0 in its log") ||
		strings.Contains(r.stderr, "no snapshot") {
		t.Errorf("the dump of an indexer that knows nobody: %+v", r)
	}
	e := simEngine(t)
	shim := shimOf(t, e, x.nats, "w1")
	prompt := tokens(1, 6*blockSize)
	serve(t, e, prompt[:4*blockSize])
	x.waitDepth(t, "m", prompt, "w1", 4)
	if r := run(t, "indexer", "forget", "w1", "--nats", x.nats); r.code != 1 || !strings.Contains(r.stderr, "a shim serves w1/0: process") || r.stdout != "" {
		t.Fatalf("while its shim lives: %+v", r)
	}
	if r := run(t, "indexer", "forget", "w9", "--nats", x.nats); r.code != 1 || !strings.Contains(r.stderr, "nothing is known of worker w9") {
		t.Errorf("of nobody: %+v", r)
	}
	if r := run(t, "indexer", "forget", "w1", "--rank", "5", "--nats", x.nats); r.code != 1 || !strings.Contains(r.stderr, "w1/5") {
		t.Errorf("of a rank that there is not: %+v", r)
	}
	if r := run(t, "indexer", "forget", "w1", "--force", "--nats", x.nats); r.code != 0 || !strings.Contains(r.stdout, "forgotten, at ") {
		t.Fatalf("by force: %+v", r)
	}
	serve(t, e, prompt[:5*blockSize]) // the shim that lives says again what the engine holds
	x.waitDepth(t, "m", prompt, "w1", 5)
	shim.kill()

	type forgotten struct {
		Forgotten []struct {
			Instance                    string
			Was, Incarnation, Seq, Rank uint64
			ClosedBefore                bool `json:"closed_before"`
		}
	}
	once := ask[forgotten](t, x.nats, "forget w1").Forgotten
	if len(once) != 1 || once[0].Instance != "w1" || once[0].Incarnation != once[0].Was+1 || once[0].Seq == 0 || once[0].ClosedBefore {
		t.Fatalf("forgotten: %+v", once)
	}
	eventually(t, "nobody is there", func() (bool, string) {
		list := ask[api.WorkerList](t, x.nats, "workers").Workers
		return len(list) == 0 || list[0].Incarnation == 0, fmt.Sprintf("%+v", list)
	})
	if _, failure := x.query(t, "--model", "m", "--tokens", "1"); failure == nil || failure.Code != api.CodeUnknownModel {
		t.Errorf("the model is still there: %v", failure)
	}
	if twice := ask[forgotten](t, x.nats, "forget w1 --rank 0").Forgotten; len(twice) != 1 || !twice[0].ClosedBefore {
		t.Errorf("the second time: %+v", twice)
	}
	serve(t, e, prompt)
	shimOf(t, e, x.nats, "w1")
	x.waitDepth(t, "m", prompt, "w1", 6)
}

// TestNoRoom lets the NATS server's storage fill up: the shim's events wait, which it says at a bounded rate; status and metrics say
// why; with room again all goes on, with nothing restarted and nothing lost.
func TestNoRoom(t *testing.T) {
	x := startIndexer(t, t.TempDir(), "", "--store-bytes", "16777216", "--log-bytes", "1048576", "--log-age", "2h", "--snapshot-bytes", "8388608", "--snapshot-interval", "1h")
	e := simEngine(t)
	shim := shimOf(t, e, x.nats, "w1", "--log-repeat", "1s")
	prompt := tokens(1, 6*blockSize)
	serve(t, e, prompt[:2*blockSize])
	x.waitDepth(t, "m", prompt, "w1", 2)
	js, err := jetstream.New(connectNATS(t, "nats://"+x.nats))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	limits := map[string]int64{"KV_EVENTS_default_0": 1048576, "KV_EVENTS_default_3": 1048576, "KV_kvatlas_default_snap": 8388608}
	for name, want := range limits {
		s, err := js.Stream(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		if c := s.CachedInfo().Config; c.MaxBytes != want || strings.HasPrefix(name, "KV_EVENTS") && c.MaxAge != 2*time.Hour {
			t.Errorf("stream %s may have %d bytes and keeps them for %v", name, c.MaxBytes, c.MaxAge)
		}
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "filler", Subjects: []string{"filler"}}); err != nil {
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
	serve(t, e, prompt[:4*blockSize])
	shim.waitFor(`the log does not take events; they wait.*no room`)
	x.waitFor(`filling up: the storage of the NATS server`)
	s := ask[api.Status](t, x.nats, "status")
	if !strings.Contains(strings.Join(s.Problems, "\n"), "the storage of the NATS server is") || s.Store.Limit != 16777216 {
		t.Errorf("status %+v", s)
	}
	if err := js.DeleteStream(ctx, "filler"); err != nil {
		t.Fatal(err)
	}
	serve(t, e, prompt)
	x.waitDepth(t, "m", prompt, "w1", 6)
	if strings.Contains(shim.saying(), "new incarnation") && strings.Count(shim.saying(), "new incarnation") > 1 {
		t.Errorf("the shim began anew:\n%s", shim.saying())
	}
}
