package compat

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// planeRouter records its requests.
type planeRouter struct {
	api.Router
	asked string
}

func (r *planeRouter) Select(_ context.Context, q *api.SelectRequest) (*api.Selection, error) {
	r.asked = "select " + q.Model
	if q.Tokens != nil {
		r.asked += fmt.Sprint(" tokens=", len(q.Tokens))
	} else {
		r.asked += fmt.Sprintf(" hashes=%v isl=%d", []uint64(q.Hashes), q.ISLTokens)
	}
	for _, f := range []struct {
		name string
		set  bool
		v    any
	}{{"lora", q.LoRA != "", q.LoRA}, {"salt", q.CacheSalt != "", q.CacheSalt},
		{"required", q.RequiredTaints != nil, q.RequiredTaints}, {"preferred", q.PreferredTaints != nil,
			q.PreferredTaints}, {"book", q.Book, q.RequestID}, {"strict", q.StrictPriority > 0, q.StrictPriority},
		{"jump", q.PriorityJump != 0, q.PriorityJump}} {
		if f.set {
			r.asked += fmt.Sprintf(" %s=%v", f.name, f.v)
		}
	}
	if q.StrictPriority == 429 {
		err := api.Errorf(api.CodeOverloaded, "all are busy")
		err.Queue = &api.QueueRefusal{Reason: "raw_tokens", Class: "default", Limit: 100, Current: 99}
		return nil, err
	}
	s := &api.Selection{Worker: "7", Rank: 1, EffectiveOverlap: 2.5, Device: 2, RequiredBlocks: 9}
	if len(q.Tokens) == 2 {
		s.Worker = "18446744073709551615"
	}
	return s, nil
}

func (r *planeRouter) step(op string, ref *api.RequestRef) error {
	r.asked = op + " " + ref.Model + " " + ref.RequestID
	if ref.RequestID == "unknown" {
		return api.Errorf(api.CodeUnknownRequest, "it is not known")
	}
	return nil
}

func (r *planeRouter) PrefillComplete(_ context.Context, ref *api.RequestRef) error {
	return r.step("prefill_complete", ref)
}

func (r *planeRouter) Free(_ context.Context, ref *api.RequestRef) error { return r.step("free", ref) }

func (r *planeRouter) PotentialLoads(_ context.Context, q *api.PotentialRequest) (*api.PotentialList, error) {
	r.asked = fmt.Sprintf("potential_loads %s tokens=%d lora=%s", q.Model, len(q.Tokens), q.LoRA)
	return &api.PotentialList{Ranks: []api.PotentialLoad{
		{Worker: "7", PotentialPrefillTokens: 3, PotentialDecodeBlocks: 4, ActiveRequests: 5},
		{Worker: "18446744073709551615", Rank: 1, PotentialPrefillTokens: 6, PotentialDecodeBlocks: 7}, {Worker: "w"},
	}}, nil
}

func plane() (*Plane, *planeRouter) {
	r := &planeRouter{}
	return &Plane{Router: r, BlockSize: func(string) uint32 { return 2 }}, r
}

// TestPlane plays the transcript testdata/plane.txt.
func TestPlane(t *testing.T) {
	text, err := os.ReadFile("testdata/plane.txt")
	if err != nil {
		t.Fatal(err)
	}
	p, router := plane()
	var asked, reply string
	requests := 0
	for n, line := range strings.Split(string(text), "\n") {
		verb, rest, _ := strings.Cut(line, " ")
		switch verb {
		case "", "#":
		case "<":
			if reply != rest {
				t.Errorf("line %d: %s\nwant %s", n+1, reply, rest)
			}
		case "=":
			if asked != rest {
				t.Errorf("line %d: the router is asked %s, want %s", n+1, asked, rest)
			}
		default:
			requests++
			requestID := ""
			if id, body, named := strings.Cut(rest, " "); named && strings.HasPrefix(id, "id=") {
				requestID, rest = id[len("id="):], body
			}
			var body []byte
			if verb == "select" {
				body, _ = p.Select(t.Context(), "m", []byte(rest))
			} else {
				body, _ = p.Answer(t.Context(), "m", requestID, []byte(rest))
			}
			reply, asked, router.asked = string(body), router.asked, ""
		}
	}
	if requests < 20 {
		t.Errorf("%d requests", requests)
	}
}

// FuzzPlane checks that every request has a single JSON reply: an error, or the form of the method.
func FuzzPlane(f *testing.F) {
	text, err := os.ReadFile("testdata/plane.txt")
	if err != nil {
		f.Fatal(err)
	}
	for _, line := range strings.Split(string(text), "\n") {
		if at := strings.IndexByte(line, '{'); at > 0 && line[0] != '<' {
			f.Add([]byte(line[at:]))
		}
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		p, router := plane()
		for name, answer := range map[string]func() ([]byte, *api.Error){
			"generate": func() ([]byte, *api.Error) { return p.Answer(context.Background(), "m", "r", body) },
			"select":   func() ([]byte, *api.Error) { return p.Select(context.Background(), "m", body) },
		} {
			router.asked = ""
			reply, failed := answer()
			var out struct {
				Error  *api.Error       `json:"error"`
				Worker *json.RawMessage `json:"worker_id"`
				Method string           `json:"method"`
			}
			if err := json.Unmarshal(reply, &out); err != nil {
				t.Fatalf("%s: %s: %v", name, reply, err)
			}
			if (out.Error != nil) != (failed != nil) || failed == nil && router.asked == "" ||
				failed == nil && out.Worker == nil && out.Method == "" {
				t.Fatalf("%s: %s, %v, the router is asked %q", name, reply, failed, router.asked)
			}
		}
	})
}
