package integration

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/pyenv"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

const blockSize = 16

func startShim(t testing.TB, x *indexerProcess, p *pyenv.Publisher, instance string, args ...string) *process {
	t.Helper()
	args = append([]string{"run", "--engine", p.Endpoint, "--instance", instance, "--model", "m", "--block-size", "16", "--nats", x.nats, "--log-repeat", "0"}, args...)
	if p.Replay != "" {
		args = append(args, "--replay", p.Replay)
	}
	return start(t, "worker-shim", args...)
}

// TestFromEngineToAnswer goes the whole way, from a publisher on real libzmq to the answer that a user sees, and keeps the answer right
// while every part is killed in turn.
func TestFromEngineToAnswer(t *testing.T) {
	for _, form := range []string{"map", "array"} {
		t.Run(form, func(t *testing.T) {
			engine := pyenv.StartPublisher(t, pyenv.PublisherOptions{Form: form, BlockSize: blockSize})
			data := t.TempDir()
			x := startIndexer(t, data, "")
			prompt := tokens(1000, 12*blockSize)
			_, first := engine.Store(prompt[:4*blockSize], nil) // before anybody listens

			shim := startShim(t, x, engine, "w1")
			x.waitDepth(t, "m", prompt, "w1", 4)

			_, second := engine.Store(prompt[4*blockSize:6*blockSize], &first[3])
			a := x.waitDepth(t, "m", prompt, "w1", 6)
			if a.Blocks != 12 || a.BlockSize != blockSize || !a.Complete || len(a.Workers) != 1 || len(a.Partitions) != 1 || a.Partitions[0].Seq == 0 {
				t.Fatalf("the answer is %+v", a)
			}
			engine.Remove(second[1])
			x.waitDepth(t, "m", prompt, "w1", 5)

			// Messages that cannot be read cost nothing but themselves, and the connection stays.
			engine.Raw([]byte("\xc1 this is no MessagePack"))
			engine.Raw(nil)
			engine.Frames([]byte("one"), []byte("two"))
			_, third := engine.Store(prompt[5*blockSize:7*blockSize], &second[0])
			x.waitDepth(t, "m", prompt, "w1", 7)
			shim.waitFor(`cannot be decoded`)
			shim.waitFor(`no engine's event message`)
			said := shim.saying()
			silent := len(regexp.MustCompile(`the engine's connection has ended.*peer is silent`).FindAllString(said, -1)) // an engine that stood still is left
			if n := strings.Count(said, "connected to the engine"); n != 1+silent {
				t.Fatalf("the shim connected %d times:\n%s", n, said)
			}

			// A gap is filled from the engine's replay buffer.
			engine.Drop(1, true)
			_, fourth := engine.Store(prompt[7*blockSize:8*blockSize], &third[1])
			_, fifth := engine.Store(prompt[8*blockSize:9*blockSize], &fourth[0])
			x.waitDepth(t, "m", prompt, "w1", 9)

			// The indexer and its NATS server crash while the engine goes on.
			x.kill()
			_, sixth := engine.Store(prompt[9*blockSize:10*blockSize], &fifth[0])
			x = startIndexer(t, data, x.nats)
			x.waitDepth(t, "m", prompt, "w1", 10)

			// So does the shim.
			shim.kill()
			_, seventh := engine.Store(prompt[10*blockSize:11*blockSize], &sixth[0])
			shim = startShim(t, x, engine, "w1")
			x.waitDepth(t, "m", prompt, "w1", 11)

			// The log may be trimmed past the shim's last message: the snapshot has its cursor.
			for range 2 {
				if r := run(t, "indexer", "snapshot", "now", "--nats", x.nats); r.code != 0 {
					t.Fatalf("snapshot now: %+v", r)
				}
			}
			shim.kill()
			shim = startShim(t, x, engine, "w1")
			shim.waitFor("connected to the engine")

			// After a stop in good order there is a snapshot to begin with.
			x.stop()
			engine.Store(prompt[11*blockSize:], &seventh[0])
			x = startIndexer(t, data, x.nats)
			x.waitFor(`msg=restored`)
			x.waitDepth(t, "m", prompt, "w1", 12)

			if n := strings.Count(shim.saying(), "a new incarnation of the engine begins"); n != 0 {
				t.Fatalf("the shim saw %d new lives of an engine that lived on:\n%s", n, shim.saying())
			}
			engine.Clear()
			if a := x.waitDepth(t, "m", prompt, "w1", 0); a.Reason != api.ReasonNotCached {
				t.Fatalf("the reason is %q", a.Reason)
			}
		})
	}
}

// TestWhatCannotBeReplayedIsCleared loses messages for good: nothing of what was known may be claimed any more.
func TestWhatCannotBeReplayedIsCleared(t *testing.T) {
	engine := pyenv.StartPublisher(t, pyenv.PublisherOptions{BlockSize: blockSize})
	x := startIndexer(t, t.TempDir(), "")
	shim := startShim(t, x, engine, "w1")
	prompt := tokens(1, 4*blockSize)
	engine.Store(prompt, nil)
	x.waitDepth(t, "m", prompt, "w1", 4)

	engine.Drop(1, false)
	engine.Clear() // lost
	other := tokens(9000, 2*blockSize)
	engine.Store(other, nil)
	x.waitDepth(t, "m", other, "w1", 2)
	x.waitDepth(t, "m", prompt, "w1", 0)
	shim.waitFor(`could not be replayed`)

	// A new life of the engine, of which nothing was heard: its numbers begin again.
	engine.Do(map[string]any{"op": "restart"}, nil)
	engine.Store(prompt[:blockSize], nil)
	x.waitDepth(t, "m", prompt, "w1", 1)
	x.waitDepth(t, "m", other, "w1", 0)
}

