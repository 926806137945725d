package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestRefusedQueriesAreSeen sends 200 queries of 800 hashes at once, repeatedly, to an indexer with room for two, until
// some are refused. Every query gets a reply, and metrics, status, statistics and the log have the outcomes.
func TestRefusedQueriesAreSeen(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "", "--query-workers", "1", "--query-queue", "1")
	ctx := harness.Context(t)
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{"nats://" + x.NATS}})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	body, _ := json.Marshal(api.Query{Model: "m", Hashes: make(api.Hashes, 800)})
	var mu sync.Mutex
	got := map[string]uint64{}
	for got["busy"] == 0 && ctx.Err() == nil {
		var all sync.WaitGroup
		for range 200 {
			all.Go(func() {
				reply, err := conn.Request(ctx, jetstream.Names("default").Query(ops.Find), api.JSON, body)
				var refused *jetstream.ServiceError
				var e api.ErrorBody
				if !errors.As(err, &refused) || json.Unmarshal(reply.Body, &e) != nil || e.Error == nil {
					t.Errorf("%q %v", reply.Body, err) // no worker has announced the model
					return
				}
				mu.Lock()
				got[string(e.Error.Code)]++
				mu.Unlock()
			})
		}
		all.Wait()
	}
	if got["busy"] == 0 || got["unknown_model"] == 0 || len(got) != 2 {
		t.Fatalf("%v", got)
	}
	metric := regexp.MustCompile(`kvatlas_requests_total\{operation="find",outcome="(\w+)",transport="nats"\} (\d+)`)
	harness.Eventually(t, "the metrics have all", func() (bool, string) {
		var text string
		if err := harness.HTTPDo(x.HTTP, "GET", "/metrics", nil, &text); err != nil {
			return false, err.Error()
		}
		counted := map[string]uint64{}
		for _, m := range metric.FindAllStringSubmatch(text, -1) {
			counted[m[1]], _ = strconv.ParseUint(m[2], 10, 64)
		}
		return fmt.Sprint(counted) == fmt.Sprint(got), fmt.Sprint(counted, " ", got)
	})
	r := harness.Run(t, "indexer", "status", "--nats", x.NATS)
	if want := fmt.Sprintf("find over nats busy %d unknown_model %d", got["busy"],
		got["unknown_model"]); !strings.Contains(r.Stdout, want) ||
		!strings.Contains(r.Stdout, fmt.Sprintf("%d requests were refused as busy within the last two minutes",
			got["busy"])) {
		t.Errorf("%+v, want %q", r, want)
	}
	stats, err := conn.Request(ctx, "$SRV.STATS.kvatlas-indexer", "", nil)
	if err != nil || !strings.Contains(string(stats.Body), fmt.Sprintf(`"outcomes":{"busy":%d,"unknown_model":%d}`,
		got["busy"], got["unknown_model"])) {
		t.Errorf("%s %v", stats.Body, err)
	}
	// Each line has the refusals since the line before.
	line := regexp.MustCompile(`requests were not answered.*outcome=busy requests=(\d+) why=.* what_to_do=.*--query-workers`)
	harness.Eventually(t, "the log has all refusals", func() (bool, string) {
		sum := uint64(0)
		for _, m := range line.FindAllStringSubmatch(x.Said(), -1) {
			n, _ := strconv.ParseUint(m[1], 10, 64)
			sum += n
		}
		return sum == got["busy"], x.Said()
	})
}

// TestWhatAWebPageMayNot sends requests that a web page may send to this host without a preflight request. All are
// refused.
func TestWhatAWebPageMayNot(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	for _, c := range []struct {
		path, contentType, origin, body string
		want                            int
	}{
		{"/v1/snapshot", "", "", "", 200}, // curl -X POST
		{"/v1/snapshot", "", "https://a.example", "", 403},
		{"/v1/snapshot", "application/json", "https://a.example", "{}", 403},
		{"/v1/snapshot", "text/plain", "", "{}", 415},
		{"/v1/find", "application/x-www-form-urlencoded", "", `{"model":"m","hashes":[1]}`, 415}, // curl -d
		{"/v1/find", "application/json", "", `{"model":"m","hashes":["18446744073709551615"]}`, 404},
		{"/register", "text/plain", "",
			`{"instance_id":1,"endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":4}`, 415},
		{"/unregister", "multipart/form-data; boundary=x", "", `{}`, 415},
	} {
		r, err := http.NewRequest("POST", "http://"+x.HTTP+c.path, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		for name, value := range map[string]string{"Content-Type": c.contentType, "Origin": c.origin} {
			if value != "" {
				r.Header.Set(name, value)
			}
		}
		reply, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		reply.Body.Close()
		if reply.StatusCode != c.want {
			t.Errorf("%+v: %d", c, reply.StatusCode)
		}
	}
}

// TestUnregisterWhateverTheGroup checks that, as in NVIDIA Dynamo 1.6.1, a request without a routing group unregisters
// the worker in any group.
func TestUnregisterWhateverTheGroup(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "", "--node-id", "one")
	do := func(path, body string, want int, words string) {
		t.Helper()
		status, text, err := harness.Request(x.HTTP, "POST", path, body)
		if err != nil || status != want || !strings.Contains(text, words) {
			t.Fatalf("%s %s: %d %s %v, want %d %s", path, body, status, text, err, want, words)
		}
	}
	do("/register",
		`{"instance_id":2,"endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":4,"routing_group":"a"}`, 201,
		"ok")
	do("/register",
		`{"instance_id":2,"endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":4,"routing_group":"a","dp_rank":1}`, 201, "ok")
	do("/unregister", `{"instance_id":2,"model_name":"m","routing_group":"default"}`, 404,
		"registered for model=m routing_group=a")
	do("/unregister", `{"instance_id":2,"model_name":"m:a"}`, 404, "unknown_worker")
	do("/unregister", `{"instance_id":2,"model_name":"m","dp_rank":1}`, 200, "ok")
	do("/unregister", `{"instance_id":2,"model_name":"m","routing_group":null}`, 200, "ok")
	do("/unregister", `{"instance_id":2,"model_name":"m"}`, 404, "instance 2 not found")
	for rank, group := range []string{"a", "b", "default"} {
		do("/register", fmt.Sprintf(`{"instance_id":2,"endpoint":"tcp://127.0.0.1:1","model_name":"m","block_size":4,`+
			`"routing_group":%q,"dp_rank":%d}`, group, rank), 201, "ok")
	}
	do("/unregister", `{"instance_id":2,"model_name":"m"}`, 200, "ok") // of all groups
	if status, text, err := harness.Request(x.HTTP, "GET", "/workers", ""); err != nil || status != 200 ||
		strings.TrimSpace(text) != "[]" {
		t.Errorf("%d %s %v", status, text, err)
	}
}
