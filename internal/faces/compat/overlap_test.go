package compat

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// overlapping is a fake indexer with a fixed answer.
type overlapping struct {
	Server
	answer *api.Answer
	asked  *api.Query
}

func (o *overlapping) Find(_ context.Context, q *api.Query) (*api.Answer, error) {
	o.asked = q
	return o.answer, nil
}

// TestOverlapScores compares a reply with the form of ai-dynamo-runtime 1.6.1. The last row is an observed reply.
func TestOverlapScores(t *testing.T) {
	x := &overlapping{answer: &api.Answer{Model: "m:g", BlockSize: 16, Blocks: 8, Complete: true, Workers: []api.Overlap{
		{Instance: "w", Rank: 1, Device: 0, Host: 0, External: 2},
		{Instance: "10", Rank: 0, Device: 3, Host: 2, Disk: 1, External: 1},
		{Instance: "9", Rank: 0}},
		L3: api.L3{Status: api.L3OK, Ranges: [][2]uint32{{0, 2}, {4, 7}}, Total: 5}}}
	h := web.NewMux()
	Register(h, Config{Server: x, Shims: NewShims(nil, nil, "one", Engines{}, nil)})
	post := func(body string) *httptest.ResponseRecorder {
		r, w := httptest.NewRequest("POST", "/overlap_scores", strings.NewReader(body)), httptest.NewRecorder()
		r.Header.Set("Content-Type", api.JSON)
		h.ServeHTTP(w, r)
		return w
	}
	want := `{"block_size":16,"num_blocks":8,"workers":[` +
		`{"worker_id":9,"dp_rank":0,"device_blocks":0,"host_pinned_blocks":0,"disk_blocks":0,` +
		`"host_pinned_extension_blocks":0,"disk_extension_blocks":0,"shared_beyond_device_blocks":5},` +
		`{"worker_id":10,"dp_rank":0,"device_blocks":3,"host_pinned_blocks":5,"disk_blocks":7,` +
		`"host_pinned_extension_blocks":2,"disk_extension_blocks":2,"shared_beyond_device_blocks":3},` +
		`{"worker_id":"w","dp_rank":1,"device_blocks":0,"host_pinned_blocks":0,"disk_blocks":2,` +
		`"host_pinned_extension_blocks":0,"disk_extension_blocks":2,"shared_beyond_device_blocks":5}],` +
		`"shared_cache":{"enabled":true,"total_hit_blocks":5,"ranges":[[0,2],[4,7]],"error":null}}`
	w := post(`{"model_name":"m","routing_group":"g","block_hashes":[1,2],"sequence_hashes":[3,4],"isl_tokens":40}`)
	if w.Code != 200 || w.Body.String() != want {
		t.Errorf("%d\n%s\n%s", w.Code, w.Body, want)
	}
	if q := x.asked; q.Model != "m:g" || len(q.Hashes) != 2 || !q.Idle {
		t.Errorf("query %+v", q)
	}
	x.answer = &api.Answer{BlockSize: 16, Blocks: 3, Complete: true, L3: api.L3{Status: api.L3Unavailable, Reason: "away"}}
	want = `{"block_size":16,"num_blocks":3,"workers":[],"shared_cache":` +
		`{"enabled":true,"total_hit_blocks":0,"ranges":[],"error":"away"}}`
	if w := post(`{"token_ids":[1]}`); w.Code != 200 || w.Body.String() != want || x.asked.Model != "default" {
		t.Errorf("%d %s; query %+v", w.Code, w.Body, x.asked)
	}
	for body, status := range map[string]int{
		`{}`: 400, `{"token_ids":[1],"block_hashes":[1]}`: 400, `{"token_ids":["x"]}`: 422, `{"token_ids":[1]`: 400,
	} {
		if w := post(body); w.Code != status {
			t.Errorf("%s: %d %s", body, w.Code, w.Body)
		}
	}

	a := &api.Answer{BlockSize: 16, Blocks: 3, Workers: []api.Overlap{{Instance: "1", Device: 1}}}
	text, err := json.Marshal(NewOverlapScores(a, []events.RankKey{{Instance: "2"}, {Instance: "1"}}))
	if want := `{"worker_id":2,"dp_rank":0,"device_blocks":0,"host_pinned_blocks":0,"disk_blocks":0,` +
		`"host_pinned_extension_blocks":0,"disk_extension_blocks":0,"shared_beyond_device_blocks":null}],` +
		`"shared_cache":{"enabled":false,"total_hit_blocks":0,"ranges":[],"error":null}}`; err != nil ||
		!strings.HasSuffix(string(text), want) || strings.Count(string(text), "worker_id") != 2 {
		t.Errorf("%s, %v", text, err)
	}
}

// TestBlocksBeyond compares the result with a count block by block.
func TestBlocksBeyond(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var ranges [][2]uint32
		at := uint32(0)
		for range rng.IntN(4) {
			from := at + rng.Uint32N(4)
			at = from + 1 + rng.Uint32N(4)
			ranges = append(ranges, [2]uint32{from, at})
		}
		depth, want := rng.Uint32N(24), uint32(0)
		for _, r := range ranges {
			for b := r[0]; b < r[1]; b++ {
				if b >= depth {
					want++
				}
			}
		}
		if got := blocksBeyond(ranges, depth); got != want {
			t.Fatalf("%v from %d on: %d, want %d", ranges, depth, got, want)
		}
	}
}
