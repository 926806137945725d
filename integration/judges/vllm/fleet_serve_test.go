//go:build realvllm

package vllm

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// way is how an arm chooses an engine: by a policy of kvatlas, or as a router does without an index.
type way struct {
	name   string
	policy string
	choose func(a *arm, i int) int // with the lock of the arm
}

// ways are all arms.
var ways = []way{
	{name: "kvatlas", policy: "kvatlas"},
	{name: "dynamo", policy: "dynamo"},
	{name: "least-load", choose: leastLoad},
	{name: "round-robin", choose: func(a *arm, _ int) int {
		a.turn++
		return (a.turn - 1) % len(a.at)
	}},
	{name: "random", choose: atRandom},
	{name: "sticky", choose: func(a *arm, i int) int {
		h := fnv.New64a()
		fmt.Fprint(h, "session ", a.prompts[i].session)
		return int(h.Sum64() % uint64(len(a.at)))
	}},
}

func atRandom(a *arm, _ int) int { return a.random.IntN(len(a.at)) }

// leastLoad chooses the engine with the fewest running requests, then the fewest tokens of their prompts.
func leastLoad(a *arm, _ int) (best int) {
	for w := range a.at {
		if a.requests[w] < a.requests[best] || a.requests[w] == a.requests[best] && a.tokens[w] < a.tokens[best] {
			best = w
		}
	}
	return best
}

// arm is a routing method at a rate, with the results of the requests.
type arm struct {
	*fleet
	way    *way
	rate   float64 // requests per second; 0: a calibration
	served []served

	mu       sync.Mutex // guards the following fields
	random   *rand.Rand
	turn     int
	requests []int // under way, by engine
	tokens   []int // of the prompts of running requests
}

// served is the result of a request.
type served struct {
	Arm     string  `json:"arm"`
	Rate    float64 `json:"rate"`
	Request int     `json:"request"`
	Session int     `json:"session"`
	Worker  int     `json:"worker"`
	Tokens  int     `json:"tokens"`
	Said    int     `json:"said_blocks"`   // kvatlas, of the chosen engine
	Reused  int     `json:"reused_tokens"` // by the engine
	Ask     float64 `json:"ask_ms"`        // select, or find for the record
	TTFT    float64 `json:"ttft_ms"`
	End     float64 `json:"end_to_end_ms"`
	Class   class   `json:"class"`

	from, to int // kvatlas's numbers of the engine's events before the query and after the answer
	replied  int // the twin's version when the engine's answer ended
	err      error
}

func (a *arm) prepare() {
	a.served = make([]served, len(a.prompts))
	a.requests, a.tokens = make([]int, len(a.at)), make([]int, len(a.at))
}

// serve chooses an engine for a request, sends the request, and records the result.
func (a *arm) serve(i int) {
	s := &a.served[i]
	*s = served{Arm: a.way.name, Rate: a.rate, Request: i, Session: a.prompts[i].session, Tokens: len(a.prompts[i].tokens)}
	s.err = a.try(i, s)
}

func (a *arm) try(i int, s *served) error {
	before, err := a.known()
	if err != nil {
		return err
	}
	id := fmt.Sprintf("%s-%v-%d", s.Arm, s.Rate, i)
	begun := time.Now()
	if s.Worker, s.Said, err = a.choose(i, id); err != nil {
		return err
	}
	s.Ask = milliseconds(begun)
	if a.way.policy == "" {
		begun = time.Now() // the question was for the record
	}
	var after []int
	var late error
	var asking sync.WaitGroup
	asking.Go(func() { after, late = a.known() })
	err = a.stream(s, i, id, begun)
	asking.Wait()
	a.mu.Lock()
	a.requests[s.Worker]--
	a.tokens[s.Worker] -= s.Tokens
	a.mu.Unlock()
	if err = errors.Join(err, late); err != nil {
		return err
	}
	s.from, s.to = before[s.Worker], after[s.Worker]
	s.replied, _, _ = a.twins[s.Worker].now()
	return nil
}

