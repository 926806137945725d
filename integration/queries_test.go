package integration

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestQueriesThatCannotBeAnswered sends queries without an answer: every reply has a code and a sentence.
func TestQueriesThatCannotBeAnswered(t *testing.T) {
	t.Parallel()
	engine := harness.StartSimEngine(t)
	x := harness.StartIndexer(t, t.TempDir(), "")
	if _, failure := x.Query(t, "--model", "m", "--hashes", "1"); failure == nil ||
		failure.Code != api.CodeUnknownModel || !strings.Contains(failure.Message, "nor any other") {
		t.Fatalf("got %v", failure)
	}
	harness.StartSimShim(t, engine, x.NATS, "w1")
	prompt := harness.Tokens(1, 2*harness.BlockSize)
	harness.ServePrompt(t, engine, prompt)
	x.WaitDepth(t, "m", prompt, "w1", 2)
	for _, c := range []struct {
		args    []string
		code    api.Code
		message string
	}{
		{[]string{"--model", "x", "--tokens", "1"}, api.CodeUnknownModel, "known: m"},
		{[]string{"--model", "m", "--tokens", "1", "--block-size", "32"}, api.CodeBlockSizeMismatch,
			"blocks of 32 tokens; the workers have blocks of 16"},
		{[]string{"--model", "m", "--hashes", "1", "--cache-salt", "s"}, api.CodeMalformed, "valid with tokens only"},
	} {
		if _, failure := x.Query(t, c.args...); failure == nil || failure.Code != c.code ||
			!strings.Contains(failure.Message, c.message) {
			t.Errorf("%v: got %v, want %s with %q", c.args, failure, c.code, c.message)
		}
	}
	for _, c := range []struct {
		args   []string
		reason api.Reason
	}{
		{[]string{"--tokens", "1,2,3"}, api.ReasonNoBlocks},
		{[]string{"--hashes", "42"}, api.ReasonNotCached},
		{[]string{"--hashes", "42", "--worker", "w9"}, api.ReasonNotAllowed},
	} {
		if a, failure := x.Query(t, append(c.args, "--model", "m")...); failure != nil || a.Reason != c.reason ||
			a.Workers == nil {
			t.Errorf("%v: got %+v, %v, want the reason %q", c.args, a, failure, c.reason)
		}
	}
	post := func(path, body string) (int, string) {
		status, text, err := harness.Request(x.HTTP, "POST", path, body)
		if err != nil {
			t.Fatal(err)
		}
		return status, text
	}
	for _, c := range []struct {
		path, body string
		status     int
		code       api.Code
	}{
		{"/v1/find", `{"tokens":[1]}`, 400, api.CodeMissingModel},
		{"/v1/find", `{"model":"x","tokens":[1]}`, 404, api.CodeUnknownModel},
		{"/v1/find", `{"model":"m","tokens":[-1]}`, 400, api.CodeBadTokens},
		{"/v1/find", `{"model":"m","tokens":[4294967296]}`, 400, api.CodeBadTokens},
		{"/v1/find", `{"model":"m","tokens":[1],"block_size":8}`, 409, api.CodeBlockSizeMismatch},
		{"/v1/find", strings.Repeat(" ", api.MaxBody+1), 413, api.CodeTooLarge},
		{"/v1/find", `{"model":"m","tokens":[1],"min_seq":[{"partition":77,"seq":1}]}`, 400, api.CodeMalformed},
		{"/v1/nothing", ``, 404, api.CodeUnknownOperation},
	} {
		status, text := post(c.path, c.body)
		var body api.ErrorBody
		if err := json.Unmarshal([]byte(text), &body); err != nil || body.Error == nil || status != c.status ||
			body.Error.Code != c.code {
			t.Errorf("%s %.60s: got %d %s, want %d %s", c.path, c.body, status, text, c.status, c.code)
		}
	}
	// Afterwards the right answer is still available, over HTTP too.
	body, _ := json.Marshal(api.Query{Model: "m", Tokens: prompt})
	status, text := post("/v1/find", string(body))
	var a api.Answer
	if err := json.Unmarshal([]byte(text), &a); err != nil || status != 200 || len(a.Workers) != 1 ||
		a.Workers[0].Device != 2 {
		t.Fatalf("got %d %s", status, text)
	}
	for path, want := range map[string]string{"/healthz": "ok", "/readyz": "ready",
		"/v1/kv_indexer.proto": "service KVIndexer",
		"/metrics":             `kvatlas_index_blocks{tier="device"} 2`} {
		harness.Eventually(t, path+" says "+want, func() (bool, string) { // metrics are counted once a second
			var text string
			err := harness.HTTPDo(x.HTTP, "GET", path, nil, &text)
			return err == nil && strings.Contains(text, want), fmt.Sprint(err, text)
		})
	}
	if r := harness.Run(t, "indexer", "workers", "--nats", x.NATS); r.Code != 0 || !strings.Contains(r.Stdout, "w1") {
		t.Errorf("workers: %+v", r)
	}
	if r := harness.Run(t, "indexer", "status", "--nats", x.NATS); r.Code != 0 ||
		!strings.Contains(r.Stdout, "2 blocks held on device") {
		t.Errorf("status: %+v", r)
	}
}

