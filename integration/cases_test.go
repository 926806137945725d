package integration

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/zmtpserver"
	"github.com/vmihailenco/msgpack/v5"
)

// eventsCase is a file of testdata/cases/events. testdata/cases/README.md describes the fields.
type eventsCase struct {
	Report    string         `json:"report"`
	Why       string         `json:"why"`
	BlockSize int            `json:"block_size"`
	Register  map[string]any `json:"register"`
	Steps     []struct {
		Publish []any `json:"publish"`
	} `json:"steps"`
	Find   map[string]any `json:"find"`
	Want   [][4]uint32    `json:"want"` // device, host, disk, external of each worker
	Chosen *bool          `json:"chosen"`
}

// TestEventsCases plays every file of testdata/cases/events: an engine with real sockets publishes the events, a shim
// in the indexer reads the events, and find and select return the results of the case.
func TestEventsCases(t *testing.T) {
	t.Parallel()
	playCases(t, "events", func(t *testing.T, x *harness.Indexer, name string, c *eventsCase) {
		if c.Report == "" || c.Why == "" || c.BlockSize == 0 || len(c.Steps) == 0 || c.Find == nil || c.Want == nil {
			t.Fatal("the case lacks a report, why, block_size, steps, find or want")
		}
		c.play(t, x, name)
	})
}

// playCases plays every file of a folder of testdata/cases on the same indexer.
func playCases[C any](t *testing.T, folder string, play func(*testing.T, *harness.Indexer, string, *C)) {
	t.Helper()
	files, err := filepath.Glob("testdata/cases/" + folder + "/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no cases: %v", err)
	}
	x := harness.StartIndexer(t, t.TempDir(), "")
	var subtests testkit.Group
	defer subtests.Wait()
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".json")
		subtests.Run(t, name, func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			c := new(C)
			from := json.NewDecoder(bytes.NewReader(data))
			from.UseNumber() // names have up to 64 bits
			from.DisallowUnknownFields()
			if err := from.Decode(c); err != nil {
				t.Fatal(err)
			}
			play(t, x, name, c)
		})
	}
}

