package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// varying are members of responses that differ between any two runs: times, sizes of stored data, and hashes of another
// tenant's blocks, which reveal nothing without the salt.
var varying = regexp.MustCompile(`(?i)^(at|from|to|id|hash|hashes|since|seq|key|next|checksum|begins?|time|.*_ms|.*_at|` +
	`.*_seq|.*bytes.*|age|epoch|renewed|expires|history_from|last_.*|buckets)$`)

// alike removes the varying members.
func alike(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for name, member := range v {
			if varying.MatchString(name) {
				delete(v, name)
			} else {
				v[name] = alike(member)
			}
		}
	case []any:
		for i := range v {
			v[i] = alike(v[i])
		}
	}
	return v
}

// TestSaltsAreApart runs two deployments. In the first, a tenant's requests and blocks have, under a salt, the tokens
// that other clients query without the salt. In the second, the tenant has other tokens. All replies to other clients
// must be equal.
func TestSaltsAreApart(t *testing.T) {
	t.Parallel()
	prompt := harness.Tokens(1, 6*harness.BlockSize)
	worlds := [2]map[string]any{}
	for i, victim := range [2][]uint32{prompt, harness.Tokens(5000, 6*harness.BlockSize)} {
		worlds[i] = asOthersSee(t, prompt, victim)
	}
	for question, answer := range worlds[0] {
		if other := worlds[1][question]; !reflect.DeepEqual(answer, other) {
			a, _ := json.Marshal(answer)
			b, _ := json.Marshal(other)
			t.Errorf("%s depends on another salt:\n%s\nwith other tokens under the salt:\n%s", question, a, b)
		}
	}
}

// countedRequests is the final number of asOthersSee's requests in the funnel.
const countedRequests = 14

// asOthersSee sends a tenant's requests, and then requests of other clients. It returns the other clients' replies by
// question.
func asOthersSee(t *testing.T, prompt, victim []uint32) map[string]any {
	ctx := harness.Context(t)
	x := harness.StartIndexer(t, t.TempDir(), "", "--policy", "dynamo") // no measured value decides
	ns := harness.OpenNamespace(t, ctx, x.NATS)
	post := func(path string, body any) (any, int) {
		t.Helper()
		text, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		method := http.MethodPost
		if body == nil {
			method, text = http.MethodGet, nil
		}
		r, err := http.NewRequestWithContext(ctx, method, "http://"+x.HTTP+path, bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		reply, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer reply.Body.Close()
		text, err = io.ReadAll(reply.Body)
		if err != nil {
			t.Fatal(err)
		}
		var v any
		if json.Unmarshal(text, &v) != nil {
			v = string(text)
		}
		return v, reply.StatusCode
	}
	good := func(path string, body any) any {
		t.Helper()
		v, status := post(path, body)
		if status != http.StatusOK {
			t.Fatalf("%s %v: %d %v", path, body, status, v)
		}
		return v
	}
	type m = map[string]any
	for _, w := range []string{"w1", "w2"} {
		good("/v1/workers", m{"instance": w, "model": "m", "block_size": harness.BlockSize, "events": "none",
			"endpoint": "http://" + w})
	}

	// the tenant: blocks on a worker, routed and freed requests, and a running request
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{Salt: "tenant"})
	if err != nil {
		t.Fatal(err)
	}
	stored := events.Event{Kind: events.Stored, Tier: events.Device, Locals: hasher.Hash(nil, victim)}
	for i := range stored.Locals {
		stored.Blocks = append(stored.Blocks, events.BlockHash(100+i))
	}
	at := harness.PublishAs(t, ctx, ns, "w1", &events.Batch{Incarnation: 1, FirstID: 1, Model: "m",
		BlockSize: harness.BlockSize, Events: []events.Event{stored}})
	salted := m{"model": "m", "tokens": victim, "cache_salt": "tenant", "min_seq": []any{at}}
	if a := good("/v1/find", salted); !strings.Contains(fmt.Sprint(a), "device:6") {
		t.Fatalf("the tenant's blocks are missing: %v", a)
	}
	delete(salted, "min_seq")
	for i := range 4 {
		salted["request_id"], salted["book"] = fmt.Sprint("r", i), true
		good("/v1/select", salted)
		if i < 3 {
			good("/v1/free", m{"model": "m", "request_id": fmt.Sprint("r", i)})
		}
	}

	// other clients
	seen := map[string]any{}
	look := func(path string, body any) {
		t.Helper()
		v, status := post(path, body)
		text, _ := json.Marshal(body)
		seen[fmt.Sprintf("%d: %s %.120s", len(seen), path, text)] = []any{status, alike(v)}
	}
	for _, space := range []m{{}, {"cache_salt": "mine"}, {"lora": "a"}, {"cache_salt": "mine", "lora": "a"},
		{"cache_salt": "Tenant"}, {"lora": "tenant"}, {}} {
		ask := func(path string, more m) {
			t.Helper()
			q := m{"model": "m", "tokens": prompt}
			for _, from := range []m{space, more} {
				for name, v := range from {
					q[name] = v
				}
			}
			look(path, q)
			look("/v1/funnel?model=m&since=10m", nil)
		}
		ask("/v1/find", nil)
		ask("/v1/find", m{"explain": true})
		ask("/v1/select", m{"explain": true, "advisory": true})
		ask("/v1/select", m{"explain": true})
		ask("/v1/potential_loads", nil)
		ask("/v1/prefixes", nil)
	}
	for _, path := range []string{"/v1/loads", "/v1/workers", "/v1/funnel?model=m&since=10m", "/workers"} {
		look(path, nil)
	}
	look("/v1/recorded", m{"model": "m", "limit": 100})
	look("/v1/prefixes", m{"model": "m"})
	look("/query", m{"model_name": "m", "token_ids": prompt})
	// Requests are counted shortly after their replies.
	var metrics any
	asked := fmt.Sprintf("kvatlas_route_asked_tokens_total{model=\"m\"} %d\n", countedRequests*len(prompt))
	harness.Eventually(t, "all requests are counted", func() (bool, string) {
		metrics, _ = post("/metrics", nil)
		return strings.Contains(fmt.Sprint(metrics), asked), fmt.Sprint(metrics)
	})
	var lines []string
	for line := range strings.Lines(fmt.Sprint(metrics)) {
		if regexp.MustCompile(`^kvatlas_(route|guess|prefix|find|select)\w*(tokens|decisions|blocks)`).MatchString(line) {
			lines = append(lines, line)
		}
	}
	slices.Sort(lines)
	if len(lines) == 0 {
		t.Fatal("no metrics are compared")
	}
	seen["/metrics"] = lines
	return seen
}
