//go:build judges

package selection

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

var seed = flag.Uint64("selection.seed", 1, "of the random histories")

// service runs a service of Dynamo with additional environment variables. The service requires a port and listens on
// all addresses. Requests use loopback.
func service(t *testing.T, environment []string, module string, args ...string) (base string) {
	base = loopback.Reserve(t)
	var said bytes.Buffer
	cmd := exec.Command(pyenv.PythonWithDynamo(t),
		append([]string{"-m", module, "--port", strings.Split(base, ":")[1]}, args...)...)
	cmd.Env = append(os.Environ(), environment...)
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("output of %s:\n%.2000s", module, &said)
		}
	})
	for deadline := time.Now().Add(harness.Patience); ; time.Sleep(50 * time.Millisecond) {
		if status, _, err := harness.Request(base, "GET", "/health", ""); err == nil && status == 200 {
			return base
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not answer", module)
		}
	}
}

// pair is Dynamo's service and ours.
type pair struct {
	t            *testing.T
	dynamo, ours string
	rng          *rand.Rand
	steps        int
}

func (p *pair) ask(base, method, path string, body any) (int, string) {
	p.t.Helper()
	text := ""
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			p.t.Fatal(err)
		}
		text = string(data)
	}
	status, reply, err := harness.Request(base, method, path, text)
	if err != nil {
		p.t.Fatal(err)
	}
	return status, reply
}

// same sends a request to both services, with the body own to kvatlas, and compares the replies. It returns Dynamo's
// reply.
func (p *pair) same(method, path string, body, own any) (int, string) {
	p.t.Helper()
	p.steps++
	status, reply := p.ask(p.dynamo, method, path, body)
	p.equal(method, path, own, status, reply)
	return status, reply
}

func (p *pair) equal(method, path string, body any, status int, reply string) {
	p.t.Helper()
	is, own := p.ask(p.ours, method, path, body)
	shape := strings.Contains(reply, "target type") || strings.Contains(reply, "as JSON") // the decoder's words
	if is != status || !shape && !reflect.DeepEqual(normal(own), normal(reply)) {
		p.t.Fatalf("step %d of seed %d: %s %s %v:\nDynamo %d %s\n  ours %d %s", p.steps, *seed, method, path, body, status,
			reply, is, own)
	}
}

// normal sorts the rows of a reply, and removes models without rows.
func normal(text string) any {
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var v any
	if d.Decode(&v) != nil {
		return text
	}
	return inOrder(v)
}