// play registers an engine under the case's name, publishes the events and compares the answers.
func (c *eventsCase) play(t *testing.T, x *harness.Indexer, name string) {
	engine := startCaseEngine(t)
	register := map[string]any{"instance_id": name, "endpoint": engine.endpoint, "replay_endpoint": engine.replay,
		"model_name": name, "block_size": c.BlockSize}
	maps.Copy(register, c.Register)
	if status, text := caseRequest(t, x, "/register", register); status != http.StatusCreated {
		t.Fatalf("register: %d %s", status, text)
	}
	if err := engine.WaitSubscribers(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for _, step := range c.Steps {
		engine.publish(t, expanded(step.Publish).([]any))
	}
	engine.publish(t, []any{endOfCase()})
	harness.Eventually(t, "the indexer has applied all events", func() (bool, string) {
		list := harness.IndexerJSON[api.WorkerList](t, x.NATS, "workers")
		at := slices.IndexFunc(list.Workers, func(w api.WorkerInfo) bool { return string(w.Instance) == name })
		return at >= 0 && list.Workers[at].Removed >= endRemovals, fmt.Sprintf("%+v", list.Workers)
	})
	query := map[string]any{"model": name}
	maps.Copy(query, expanded(c.Find).(map[string]any))
	harness.Eventually(t, fmt.Sprintf("find returns %v", c.Want), func() (bool, string) {
		status, text := caseRequest(t, x, "/v1/find", query)
		var a api.Answer
		if err := json.Unmarshal([]byte(text), &a); err != nil || status != http.StatusOK {
			return false, fmt.Sprint(status, text, err)
		}
		got := [][4]uint32{}
		for _, o := range a.Workers {
			got = append(got, [4]uint32{o.Device, o.Host, o.Disk, o.External})
		}
		return a.Complete && reflect.DeepEqual(got, c.Want), text
	})
	if c.Chosen == nil {
		return
	}
	harness.Eventually(t, fmt.Sprintf("select names the worker: %t", *c.Chosen), func() (bool, string) {
		_, text := caseRequest(t, x, "/v1/select", query)
		var s struct{ Worker string }
		err := json.Unmarshal([]byte(text), &s)
		return err == nil && (s.Worker == name) == *c.Chosen, text
	})
	// The shim has already logged the later result of the registration.
	for _, line := range strings.Split(x.Said(), "\n") {
		if *c.Chosen && strings.Contains(line, "worker="+name+"/0") && strings.Contains(line, "level=ERROR") {
			t.Errorf("the log reports a problem of an eligible worker: %s", line)
		}
	}
}

func caseRequest(t *testing.T, x *harness.Indexer, path string, body map[string]any) (status int, text string) {
	t.Helper()
	data, err := json.Marshal(body)
	if err == nil {
		status, text, err = harness.Request(x.HTTP, "POST", path, string(data))
	}
	if err != nil {
		t.Fatal(path, err)
	}
	return status, text
}

// endRemovals is greater than the number of removed blocks in any case.
const endRemovals = 10_000

// endOfCase removes blocks that no case stores. An index ignores and counts such removals. The count shows that all
// earlier messages of the engine are applied.
func endOfCase() map[string]any {
	names := make([]uint64, endRemovals)
	for i := range names {
		names[i] = 1<<63 + uint64(i)
	}
	return map[string]any{"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"}
}

// expanded replaces {"range": [a, b]} with the numbers from a to b-1, "hex:..." with bytes, and whole numbers with
// integers. A range in a list adds the numbers to the list.
func expanded(v any) any {
	switch v := v.(type) {
	case map[string]any:
		if bounds, is := rangeOf(v); is {
			return bounds
		}
		out := map[string]any{}
		for key, value := range v {
			out[key] = expanded(value)
		}
		return out
	case []any:
		out := []any{}
		for _, value := range v {
			if object, is := value.(map[string]any); is {
				if numbers, is := rangeOf(object); is {
					out = append(out, numbers...)
					continue
				}
			}
			out = append(out, expanded(value))
		}
		return out
	case string:
		if digits, is := strings.CutPrefix(v, "hex:"); is {
			if data, err := hex.DecodeString(digits); err == nil {
				return data
			}
		}
	case json.Number:
		if i, err := v.Int64(); err == nil {
			return i
		}
		var u uint64
		if err := json.Unmarshal([]byte(v), &u); err == nil {
			return u
		}
		f, _ := v.Float64()
		return f
	}
	return v
}

func rangeOf(object map[string]any) (numbers []any, is bool) {
	bounds, is := object["range"].([]any)
	if !is || len(object) != 1 || len(bounds) != 2 {
		return nil, false
	}
	for i := expanded(bounds[0]).(int64); i < expanded(bounds[1]).(int64); i++ {
		numbers = append(numbers, i)
	}
	return numbers, true
}

// caseEngine has an engine's two sockets. The replay socket returns all published messages.
type caseEngine struct {
	*zmtpserver.Pub
	endpoint, replay string

	mu   sync.Mutex
	sent [][]byte
}

func startCaseEngine(t *testing.T) *caseEngine {
	t.Helper()
	e := &caseEngine{endpoint: "tcp://" + loopback.Reserve(t), replay: "tcp://" + loopback.Reserve(t)}
	var err error
	if e.Pub, err = zmtpserver.ListenPub(t.Context(), e.endpoint, zmtp.Config{}); err != nil {
		t.Fatal(err)
	}
	router, err := zmtpserver.ListenRouter(t.Context(), e.replay, zmtp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	var answering sync.WaitGroup
	answering.Go(func() { e.answer(router) })
	t.Cleanup(func() {
		e.Pub.Stop()
		router.Stop()
		answering.Wait()
	})
	return e
}

// answer replays as vLLM does: every message from the number on, then the number -1.
func (e *caseEngine) answer(router *zmtpserver.Router) {
	for {
		from, request, err := router.Recv(context.Background())
		if err != nil {
			return // stopped
		}
		first := binary.BigEndian.Uint64(request[len(request)-1])
		e.mu.Lock()
		sent := e.sent
		e.mu.Unlock()
		for i := first; i < uint64(len(sent)); i++ {
			_ = router.Send(from, nil, binary.BigEndian.AppendUint64(nil, i), sent[i]) // a lost reply is a gap
		}
		_ = router.Send(from, nil, binary.BigEndian.AppendUint64(nil, 1<<64-1), nil)
	}
}

// publish sends a message with the given events, as vLLM does.
func (e *caseEngine) publish(t *testing.T, events []any) {
	t.Helper()
	var payload bytes.Buffer
	to := msgpack.NewEncoder(&payload)
	to.UseCompactInts(true)
	to.SetSortMapKeys(true)
	err := to.Encode([]any{1.5, events, 0})
	if err == nil {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.sent = append(e.sent, payload.Bytes())
		err = e.Send(nil, binary.BigEndian.AppendUint64(nil, uint64(len(e.sent)-1)), payload.Bytes())
	}
	if err != nil {
		t.Fatal(err)
	}
}
