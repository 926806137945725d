package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// pair is a router of the pools of a model. It chooses rank 0 of decode, and a rank of prefill.
type pair struct {
	*world
	rank  events.Rank // of prefill
	alone bool        // there is no prefill worker
}

func (p *pair) Select(ctx context.Context, r *api.SelectRequest) (*api.Selection, error) {
	p.say("disaggregated %v optional %v", r.Disaggregated, r.PrefillOptional)
	at := p.pool.Rank(events.RankKey{Instance: "decode"})
	out := &api.Selection{Model: "m", ISLTokens: 7, Worker: at.Instance, Endpoint: at.Record.Endpoint,
		EffectivePrefillTokens: 5}
	if at := p.pool.Rank(events.RankKey{Instance: "prefill", Rank: p.rank}); at != nil && r.Disaggregated && !p.alone {
		out.Prefill = &api.Selection{Model: "m", Worker: at.Instance, Rank: at.Rank, Endpoint: at.Record.Endpoint}
	}
	return out, nil
}

func newPair(rank events.Rank, bootstrap uint32) *pair {
	p := &pair{world: newWorld(), rank: rank}
	p.pool = &registry.Pool{Model: "m"}
	for _, role := range []api.Role{api.RoleDecode, api.RoleEncode, api.RolePrefill} {
		for rank := range events.Rank(2) {
			record := &api.WorkerRecord{State: api.WorkerSchedulable}
			record.Role, record.Endpoint = role, fmt.Sprintf("http://[fd00::%d]:8000", 1+len(p.pool.Ranks)/2)
			if role == api.RolePrefill {
				record.BootstrapPort = bootstrap
			}
			p.pool.Ranks = append(p.pool.Ranks, registry.PoolRank{
				RankKey: events.RankKey{Instance: events.WorkerID(role), Rank: rank}, BlockSize: 16, Record: record})
		}
	}
	return p
}

// serve plays the messages of a stream, and returns the replies.
func (p *pair) serve(t *testing.T, send ...string) (replies []*extprocv3.ProcessingResponse) {
	t.Helper()
	c := p.config()
	c.Select = p.Select
	return p.serveWith(t, c, send...)
}

// serveWith is serve with another configuration.
func (p *pair) serveWith(t *testing.T, c Config, send ...string) (replies []*extprocv3.ProcessingResponse) {
	t.Helper()
	err := New(c).Process(&recorded{script{t: t, w: p.world, send: send}, &replies})
	if err != nil {
		t.Fatal(err)
	}
	return replies
}

// recorded is a script that keeps the replies.
type recorded struct {
	script
	replies *[]*extprocv3.ProcessingResponse
}

func (r *recorded) Send(m *extprocv3.ProcessingResponse) error {
	*r.replies = append(*r.replies, m)
	return nil
}

// mutation returns the headers that the replies set and remove, and the request's new body.
func mutation(replies []*extprocv3.ProcessingResponse) (set map[string]string, removed []string, body []byte) {
	set = map[string]string{}
	for _, r := range replies {
		c := r.GetRequestBody().GetResponse()
		if c == nil {
			c = r.GetRequestHeaders().GetResponse()
		}
		for _, h := range c.GetHeaderMutation().GetSetHeaders() {
			if h.AppendAction != corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD {
				h.Header.Key += " appended"
			}
			set[h.Header.Key] = string(h.Header.RawValue)
		}
		removed = append(removed, c.GetHeaderMutation().GetRemoveHeaders()...)
		body = append(append(body, c.GetBodyMutation().GetBody()...),
			c.GetBodyMutation().GetStreamedResponse().GetBody()...)
	}
	return set, removed, body
}

// TestPrefillWorker: the proxy receives the prefill worker in the header of llm-d's sidecar, in all body modes. Headers
// of clients for the sidecar are removed.
func TestPrefillWorker(t *testing.T) {
	const body = `body {"model":"m","prompt":[1,2]}`
	for name, send := range map[string][]string{
		"buffered": {"headers buffered", body, "response", "response-body x end"},
		"duplex":   {"headers duplex", body + " end", "response", "response-body x end"},
	} {
		for rank := range events.Rank(2) {
			p := newPair(rank, 0)
			set, removed, _ := mutation(p.serve(t, send...))
			if got := set[prefiller]; got != "[fd00::3]:8000" || set[destination] != "[fd00::1]:8000" {
				t.Errorf("%s: the headers are %q", name, set)
			}
			// The sidecar sends the header to both servers, so their ranks must be equal.
			if _, has := set[dataParallelRank]; has != (rank == 0) {
				t.Errorf("%s: prefill rank %d: the headers are %q", name, rank, set)
			}
			for _, header := range []string{"x-prefiller-host-port", "x-encoder-hosts-ports", "x-data-parallel-host-port",
				"x-kv-cache-source-host-port"} {
				if !slices.Contains(removed, header) {
					t.Errorf("%s: a client may set %s", name, header)
				}
			}
			want := []string{"disaggregated true optional true", "prefill complete r1", "free r1"}
			if !slices.Equal(p.log, want) {
				t.Errorf("%s: %q, want %q", name, p.log, want)
			}
		}
	}
}

