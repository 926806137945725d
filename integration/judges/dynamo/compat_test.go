//go:build judges

package dynamo

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// startDynamo runs NVIDIA Dynamo's standalone indexer. The indexer requires a port and listens on all addresses.
// Requests use loopback.
func startDynamo(t *testing.T, args ...string) (base string) {
	python := pyenv.PythonWithDynamo(t)
	base = loopback.Reserve(t)
	var said bytes.Buffer
	cmd := exec.Command(python,
		append([]string{"-m", "dynamo.indexer", "--port", strings.Split(base, ":")[1], "--threads", "2"}, args...)...)
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("output of dynamo.indexer:\n%s", &said)
		}
	})
	for deadline := time.Now().Add(harness.Patience); ; time.Sleep(50 * time.Millisecond) {
		if status, _, err := harness.Request(base, "GET", "/health", ""); err == nil && status == 200 {
			return base
		}
		if time.Now().After(deadline) {
			t.Fatal("dynamo.indexer does not answer")
		}
	}
}

// TestCompatibleWithDynamo sends the same requests to NVIDIA Dynamo's indexer and to kvatlas's, with the same engine.
// Statuses and all fields of answers must be equal. internal/faces/compat/DIFFERENCES.md and the comments below list
// the intended differences.
func TestCompatibleWithDynamo(t *testing.T) {
	dynamo := startDynamo(t)
	engine := pyenv.StartPublisher(t, pyenv.PublisherOptions{BlockSize: harness.BlockSize})
	data := t.TempDir()
	x := harness.StartIndexer(t, data, "", "--node-id", "one")
	prompt := harness.Tokens(1, 4*harness.BlockSize)

	// same sends a request to both indexers until the replies agree. Error texts may differ.
	same := func(method, path, body, want string) {
		t.Helper()
		var got [2]string
		for deadline := time.Now().Add(harness.Patience); ; time.Sleep(50 * time.Millisecond) {
			var status [2]int
			for i, base := range []string{dynamo, x.HTTP} {
				var err error
				if status[i], got[i], err = harness.Request(base, method, path, body); err != nil {
					t.Fatal(err)
				}
			}
			var a, b any
			json.Unmarshal([]byte(got[0]), &a)
			json.Unmarshal([]byte(got[1]), &b)
			equal := status[0] == status[1] && (status[0] >= 400 || reflect.DeepEqual(a, b))
			if equal && strings.Contains(got[0], want) {
				return
			}
			if time.Now().After(deadline) || method == "POST" && !strings.HasPrefix(path, "/query") {
				t.Fatalf("%s %s %.200s:\nDynamo %d %s\n  ours %d %s\nwant both to have %q", method, path, body,
					status[0], got[0], status[1], got[1], want)
			}
		}
	}
	query := func(list []uint32) string { return `{"model_name":"m","token_ids":` + harness.JSONList(list) + `}` }
	registration := func(instance, blockSize int) string {
		return fmt.Sprintf(`{"instance_id":%d,"endpoint":%q,"replay_endpoint":%q,"model_name":"m","block_size":%d}`,
			instance, engine.Endpoint, engine.Replay, blockSize)
	}
	same("GET", "/workers", "", "[]")
	same("POST", "/query", query(prompt), "no indexer for model=m routing_group=default")
	same("POST", "/register", registration(1, harness.BlockSize), `"ok"`)
	same("POST", "/register", registration(1, harness.BlockSize), "already registered")
	same("POST", "/register", registration(2, 2*harness.BlockSize), "block_size")
	same("GET", "/workers", "", `"active"`)
	engine.WaitSubscribers(2)
	_, hashes := engine.Store(prompt[:3*harness.BlockSize], nil)
	same("POST", "/query", query(prompt), `"gpu":48`)
	same("POST", "/query", query(prompt[:2*harness.BlockSize+5]), `"gpu":32`)
	same("POST", "/query", `{"model_name":"m","token_ids":[]}`, `"scores":{}`)
	same("POST", "/query", `{"model_name":"m","token_ids":[5,6,7]}`, `"scores":{}`)
	same("POST", "/query", strings.Replace(query(prompt), "{", `{"lora_name":"a",`, 1), `"scores":{}`)
	same("POST", "/query", `{"model_name":"m"}`, "token_ids")
	same("POST", "/query", `{"model_name":"m","token_ids":[-1]}`, "")
	same("POST", "/query", `{"model_name":"m","token_ids"`, "")
	same("POST", "/query", `{"model_name":"nope","token_ids":[1]}`, "no indexer for model=nope")
	same("POST", "/query_by_hash", `{"model_name":"m","block_hashes":[1,-2]}`, `"scores":{}`)
	same("POST", "/query_by_hash", `{"model_name":"m","block_hashes":[1],"cache_salt":"x"}`, "cache_salt")
	engine.Publish(pyenv.Event{Op: "store", Tokens: prompt[2*harness.BlockSize : 3*harness.BlockSize],
		Parent: &hashes[1], Hashes: hashes[2:3], Medium: "CPU"})
	engine.Remove(hashes[2])
	same("POST", "/query", query(prompt), `"cpu":48`)
	same("POST", "/query", query(prompt), `"gpu":32`)
	same("POST", "/unregister", `{"instance_id":77,"model_name":"m"}`, "not found")

	// Rules for requests: names are case-sensitive, no name is repeated, text is UTF-8, unknown fields are ignored.
	// Without a routing group, unregister removes a worker from all groups.
	same("POST", "/query", strings.Replace(query(prompt), "token_ids", "Token_ids", 1), "missing field")
	same("POST", "/query", strings.Replace(query(prompt), "{", `{"model_name":"m",`, 1), "duplicate field")
	same("POST", "/query", strings.Replace(query(prompt), "{", `{"nobody_knows":[{}],`, 1), `"gpu":32`)
	same("POST", "/query", strings.Replace(query(prompt), "{", `{"cache_salt":"\ud800",`, 1), "")
	same("POST", "/query", strings.Replace(query(prompt), "{", "{\"cache_salt\":\"\xff\",", 1), "")
	same("POST", "/query", strings.Replace(query(prompt), "{", `{"block_mm_infos":null,`, 1), `"gpu":32`)
	same("GET", "/query", "", "")
	same("POST", "/workers", "{}", "")
	grouped := strings.Replace(registration(5, harness.BlockSize), "{", `{"routing_group":"a",`, 1)
	same("POST", "/register", grouped, `"ok"`)
	same("POST", "/unregister", `{"instance_id":5,"model_name":"m","routing_group":"default"}`, "routing_group=a")
	same("POST", "/unregister", `{"instance_id":5,"model_name":"m"}`, `"ok"`)
	same("POST", "/unregister", `{"instance_id":5,"model_name":"m"}`, "not found")

	// Ours alone: a registration outlives the process, and the block is in the dump.
	x.Stop()
	x = harness.StartIndexer(t, data, x.NATS, "--node-id", "one")
	x.WaitFor("a shim runs in this process")
	engine.WaitSubscribers(2)
	engine.Store(prompt[:1*harness.BlockSize], nil)
	same("POST", "/query", query(prompt[:harness.BlockSize]), `"gpu":16`)
	if status, text, err := harness.Request(x.HTTP, "GET", "/dump", ""); err != nil || status != 200 ||
		!strings.Contains(text, `"m:default":{"block_size":16,"events":[{"worker_id":1,`) {
		t.Errorf("dump: %d %.300s %v", status, text, err)
	}

	engine.Clear()
	same("POST", "/query", query(prompt), `"scores":{}`)
	same("POST", "/unregister", `{"instance_id":1,"model_name":"m"}`, `"ok"`)
	same("GET", "/workers", "", "[]")
	same("POST", "/query", query(prompt), "no indexer for model=m")

	// Intended difference: a registration may name the kind of engine. Otherwise, the shim detects the engine from its
	// events.
	x.WaitFor("a registered engine speaks as vLLM does")
	if status, text, err := harness.Request(x.HTTP, "POST", "/register",
		`{"instance_id":3,"type":"vLLM","endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":16}`); err != nil || status != 201 {
		t.Errorf("register with a type: %d %s %v", status, text, err)
	}
	if status, text, err := harness.Request(x.HTTP, "POST", "/register",
		`{"instance_id":4,"type":"Mooncake","endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":16}`); err != nil || status != 400 || !strings.Contains(text, "vllm, sglang or auto") {
		t.Errorf("register with an unknown type: %d %s %v", status, text, err)
	}
	// Intended differences: an instance may have a name, hashes may be unsigned, and an endpoint without a listener is
	// pending.
	if status, text, err := harness.Request(x.HTTP, "POST", "/register",
		`{"instance_id":"w-1","endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":16}`); err != nil ||
		status != 201 {
		t.Errorf("register by name: %d %s %v", status, text, err)
	}
	if status, text, err := harness.Request(x.HTTP, "GET", "/workers", ""); err != nil || status != 200 ||
		!strings.Contains(text, `"instance_id":"w-1","source":"zmq","status":"pending"`) {
		t.Errorf("workers: %d %s %v", status, text, err)
	}
	if status, text, err := harness.Request(x.HTTP, "POST", "/query_by_hash",
		`{"model_name":"m","block_hashes":[12124091508212882195]}`); err != nil || status != 200 {
		t.Errorf("an unsigned hash: %d %s %v", status, text, err)
	}
}