// TestBlockSizesDisagree starts a second worker of a model with another block size. The shim refuses, and the error
// names both sizes.
func TestBlockSizesDisagree(t *testing.T) {
	t.Parallel()
	engine := harness.StartSimEngine(t)
	x := harness.StartIndexer(t, t.TempDir(), "")
	shim := harness.StartSimShim(t, engine, x.NATS, "w1")
	shim.WaitFor("connected to the engine")
	r := harness.Run(t, "worker-shim", "run", "--engine", engine.Endpoint(), "--worker", "w2", "--model", "m",
		"--block-size", "32", "--nats", x.NATS)
	if r.Code != 1 || !strings.Contains(r.Stderr,
		"registered with block size 16, this worker has 32; if no worker has the registered size any more: indexer "+
			"models remove m") {
		t.Fatalf("got %+v", r)
	}

	// The block size of a served model stays. After the end of all workers, the next worker sets the size.
	for _, command := range []string{"workers clear", "models remove", "forget", "forget w1 --model m",
		"forget --model m --rank 1"} {
		if r := harness.Run(t, "indexer", append(strings.Fields(command), "--nats", x.NATS)...); r.Code != 2 {
			t.Errorf("%s: %+v", command, r)
		}
	}
	if r := harness.Run(t, "indexer", "models", "remove", "m", "--nats", x.NATS); r.Code != 1 ||
		!strings.Contains(r.Stderr, `worker w1/0 serves "m" with blocks of 16 tokens`) {
		t.Fatalf("a served model: %+v", r)
	}
	shim.Stop()
	if r := harness.Run(t, "indexer", "workers", "clear", "w1", "--nats", x.NATS); r.Code != 0 {
		t.Fatalf("the worker: %+v", r)
	}
	harness.Eventually(t, "the worker is gone", func() (bool, string) {
		list := harness.IndexerJSON[api.WorkerList](t, x.NATS, "workers").Workers
		return len(list) == 0, fmt.Sprintf("%+v", list)
	})
	if got := harness.IndexerJSON[map[string]jetstream.Model](t, x.NATS,
		"models remove m"); got["forgotten"] != (jetstream.Model{Name: "m", BlockSize: 16}) {
		t.Fatalf("forgotten: %+v", got)
	}
	if r := harness.Run(t, "indexer", "models", "remove", "m", "--nats", x.NATS); r.Code != 1 ||
		!strings.Contains(r.Stderr, `no worker has registered the model "m"`) {
		t.Errorf("the second time: %+v", r)
	}
	harness.Start(t, "worker-shim", "run", "--engine", engine.Endpoint(), "--worker", "w2", "--model", "m",
		"--block-size", "32", "--nats", x.NATS).WaitFor("connected to the engine")
}
