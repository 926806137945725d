// Package openaisim simulates the HTTP side of an engine, for tests of gateways and demonstrations: completions and
// chats as OpenAI has them, streamed or not, with how much of the prompt it had cached. It computes nothing.
//
//	e, err := openaisim.Start("127.0.0.1:0", openaisim.Options{Model: "sim", BlockSize: 16, Tokens: 4})
//	defer e.Kill()
package openaisim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// Options are an engine's.
type Options struct {
	Model     string
	BlockSize int           // tokens, or bytes of text, that are cached together
	Tokens    int           // of each answer
	Delay     time.Duration // before each of them
}

// Engine is a running one.
type Engine struct {
	Options
	Addr   string
	server *http.Server

	mu     sync.Mutex
	cached map[string]bool // prefixes of prompts in whole blocks
	begun  map[string]bool // X-Test-Ids of requests whose answers have begun
}

// Start runs an engine until it is killed.
func Start(listen string, o Options) (*Engine, error) {
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, err
	}
	e := &Engine{Options: o, Addr: l.Addr().String(), cached: map[string]bool{}, begun: map[string]bool{}}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/completions", e.complete)
	mux.HandleFunc("POST /v1/chat/completions", e.complete)
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"object":"list","data":[{"id":%q,"object":"model"}]}`, o.Model)
	})
	e.server = &http.Server{Handler: mux}
	go e.server.Serve(l)
	return e, nil
}

// Kill ends it as a crash would: connections break.
func (e *Engine) Kill() { e.server.Close() }

// Begun reports whether it has begun to answer the request of an X-Test-Id.
func (e *Engine) Begun(id string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.begun[id]
}

// begin notes that an answer begins.
func (e *Engine) begin(r *http.Request) {
	if id := r.Header.Get("X-Test-Id"); id != "" {
		e.mu.Lock()
		e.begun[id] = true
		e.mu.Unlock()
	}
}

// compute is how many units a prompt has, tokens or bytes of text, and how many of them were cached. Afterwards all
// are.
func (e *Engine) compute(prompt json.RawMessage) (all, cached int) {
	units := []string{}
	var tokens []uint32
	if json.Unmarshal(prompt, &tokens) == nil {
		for _, t := range tokens {
			units = append(units, fmt.Sprint(t, " "))
		}
	} else {
		for _, b := range prompt {
			units = append(units, string(rune(b)))
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	prefix := ""
	for at := 0; at+e.BlockSize <= len(units); at += e.BlockSize {
		for _, u := range units[at : at+e.BlockSize] {
			prefix += u
		}
		if e.cached[prefix] {
			cached = at + e.BlockSize
		}
		e.cached[prefix] = true
	}
	return len(units), cached
}

func (e *Engine) complete(w http.ResponseWriter, r *http.Request) {
	var q struct {
		Model            string
		Prompt, Messages json.RawMessage
		Stream           bool
	}
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(body, &q)
	}
	if err != nil || q.Model != e.Model {
		http.Error(w, fmt.Sprintf(`{"error":{"message":"model %q: %v"}}`, q.Model, err), http.StatusBadRequest)
		return
	}
	prompt := q.Prompt
	if prompt == nil {
		prompt = bytes.TrimSuffix(q.Messages, []byte("]"))
	}
	all, cached := e.compute(prompt)
	usage := fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}`, all,
		e.Tokens, cached)
	w.Header().Set("X-Engine", e.Addr)
	out := http.NewResponseController(w)
	if q.Stream {
		w.Header().Set("Content-Type", "text/event-stream")
	} else {
		w.Header().Set("Content-Type", "application/json")
	}
	for range e.Tokens {
		select {
		case <-time.After(e.Delay):
		case <-r.Context().Done():
			return
		}
		if q.Stream {
			e.begin(r)
			fmt.Fprint(w, "data: {\"choices\":[{\"index\":0,\"text\":\"x\"}]}\n\n")
			if out.Flush() != nil {
				return
			}
		}
	}
	e.begin(r)
	if q.Stream {
		fmt.Fprintf(w, "data: {\"choices\":[],\"usage\":%s}\n\ndata: [DONE]\n\n", usage)
	} else {
		fmt.Fprintf(w, `{"choices":[{"index":0,"text":"x"}],"usage":%s}`, usage)
	}
}
