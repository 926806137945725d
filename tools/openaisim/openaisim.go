// Package openaisim simulates the HTTP API of an engine for tests of gateways and demonstrations: completions, chats,
// Responses, Messages, embeddings, scores and reranking, with and without streams, the number of cached prompt tokens,
// and the tokens of a text. By default, a word is a token. All tokens of an answer are the same word.
//
//	e, err := openaisim.Start("127.0.0.1:0", openaisim.Options{Model: "sim", BlockSize: 16, Tokens: 4})
//	defer e.Kill()
package openaisim

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// Options are an engine's.
type Options struct {
	Model     string
	BlockSize int           // tokens of a cache block
	Tokens    int           // of an answer
	Delay     time.Duration // before every token of an answer

	// Encode returns the tokens of a text. By default, a word is a token.
	Encode func(text string) []uint32

	// Serve stores a prompt and its answer in the cache and returns the number of the prompt's cached blocks. The method
	// of an [enginesim.Engine] also announces the blocks. The default is a cache without events.
	Serve func(prompt, answer []uint32) (hit int, err error)
}

// Engine is a running engine.
type Engine struct {
	Options
	Addr   string
	server *http.Server

	failure atomic.Int64 // status of all answers to completions; 0: none fails
	failed  atomic.Int64 // number of failed answers

	mu    sync.Mutex
	cache *enginesim.Cache // without Serve
	begun map[string]bool  // X-Test-Ids of requests with a started answer
}

// capacity is how many blocks are cached without Serve.
const capacity = 1 << 20

// Start runs an engine until Kill.
func Start(listen string, o Options) (*Engine, error) {
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, err
	}
	e := &Engine{Options: o, Addr: l.Addr().String(), cache: enginesim.NewCache(capacity), begun: map[string]bool{}}
	if e.Serve == nil {
		e.Serve = e.serve
	}
	if e.Encode == nil {
		e.Encode = words
	}
	mux := http.NewServeMux()
	for _, path := range []string{"completions", "chat/completions", "responses", "messages", "embeddings", "score",
		"rerank"} {
		mux.HandleFunc("POST /v1/"+path, e.complete)
	}
	mux.HandleFunc("POST /tokenize", e.tokenize)
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"object":"list","data":[{"id":%q,"object":"model"}]}`, o.Model)
	})
	e.server = &http.Server{Handler: mux}
	go e.server.Serve(l)
	return e, nil
}

// Kill ends the engine as a crash does: connections break.
func (e *Engine) Kill() { e.server.Close() }

// Fail makes the engine answer completions with an error status; 0 ends that.
func (e *Engine) Fail(status int) { e.failure.Store(int64(status)) }

// Failed returns the number of answers with an error status of Fail.
func (e *Engine) Failed() int { return int(e.failed.Load()) }

// Begun reports whether the answer to the request with an X-Test-Id has started.
func (e *Engine) Begun(id string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.begun[id]
}

// begin records the start of an answer.
func (e *Engine) begin(r *http.Request) {
	if id := r.Header.Get("X-Test-Id"); id != "" {
		e.mu.Lock()
		e.begun[id] = true
		e.mu.Unlock()
	}
}

// serve implements the default cache without events.
func (e *Engine) serve(prompt, answer []uint32) (hit int, err error) {
	names := enginesim.AppendNames([]events.BlockHash(nil), 0, e.BlockSize, append(prompt[:len(prompt):len(prompt)],
		answer...))
	e.mu.Lock()
	defer e.mu.Unlock()
	hit = min(e.cache.Hit(names), len(prompt)/e.BlockSize)
	e.cache.Use(names, nil)
	return hit, nil
}

// word is the token of a word.
func word(s string) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(s)) // never fails
	return h.Sum32() % 128_000
}

// words is the default of [Options].Encode.
func words(text string) (tokens []uint32) {
	for _, w := range strings.Fields(text) {
		tokens = append(tokens, word(w))
	}
	return tokens
}

// read reads a request, and sends the reply for an invalid request.
func (e *Engine) read(w http.ResponseWriter, r *http.Request) (q request, prompts [][]uint32, ok bool) {
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(body, &q)
	}
	q.path = r.URL.Path
	if err == nil {
		prompts, err = e.prompts(&q)
	}
	if err == nil && q.Model != e.Model {
		err = fmt.Errorf("the model %q does not exist; this engine serves %s", q.Model, e.Model)
	}
	if err != nil {
		refuse(w, http.StatusBadRequest, err.Error())
		return q, nil, false
	}
	return q, prompts, true
}

// refuse sends an error in OpenAI's form.
func refuse(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"message": message, "code": status}})
}

// tokenize answers as vLLM does.
func (e *Engine) tokenize(w http.ResponseWriter, r *http.Request) {
	if _, prompts, ok := e.read(w, r); ok {
		prompt := slices.Concat(prompts...)
		_ = json.NewEncoder(w).Encode(map[string]any{"count": len(prompt), "max_model_len": 1 << 20, "tokens": prompt})
	}
}

func (e *Engine) complete(w http.ResponseWriter, r *http.Request) {
	if status := int(e.failure.Load()); status != 0 {
		e.failed.Add(1)
		refuse(w, status, "the engine fails")
		return
	}
	q, prompts, ok := e.read(w, r)
	if !ok {
		return
	}
	tokens := e.Tokens
	if q.is("/embeddings") || q.is("/score") || q.is("/rerank") {
		tokens = 0
	}
	answer := slices.Repeat([]uint32{word("x")}, tokens)
	length, cached := 0, 0
	for _, prompt := range prompts {
		hit, err := e.Serve(prompt, answer)
		if err != nil {
			refuse(w, http.StatusServiceUnavailable, err.Error())
			return
		}
		length, cached = length+len(prompt), cached+hit*e.BlockSize
	}
	form := q.form(length, cached, tokens)
	w.Header().Set("X-Engine", e.Addr)
	if q.Prompt != nil && q.Prompt[0] == '[' {
		w.Header().Set("X-Token-Ids", "true") // the prompt of a completion
	}
	out := http.NewResponseController(w)
	send := func(text string) bool {
		e.begin(r)
		_, _ = io.WriteString(w, text) // Flush returns the error
		return out.Flush() == nil
	}
	if q.Stream {
		w.Header().Set("Content-Type", "text/event-stream")
	} else {
		w.Header().Set("Content-Type", "application/json")
	}
	for i := range tokens {
		select {
		case <-time.After(e.Delay):
		case <-r.Context().Done():
			return
		}
		if q.Stream && (i == 0 && form.first != "" && !send(form.first) || !send(form.token)) {
			return
		}
	}
	if q.Stream {
		send(form.last)
	} else {
		send(form.whole)
	}
}