func inOrder(v any) any {
	switch v := v.(type) {
	case []any:
		list := slices.DeleteFunc(v, func(v any) bool {
			m, is := v.(map[string]any)
			rows, has := m["loads"].([]any)
			return is && has && len(rows) == 0
		})
		for i := range list {
			list[i] = inOrder(list[i])
		}
		if len(list) > 0 {
			if row, is := list[0].(map[string]any); is && row["dp_rank"] != nil {
				slices.SortFunc(list, func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
			}
		}
		return list
	case map[string]any:
		for name := range v {
			v[name] = inOrder(v[name])
		}
	}
	return v
}

// hashes returns the hashes of a prompt from a few families, so that prompts have common prefixes. As in sequence
// hashes, a hash identifies all blocks up to the block.
func (p *pair) hashes(most int) []int64 {
	list := make([]int64, p.rng.IntN(most+1))
	family := int64(p.rng.IntN(3)+1) * 1_000_000
	at, branch := p.rng.IntN(len(list)+1), int64(p.rng.IntN(2)+1)
	for i := range list {
		list[i] = family + int64(i)
		if i >= at {
			list[i] += branch*100_000 + int64(at)*1000
		}
		if family == 2_000_000 {
			list[i] = -list[i]
		}
	}
	return list
}

// TestSlotTracker sends random histories to both slot trackers.
func TestSlotTracker(t *testing.T) {
	x := harness.StartIndexer(t, t.TempDir(), "", "--slot-tracker-listen", "127.0.0.1:0")
	p := &pair{t: t, dynamo: service(t, nil, "dynamo.slot_tracker"),
		ours: x.WaitFor(`the slot tracker is served" listen=(\S+)`)[1], rng: rand.New(rand.NewPCG(*seed, 1))}
	type of = map[string]any
	for p.steps < 5000 {
		n := p.rng.IntN
		body := of{"model_name": fmt.Sprint("m", n(2)), "routing_group": []string{"default", "g"}[n(8)/7]}
		with := func(more of) of {
			for name, v := range more {
				body[name] = v
			}
			return body
		}
		id := fmt.Sprint("r", n(40))
		switch k := n(100); {
		case k < 4:
			p.same("POST", "/register", with(of{"worker_id": n(4), "block_size": 16 << (n(10) / 9), "dp_start": n(2),
				"dp_size": n(4)}), body)
		case k < 6:
			p.same("POST", "/unregister", with(of{"worker_id": n(4)}), body)
		case k < 40:
			p.same("POST", "/add", with(of{"request_id": id, "worker_id": n(4), "dp_rank": n(4),
				"sequence_hashes": p.hashes(8), "new_isl_tokens": n(200)}), body)
		case k < 50:
			p.same("POST", "/prefill_complete", with(of{"request_id": id}), body)
		case k < 70:
			p.same("POST", "/free", with(of{"request_id": id}), body)
		case k < 85:
			p.same("POST", "/potential_loads", with(of{"sequence_hashes": p.hashes(8), "new_isl_tokens": n(200)}), body)
		case k < 97:
			p.same("GET", []string{"/loads", "/loads?model_name=m1", "/loads?routing_group=g"}[n(3)], nil, nil)
		default:
			p.same("GET", "/workers", nil, nil)
		}
	}
	t.Logf("%d steps", p.steps)
}

// TestSelectionService sends random histories to both selection services, with workers of several ranks that hold
// blocks on devices, in host memory and on disk. Dynamo breaks ties at random, so kvatlas's request is pinned to
// Dynamo's choice. The cost of this choice must be the least cost of kvatlas.
func TestSelectionService(t *testing.T) { selectionHistories(t, nil) }

// TestSelectionServiceCredits is TestSelectionService with other credits of tiers: blocks on disk count more than
// blocks in host memory.
func TestSelectionServiceCredits(t *testing.T) {
	selectionHistories(t, map[string]float64{"overlap_score_credit": 1.3, "host_cache_hit_weight": 0.4,
		"disk_cache_hit_weight": 0.9})
}

// selectionHistories gives both services the same constants of the cost.
func selectionHistories(t *testing.T, constants map[string]float64) {
	variables := map[string]string{"overlap_score_credit": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
		"host_cache_hit_weight": "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
		"disk_cache_hit_weight": "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT"}
	var own bytes.Buffer
	var environment []string
	for name, v := range constants {
		fmt.Fprintf(&own, "%s: %v\n", name, v)
		environment = append(environment, fmt.Sprint(variables[name], "=", v))
	}
	file := filepath.Join(t.TempDir(), "routing.yaml")
	if err := os.WriteFile(file, own.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	x := harness.StartIndexer(t, t.TempDir(), "", "--select-listen", "127.0.0.1:0", "--on-engine-refused", "keep",
		"--routing-config", file)
	p := &pair{t: t, dynamo: service(t, environment, "dynamo.select_service", "--threads", "1"),
		ours: x.WaitFor(`the selection service is served" listen=(\S+)`)[1], rng: rand.New(rand.NewPCG(*seed, 2))}
	type of = map[string]any
	n := p.rng.IntN
	const size = 16
	const ranks = 2
	var engines [3][ranks]*pyenv.Publisher
	for i := range engines {
		for r := range ranks {
			engines[i][r] = pyenv.StartPublisher(t, pyenv.PublisherOptions{BlockSize: size, Rank: r})
		}
	}
	// tokens returns a prompt from a few families; rank r of engine i holds i+r+1 blocks of family i on the device, the
	// next r+1 blocks in host memory, and the next block on disk; several ranks hold equal prefixes of family 3
	tokens := func() []uint32 {
		list := harness.Tokens(n(4), 1+n(9*size))
		for i := range list[:n(2)*len(list)/2] {
			list[len(list)-1-i] += uint32(n(2))
		}
		return list
	}
	hints := func(i int) of { // a random role, and control endpoints of random ranks
		endpoints := of{}
		for r := range n(ranks + 1) {
			endpoints[fmt.Sprint(r)] = []string{fmt.Sprintf("tcp://w%d:%d", i, 7000+r), ""}[n(8)/7]
		}
		return of{"router_hint_worker_type": []string{"aggregated", "aggregated", "prefill", ""}[n(8)/2],
			"router_hint_source_control_endpoints": endpoints,
			"kv_event_source_mode":                 []string{"zmq", "state_agent_v2"}[n(8)/7]}
	}
	worker := func(i int) of {
		endpoints := of{}
		for r, e := range engines[i] {
			endpoints[fmt.Sprint(r)] = e.Endpoint
		}
		w := of{"worker_id": i, "model_name": "m", "endpoint": fmt.Sprint("http://w", i), "block_size": size,
			"data_parallel_size": ranks, "kv_events_endpoints": endpoints, "max_num_batched_tokens": 8192,
			"total_kv_blocks": 1000}
		maps.Copy(w, hints(i))
		return w
	}
	for i := range engines {
		w := worker(i)
		p.same("POST", "/workers", w, w)
		for r, e := range engines[i] {
			e.WaitSubscribers(2)
			e.Publish(pyenv.Event{Op: "store", Tokens: harness.Tokens(3, (3+(i+r)%2)*size), Medium: "GPU"})
			at, last := 0, (*uint64)(nil)
			for _, tier := range []struct {
				medium string
				blocks int
			}{{"GPU", i + r + 1}, {"CPU", r + 1}, {"DISK", 1}} {
				all := harness.Tokens(i, (at+tier.blocks)*size)
				_, names := e.Publish(pyenv.Event{Op: "store", Tokens: all[at*size:], Parent: last, Medium: tier.medium})
				at, last = at+tier.blocks, &names[0][tier.blocks-1]
			}
		}
	}
	for i := range engines { // wait until both services have the events
		q := of{"model_name": "m", "token_ids": harness.Tokens(i, 9*size)}
		rows := func(base string) string {
			var a struct {
				Workers []struct {
					Worker int `json:"worker_id"`
					Device int `json:"device_blocks"`
					Host   int `json:"host_pinned_blocks"`
					Disk   int `json:"disk_blocks"`
				}
			}
			if _, text := p.ask(base, "POST", "/overlap_scores", q); json.Unmarshal([]byte(text), &a) != nil {
				return text
			}
			list := []string{}
			for _, w := range a.Workers {
				if w.Worker == i {
					list = append(list, fmt.Sprint(w.Device, w.Host, w.Disk))
				}
			}
			return strings.Join(list, "; ")
		}
		want := fmt.Sprintf("%d %d %d; %d %d %d", i+1, i+2, i+3, i+2, i+4, i+5)
		for deadline := time.Now().Add(harness.Patience); ; time.Sleep(10 * time.Millisecond) {
			a, b := rows(p.dynamo), rows(p.ours)
			if a == want && b == want {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("the events do not arrive: Dynamo %s, ours %s, want %s", a, b, want)
			}
		}
	}
	least := func(q of, chosen string) { // checks that the chosen worker has the least cost
		var c struct {
			Worker int `json:"worker_id"`
			Rank   int `json:"dp_rank"`
		}
		if err := json.Unmarshal([]byte(chosen), &c); err != nil {
			t.Fatal(err)
		}
		own := of{"model": "m", "tokens": q["token_ids"], "advisory": true, "policy": "dynamo"}
		if q["allowed_worker_ids"] != nil {
			own["workers"] = []string{fmt.Sprint(c.Worker)}
			for _, w := range q["allowed_worker_ids"].([]int) {
				own["workers"] = append(own["workers"].([]string), fmt.Sprint(w))
			}
		}
		var cost [2]float64
		for i := range cost {
			var a struct{ Cost float64 }
			status, text := p.ask(x.HTTP, "POST", "/v1/select", own)
			if status != 200 || json.Unmarshal([]byte(text), &a) != nil {
				t.Fatalf("select: %d %s", status, text)
			}
			cost[i] = a.Cost
			own["pinned_worker"] = of{"worker": fmt.Sprint(c.Worker), "rank": c.Rank}
		}
		if math.Abs(cost[0]-cost[1]) > 1e-9 {
			t.Fatalf("step %d: Dynamo chose %d, which costs %g; the least is %g", p.steps, c.Worker, cost[1], cost[0])
		}
	}
	hinted := 0
	used := map[string]bool{} // an id of a selection is not booked directly later: see DIFFERENCES.md
	for p.steps < 10_000 {
		prompt := tokens()
		q := of{"model_name": "m", "token_ids": prompt}
		id := fmt.Sprint("s", n(60))
		switch k := n(100); {
		case k < 35:
			path, short := "/select", n(3) == 0 // a short request has an id of its own and ends at once
			if short {
				id = fmt.Sprint("short", p.steps)
			}
			if q["selection_id"] = id; short || n(3) > 0 && !used[id] {
				path = "/select_and_reserve"
			} else {
				used[id] = true
			}
			if n(2) == 0 {
				q["allowed_worker_ids"] = []int{n(4)}
			}
			p.steps++
			status, reply := p.ask(p.dynamo, "POST", path, q)
			if status == 200 {
				least(q, reply)
				var c of
				json.Unmarshal([]byte(reply), &c)
				if c["kv_hint"] != nil {
					hinted++
				}
				q["pinned_worker"] = of{"worker_id": c["worker_id"], "dp_rank": c["dp_rank"]}
			}
			p.equal("POST", path, q, status, reply)
			if short {
				p.same("DELETE", "/reservations/"+id, nil, nil)
			}
		case k < 42:
			b := of{"model_name": "m", "selection_id": id}
			if status, _ := p.same("POST", "/reservations", b, b); status == 201 {
				delete(used, id)
			}
		case k < 50:
			b := of{"model_name": "m", "selection_id": id, "worker_id": n(4), "token_ids": prompt, "dp_rank": n(2*ranks+1) / 2,
				"effective_prefill_tokens": n(len(prompt) + 3)}
			p.same("POST", "/reservations", b, b)
			delete(used, id)
		case k < 58:
			p.same("POST", "/reservations/"+id+"/prefill_complete", of{}, of{})
		case k < 66:
			b := of{}
			if n(2) == 0 {
				b["decay_fraction"] = float64(n(6)) / 4
			}
			p.same("POST", "/reservations/"+id+"/output_block", b, b)
		case k < 80:
			p.same("DELETE", "/reservations/"+id, nil, nil)
		case k < 88:
			p.same("GET", "/loads", nil, nil)
		case k < 93:
			p.same("POST", "/potential_loads", q, q)
		case k < 97:
			p.same("POST", "/overlap_scores", q, q)
		case k < 99:
			p.same("GET", []string{"/workers", "/ready"}[n(2)], nil, nil)
		default:
			c := of{"max_num_batched_tokens": 1000 + n(9000), "total_kv_blocks": 1 + n(2000)}
			i := n(4)
			if n(2) == 0 {
				maps.Copy(c, hints(i))
			}
			p.same("PATCH", fmt.Sprint("/workers/", i), c, c)
		}
	}
	if hinted < 20 {
		t.Errorf("%d replies of Dynamo have a kv_hint", hinted)
	}
	t.Logf("%d steps, %d hints", p.steps, hinted)
}