// choose returns the engine for a request, and kvatlas's number of held leading blocks.
func (a *arm) choose(i int, id string) (w, said int, err error) {
	q := api.Query{Model: a.model.name, Tokens: a.prompts[i].tokens}
	if a.way.policy != "" {
		var chosen api.Selection
		r := api.SelectRequest{Query: q, RequestID: id, Book: true, Policy: a.way.policy,
			ExpectedOutputTokens: uint32(a.output)}
		if err := a.ask("POST", "/v1/select", r, &chosen); err != nil {
			return 0, 0, err
		}
		if !chosen.Complete || !chosen.Booked {
			return 0, 0, fmt.Errorf("the choice is not complete or not booked: %+v", chosen)
		}
		w = slices.IndexFunc(a.at, func(e *engine) bool { return "http://"+e.http == chosen.Endpoint })
		if w < 0 {
			return 0, 0, fmt.Errorf("no engine is at the chosen endpoint %q", chosen.Endpoint)
		}
		said = int(chosen.Device)
	} else {
		var answer api.Answer
		if err := a.ask("POST", "/v1/find", q, &answer); err != nil {
			return 0, 0, err
		}
		if !answer.Complete {
			return 0, 0, fmt.Errorf("the answer is not complete: %+v", answer)
		}
		a.mu.Lock()
		w = a.way.choose(a, i)
		a.mu.Unlock()
		for _, o := range answer.Workers {
			if string(o.Instance) == workerName(w) {
				said = int(o.Device)
			}
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests[w]++
	a.tokens[w] += len(a.prompts[i].tokens)
	return w, said, nil
}

// stream sends a request to the engine, and reports the first token and the end to kvatlas.
func (a *arm) stream(s *served, i int, id string, begun time.Time) (err error) {
	tell := func(what string) {
		if e := a.ask("POST", "/v1/"+what, api.RequestRef{Model: a.model.name, RequestID: id}, nil); err == nil {
			err = e
		}
	}
	if a.way.policy != "" {
		defer tell("free")
	}
	body, err := json.Marshal(map[string]any{
		"model": a.model.name, "prompt": a.prompts[i].tokens, "max_tokens": a.output, "temperature": 0, "ignore_eos": true,
		"stream": true, "stream_options": map[string]any{"include_usage": true},
	})
	if err != nil {
		return err
	}
	r, err := a.clients.engines.Post("http://"+a.at[s.Worker].http+"/v1/completions", "application/json",
		bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer r.Body.Close()
	lines := bufio.NewReader(r.Body)
	for {
		line, err := lines.ReadString('\n')
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if line = strings.TrimSpace(line); line == "" || line == "data: [DONE]" {
			continue
		}
		data, ok := strings.CutPrefix(line, "data: ")
		if r.StatusCode != http.StatusOK || !ok {
			return fmt.Errorf("the engine answers %d %s", r.StatusCode, line)
		}
		var chunk struct {
			Choices []json.RawMessage
			Usage   *struct {
				Prompt  int `json:"prompt_tokens"`
				Details *struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return fmt.Errorf("the engine sends %q: %w", data, err)
		}
		if len(chunk.Choices) > 0 && s.TTFT == 0 {
			if s.TTFT = milliseconds(begun); a.way.policy != "" {
				tell("prefill_complete")
			}
		}
		if u := chunk.Usage; u != nil && u.Prompt != s.Tokens {
			return fmt.Errorf("the engine counts %d tokens, not %d", u.Prompt, s.Tokens)
		} else if u != nil && u.Details != nil {
			s.Reused = u.Details.Cached
		}
	}
	if s.End = milliseconds(begun); s.TTFT == 0 {
		return fmt.Errorf("the engine's answer has no token")
	}
	return err
}

// judge compares kvatlas's answers with the announced events of the engine and with the reuse.
func (a *arm) judge() {
	a.t.Helper()
	a.settle()
	for i := range a.served {
		s := &a.served[i]
		if s.Arm == "" {
			continue // a calibration serves only some of the requests
		}
		if s.err != nil {
			a.t.Errorf("%s, request %d: %v", s.Arm, i, s.err)
			continue
		}
		if s.Reused%a.server.blockSize != 0 {
			a.t.Errorf("%s, request %d: the engine reused %d tokens, not whole blocks", s.Arm, i, s.Reused)
		}
		of := a.twins[s.Worker]
		asked := a.prompts[i].reusable()
		o := observation{request: request{prompt: a.prompts[i].prompt}, under: among,
			predicted: min(s.Said, len(asked.tokens)/a.server.blockSize), reused: s.Reused / a.server.blockSize,
			from: of.versionAt(s.from), to: of.versionAfter(s.replied, afterReply)}
		if !of.everUsable(asked, o.from, of.versionAt(s.to), o.predicted) {
			a.t.Errorf("%s, request %d: kvatlas has %d blocks, but engine %d did not announce them with events %d to %d",
				s.Arm, i, s.Said, s.Worker, s.from, s.to)
		}
		if s.Class = classify(of, &o); s.Class == unexplained {
			a.t.Errorf("%s, request %d: kvatlas has %d blocks, engine %d reused %d of %d tokens", s.Arm, i, s.Said, s.Worker,
				s.Reused, s.Tokens)
		}
	}
}

// checkBookings checks that no request is running.
func (a *arm) checkBookings() {
	a.t.Helper()
	var list api.LoadList
	if err := a.ask("GET", "/v1/loads", nil, &list); err != nil {
		a.t.Fatal(err)
	}
	for _, m := range list.Models {
		if m.Requests != 0 {
			a.t.Errorf("%s: %d requests are booked after their end", a.way.name, m.Requests)
		}
	}
}

func milliseconds(since time.Time) float64 {
	return float64(time.Since(since)) / float64(time.Millisecond)
}

// fleetClients have connections enough for all requests under way.
type fleetClients struct{ kvatlas, engines http.Client }

func newFleetClients() fleetClients {
	pool := func() http.RoundTripper {
		// Engines close connections after five idle seconds.
		return &http.Transport{MaxIdleConnsPerHost: 1024, IdleConnTimeout: 2 * time.Second}
	}
	return fleetClients{http.Client{Transport: pool(), Timeout: harness.Patience}, http.Client{Transport: pool()}}
}

// ask sends a request to kvatlas once.
func (f *fleet) ask(method, path string, body, into any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	r, err := http.NewRequest(method, "http://"+f.indexer.HTTP+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	answer, err := f.clients.kvatlas.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %d %s", path, answer.StatusCode, b)
	}
	if err != nil || into == nil {
		return err
	}
	return json.Unmarshal(b, into)
}