// TestRequestsWithOneWorker: requests without a generated text and fleets without a decode worker need no prefill
// worker. The header of a client is removed from them too.
func TestRequestsWithOneWorker(t *testing.T) {
	for path, want := range map[string]bool{"/v1/completions": true, "/v1/chat/completions": true, "/v1/responses": true,
		"/v1/messages": true, "/v1/embeddings": false, "/v1/score": false, "/v1/rerank": false} {
		p := newPair(0, 0)
		p.alone = true
		_, removed, _ := mutation(p.serve(t, "headers buffered "+path, `body {"model":"m","input":"x","messages":[]}`))
		if got := p.log[len(p.log)-2]; got != fmt.Sprintf("disaggregated %v optional %[1]v", want) ||
			!slices.Contains(removed, prefiller) {
			t.Errorf("%s: %q, removed %q", path, p.log, removed)
		}
		p.pool.Ranks = p.pool.Ranks[2:]
		p.pool.Ranks[0].Record.Role, p.pool.Ranks[0].Instance = api.RoleAggregated, "decode"
		p.pool, p.log = &registry.Pool{Model: "m", Ranks: p.pool.Ranks}, nil
		p.serve(t, "headers buffered "+path, `body {"model":"m","input":"x","messages":[]}`)
		if got := p.log[len(p.log)-2]; got != "disaggregated false optional false" {
			t.Errorf("%s without decode workers: %q", path, p.log)
		}
	}
	p := newPair(0, 0)
	for range 20 {
		set, _, _ := mutation(p.serve(t, "headers buffered end"))
		if set[destination] != "[fd00::1]:8000" {
			t.Fatalf("a request without a body goes to %s, which only computes parts", set[destination])
		}
	}
}

// TestBootstrap: the body has SGLang's fields in place of the client's, and its other fields.
func TestBootstrap(t *testing.T) {
	for rank := range events.Rank(2) {
		for _, test := range []struct{ body, rest, host, port string }{
			{`{"model":"m","prompt":[1,2],"bootstrap_room":7,"bootstrap_host":"evil"}`, `"model":"m","prompt":[1,2]`,
				`"fd00::3"`, `8998`},
			{`{}`, ``, `"fd00::3"`, `8998`},
			{`{"a":NaN,"prompt":["x","y"],"b":"\u00e9}"}`, `"a":NaN,"prompt":["x","y"],"b":"\u00e9}"`,
				`["fd00::3","fd00::3"]`, `[8998,8998]`},
			{`{"prompt":[[1],[2],[3]]}`, `"prompt":[[1],[2],[3]]`, `["fd00::3","fd00::3","fd00::3"]`, `[8998,8998,8998]`},
		} {
			for _, mode := range []string{"headers buffered /v1/completions", "headers duplex /v1/completions"} {
				p := newPair(rank, 8998)
				set, _, got := mutation(p.serve(t, mode, "body "+test.body+" end"))
				if n := set["content-length"]; n != fmt.Sprint(len(got)) {
					t.Errorf("%s: content-length is %q for %d bytes, which Envoy refuses", mode, n, len(got))
				}
				head, room, ok := strings.Cut(string(got), `"bootstrap_room":`)
				if want := strings.TrimPrefix("{"+test.rest+`,"bootstrap_host":`+test.host+`,"bootstrap_port":`+test.port+`,`,
					"{,"); !ok || strings.TrimPrefix(head, "{") != strings.TrimPrefix(want, "{") {
					t.Errorf("%s: %s\nbecomes %s", mode, test.body, got)
				}
				var rooms []uint64
				room = strings.TrimSuffix(room, "}")
				if !strings.HasPrefix(room, "[") {
					room = "[" + room + "]"
				}
				if err := json.Unmarshal([]byte(room), &rooms); err != nil || len(rooms) == 0 ||
					len(rooms) != len(slices.Compact(slices.Sorted(slices.Values(rooms)))) {
					t.Errorf("%s: the rooms are %s: %v", mode, room, err)
				}
				for _, r := range rooms {
					if r >= 1<<63 || r%2 != uint64(rank) {
						t.Errorf("%s: room %d does not lead to rank %d of 2", mode, r, rank)
					}
				}
			}
		}
	}
}

// TestMovedPair: a request with a prefill worker that another worker answers has no prefill there.
func TestMovedPair(t *testing.T) {
	p := newPair(0, 0)
	p.serve(t, "headers buffered", `body {"model":"m","prompt":[1,2]}`, "response [fd00::2]:8000")
	want := []string{"disaggregated true optional true", "decode: refused", "moved m", "free r1",
		"book r2 at encode/0 prefill 0 of 7", "free r2"}
	if !slices.Equal(p.log, want) {
		t.Errorf("%q, want %q", p.log, want)
	}
}
