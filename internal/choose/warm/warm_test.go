package warm

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var seed = flag.Uint64("seed", 1, "of random tests")

// TestPrompts offers random prompts: the memory stays within the limit, a kept prompt has the offered tokens, and no
// refused prompt has a larger saving than a kept prompt.
func TestPrompts(t *testing.T) {
	for round := range uint64(testkit.Rounds(100)) {
		rng := rand.New(rand.NewPCG(*seed, round))
		const length = 64
		room := 1 + rng.IntN(8)
		p := NewPrompts(room * (promptBytes + 4*length))
		saved := map[Key]float64{}
		tokens := func(k Key) (list []uint32) {
			for i := range uint32(length) {
				list = append(list, uint32(k.Hash)*1000+i)
			}
			return list
		}
		for range 60 {
			key := Key{"m", events.SeqHash(rng.IntN(20))}
			ms := rng.Float64()
			if _, kept := p.Get(key); !kept {
				delete(saved, key)
			}
			p.Offer(key, &Prompt{Tokens: tokens(key)}, ms)
			if prompt, kept := p.Get(key); kept {
				if saved[key] = ms; fmt.Sprint(prompt.Tokens) != fmt.Sprint(tokens(key)) {
					t.Fatalf("round %d: other tokens", round)
				}
			} else {
				for other, least := range saved {
					if _, kept := p.Get(other); kept && least < ms {
						t.Fatalf("round %d: %v is refused beside a smaller saving of %v", round, ms, least)
					}
				}
			}
			if len(p.byHash) > room || p.Bytes() > room*(promptBytes+4*length) ||
				p.Bytes() != len(p.byHash)*(promptBytes+4*length) {
				t.Fatalf("round %d: %d prompts and %d bytes with room for %d", round, len(p.byHash), p.Bytes(), room)
			}
		}
	}
	var none *Prompts
	none.Offer(Key{}, &Prompt{}, 1)
	if _, kept := none.Get(Key{}); kept || none.Bytes() != 0 {
		t.Error("a store without memory keeps a prompt")
	}
}

// TestComplete sends prompts to an engine, and checks the requests, the addresses, the rule and the errors.
func TestComplete(t *testing.T) {
	var got completion
	var rank string
	status := http.StatusOK
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = completion{}
		if r.URL.Path != "/v1/completions" || json.NewDecoder(r.Body).Decode(&got) != nil {
			status = http.StatusBadRequest
		}
		rank = r.Header.Get(rankHeader)
		w.WriteHeader(status)
		fmt.Fprint(w, strings.Repeat("secret words ", 10_000))
	}))
	defer engine.Close()
	e := NewEngines(nil)
	prompt := &Prompt{Tokens: []uint32{1, 2, 3}, Salt: "s"}
	for _, endpoint := range []string{engine.URL, engine.URL + "/", engine.URL + "/v1", strings.TrimPrefix(engine.URL, "http://")} {
		if err := e.Complete(t.Context(), Target{Endpoint: endpoint, Model: "m"}, prompt); err != nil {
			t.Fatalf("%s: %v", endpoint, err)
		}
		if fmt.Sprint(got) != "{m [1 2 3] 1 s}" || rank != "" {
			t.Fatalf("%s: request %v, rank %q", endpoint, got, rank)
		}
	}
	at := events.Rank(3)
	if err := e.Complete(t.Context(), Target{engine.URL, "m", &at}, &Prompt{Tokens: []uint32{9}, LoRA: "l"}); err != nil ||
		fmt.Sprint(got) != "{l [9] 1 }" || rank != "3" {
		t.Fatalf("request %v, rank %q, %v", got, rank, err)
	}
	status = http.StatusInternalServerError
	err := e.Complete(t.Context(), Target{Endpoint: engine.URL}, prompt)
	if err == nil || !strings.Contains(err.Error(), "500") || strings.Contains(err.Error(), "secret") {
		t.Errorf("status 500: %v", err)
	}
	for _, bad := range []string{"grpc://127.0.0.1:1", "", "http://169.254.169.254:80", "http://a b"} {
		if err := e.Complete(t.Context(), Target{Endpoint: bad}, prompt); err == nil {
			t.Errorf("%q is used as an address", bad)
		}
	}
	rule, err := dial.NewRule([]string{"10.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}
	if err := NewEngines(rule).Complete(t.Context(), Target{Endpoint: engine.URL}, prompt); err == nil {
		t.Error("an address outside the rule is used")
	}
	for range mostAnswers {
		e.slots <- struct{}{}
	}
	if err := e.Complete(context.Background(), Target{Endpoint: engine.URL}, prompt); err != ErrBusy {
		t.Errorf("a fifth request: %v", err)
	}
}