// TestQueriesThatCannotBeAnswered asks what has no answer: each gets a code and a sentence.
func TestQueriesThatCannotBeAnswered(t *testing.T) {
	engine := pyenv.StartPublisher(t, pyenv.PublisherOptions{BlockSize: blockSize})
	x := startIndexer(t, t.TempDir(), "")
	if _, failure := x.query(t, "--model", "m", "--hashes", "1"); failure == nil || failure.Code != api.CodeUnknownModel || !strings.Contains(failure.Message, "nor any other") {
		t.Fatalf("got %v", failure)
	}
	startShim(t, x, engine, "w1")
	prompt := tokens(1, 2*blockSize)
	engine.Store(prompt, nil)
	x.waitDepth(t, "m", prompt, "w1", 2)
	for _, c := range []struct {
		args    []string
		code    api.Code
		message string
	}{
		{[]string{"--model", "x", "--tokens", "1"}, api.CodeUnknownModel, "known: m"},
		{[]string{"--model", "m", "--tokens", "1", "--block-size", "32"}, api.CodeBlockSizeMismatch, "blocks of 32 tokens; its workers have blocks of 16"},
		{[]string{"--model", "m", "--hashes", "1", "--cache-salt", "s"}, api.CodeMalformed, "part of the hashes"},
	} {
		if _, failure := x.query(t, c.args...); failure == nil || failure.Code != c.code || !strings.Contains(failure.Message, c.message) {
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
		if a, failure := x.query(t, append(c.args, "--model", "m")...); failure != nil || a.Reason != c.reason || a.Workers == nil {
			t.Errorf("%v: got %+v, %v, want the reason %q", c.args, a, failure, c.reason)
		}
	}
	post := func(path, body string) (int, string) {
		status, text, err := call(x.http, "POST", path, body)
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
		if err := json.Unmarshal([]byte(text), &body); err != nil || body.Error == nil || status != c.status || body.Error.Code != c.code {
			t.Errorf("%s %.60s: got %d %s, want %d %s", c.path, c.body, status, text, c.status, c.code)
		}
	}
	// After all of it the right answer is still there, over HTTP too.
	body, _ := json.Marshal(api.Query{Model: "m", Tokens: prompt})
	status, text := post("/v1/find", string(body))
	var a api.Answer
	if err := json.Unmarshal([]byte(text), &a); err != nil || status != 200 || len(a.Workers) != 1 || a.Workers[0].Device != 2 {
		t.Fatalf("got %d %s", status, text)
	}
	for path, want := range map[string]string{"/healthz": "ok", "/readyz": "ready", "/metrics": `kvatlas_index_blocks{tier="device"} 2`} {
		var text string
		if err := httpDo(x.http, "GET", path, nil, &text); err != nil || !strings.Contains(text, want) {
			t.Errorf("%s: got %v %.300s, want %q", path, err, text, want)
		}
	}
	if r := run(t, "indexer", "workers", "--nats", x.nats); r.code != 0 || !strings.Contains(r.stdout, "w1") {
		t.Errorf("workers: %+v", r)
	}
	if r := run(t, "indexer", "status", "--nats", x.nats); r.code != 0 || !strings.Contains(r.stdout, "2 blocks held on device") {
		t.Errorf("status: %+v", r)
	}
}

// TestBlockSizesDisagree starts a second worker of a model with blocks of another size: its shim refuses, naming both.
func TestBlockSizesDisagree(t *testing.T) {
	engine := pyenv.StartPublisher(t, pyenv.PublisherOptions{BlockSize: blockSize})
	x := startIndexer(t, t.TempDir(), "")
	shim := startShim(t, x, engine, "w1")
	shim.waitFor("connected to the engine")
	r := run(t, "worker-shim", "run", "--engine", engine.Endpoint, "--instance", "w2", "--model", "m", "--block-size", "32", "--nats", x.nats)
	if r.code != 1 || !strings.Contains(r.stderr, "registered with block size 16, this worker has 32; if no worker has that size any more: indexer forget --model m") {
		t.Fatalf("got %+v", r)
	}

	// Nobody takes the size from a model that is served; when it is served no more, the next worker decides.
	for _, command := range []string{"forget", "forget w1 --model m", "forget --model m --rank 1"} {
		if r := run(t, "indexer", append(strings.Fields(command), "--nats", x.nats)...); r.code != 2 {
			t.Errorf("%s: %+v", command, r)
		}
	}
	if r := run(t, "indexer", "forget", "--model", "m", "--nats", x.nats); r.code != 1 || !strings.Contains(r.stderr, `worker w1/0 serves "m" with blocks of 16 tokens`) {
		t.Fatalf("of a model that is served: %+v", r)
	}
	shim.stop()
	if r := run(t, "indexer", "forget", "w1", "--nats", x.nats); r.code != 0 {
		t.Fatalf("the worker: %+v", r)
	}
	eventually(t, "the worker is gone", func() (bool, string) {
		list := ask[api.WorkerList](t, x.nats, "workers").Workers
		return len(list) == 0, fmt.Sprintf("%+v", list)
	})
	if got := ask[map[string]jetstream.Model](t, x.nats, "forget --model m"); got["forgotten"] != (jetstream.Model{Name: "m", BlockSize: 16}) {
		t.Fatalf("forgotten: %+v", got)
	}
	if r := run(t, "indexer", "forget", "--model", "m", "--nats", x.nats); r.code != 1 || !strings.Contains(r.stderr, `no worker has registered the model "m"`) {
		t.Errorf("the second time: %+v", r)
	}
	start(t, "worker-shim", "run", "--engine", engine.Endpoint, "--instance", "w2", "--model", "m", "--block-size", "32", "--nats", x.nats).waitFor("connected to the engine")
}
