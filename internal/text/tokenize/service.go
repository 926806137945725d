package tokenize

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Settings selects the tokenizer of each model.
type Settings struct {
	Models  map[string]Source `json:"models"`
	Default *Source           `json:"default"` // for models without an entry; engines only
}

// Source selects the tokenizer of a model's texts: exactly one of Render, Tokenize, Engines and Path is set.
type Source struct {
	Render   URLs `json:"render"`   // of vLLM's renderer
	Tokenize URLs `json:"tokenize"` // of vLLM or SGLang
	Engines  Kind `json:"engines"`  // the API of the model's workers

	Path string `json:"path"` // path of a tokenizer.json

	// ChatTemplate is the path of the template for Path's chats. The default is the template that transformers finds in
	// the folder; none accepts only prompts.
	ChatTemplate string `json:"chat_template"`

	Model     string `json:"model"`      // name of the model on the servers; default: the name here
	TokenFile string `json:"token_file"` // file with the servers' bearer token

	// Addresses are the engines that receive texts and the token: HOST:PORT, hosts and CIDRs. Without Addresses,
	// engines receive texts only if no token is set, because workers choose the addresses that they register.
	Addresses []string `json:"addresses"`

	TimeoutMS  int    `json:"timeout_ms"`  // time limit of a text; default 250
	InFlight   int    `json:"in_flight"`   // concurrent texts; further texts wait; default 64
	CacheBytes *int64 `json:"cache_bytes"` // size of the model's cache; default 64 MiB; 0 disables it

	token     string
	addresses *dial.Addresses // nil without Addresses
	local     *Local          // tokenizer of Path
}

// Defaults of a [Source].
const (
	DefaultTimeout    = 250 * time.Millisecond
	DefaultInFlight   = 64
	DefaultCacheBytes = 64 << 20
)

// URLs is a list of one or more URLs.
type URLs []string

// UnmarshalJSON accepts a text for a single URL.
func (u *URLs) UnmarshalJSON(data []byte) error {
	var one string
	if json.Unmarshal(data, &one) == nil {
		*u = URLs{one}
		return nil
	}
	return json.Unmarshal(data, (*[]string)(u))
}

// Complete checks all settings, and reads the named files with read.
func (s *Settings) Complete(read func(path string) ([]byte, error)) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(s.Models)) {
		source := s.Models[name]
		if err := source.complete(read); err != nil {
			errs = append(errs, fmt.Errorf("model %s: %w", name, err))
		}
		s.Models[name] = source
	}
	if d := s.Default; d != nil {
		err := d.complete(read)
		if err == nil && (d.Engines == "" || d.Model != "") {
			err = errors.New("only engines is supported: render or tokenize; other sources belong to one model")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("default: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (s *Source) complete(read func(path string) ([]byte, error)) error {
	given := 0
	for _, is := range []bool{len(s.Render) > 0, len(s.Tokenize) > 0, s.Engines != "", s.Path != ""} {
		if is {
			given++
		}
	}
	var errs []error
	if given != 1 {
		errs = append(errs, fmt.Errorf("%d of render, tokenize, engines and path are set; set exactly one", given))
	}
	if s.Engines != "" && s.Engines != Render && s.Engines != Tokenize {
		errs = append(errs, fmt.Errorf("engines is %.40q, not %s or %s", string(s.Engines), Render, Tokenize))
	}
	for _, list := range []URLs{s.Render, s.Tokenize} {
		for i, text := range list {
			base, err := baseURL(text)
			if err != nil {
				errs = append(errs, err)
			}
			list[i] = base
		}
	}
	if s.Addresses != nil {
		var err error
		if s.addresses, err = dial.ParseAddresses(s.Addresses); err != nil {
			errs = append(errs, fmt.Errorf("addresses: %w", err))
		}
		if s.Engines == "" {
			errs = append(errs, errors.New("addresses is only for engines; other servers are listed in the file"))
		}
	}
	if s.TimeoutMS < 0 || s.InFlight < 0 || s.CacheBytes != nil && *s.CacheBytes < 0 {
		errs = append(errs, errors.New("timeout_ms, in_flight and cache_bytes cannot be negative"))
	}
	if s.Path != "" {
		text, err := read(s.Path)
		if err == nil {
			s.local, err = NewLocal(text)
		}
		if err == nil {
			err = s.local.readTemplate(filepath.Dir(s.Path), s.ChatTemplate, read)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("path: %w", err))
		}
	}
	if s.ChatTemplate != "" && s.Path == "" {
		errs = append(errs, errors.New("chat_template is only for a path"))
	}
	if s.TokenFile != "" {
		text, err := read(s.TokenFile)
		s.token = strings.TrimSpace(string(text))
		if err == nil && s.token == "" {
			err = fmt.Errorf("%s is empty", s.TokenFile)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("token_file: %w", err))
		}
	}
	return errors.Join(errs...)
}

// baseURL checks a server's address, and returns it without a trailing slash or /v1.
func baseURL(text string) (string, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.RawQuery != "" ||
		u.Fragment != "" || u.User != nil {
		named := fmt.Sprintf("%.80q", text)
		if err != nil || strings.Contains(text, "@") {
			named = "a URL" // the text may contain a password
		}
		return "", fmt.Errorf("%s is not http://HOST:PORT or https://HOST:PORT", named)
	}
	return strings.TrimSuffix(strings.TrimSuffix(u.String(), "/"), "/v1"), nil
}

// Config configures the settings and the addresses of a Service.
type Config struct {
	Settings

	// Rule restricts the addresses of engines; nil permits every address. Servers in the settings are not restricted.
	Rule *dial.Rule

	// Endpoints returns the serving addresses of a model's workers. It is required if engines are a source.
	Endpoints func(model string) []string

	// Aliases returns further names of a model, which Settings may contain; nil disables aliases.
	Aliases func(model string) []string

	// Observe is called for each text; from is its source. nil disables it.
	Observe func(model, from string, o Outcome, took time.Duration)
}

// Service tokenizes texts for all models. It is safe for concurrent use.
type Service struct {
	cfg    Config
	http   *http.Client // for servers in the settings
	engine *http.Client // for servers that workers registered
	budget rpc.Budget

	mu     sync.Mutex
	models map[string]*source
}

// fromEngines is [source.from] for servers that workers registered.
const fromEngines = "engines"

// source is the state of one model.
type source struct {
	Source
	from      string
	tokenizer Tokenizer
	slots     chan struct{} // holds an element for each text in progress
	cache     *cache        // nil disables the cache

	mu     sync.Mutex
	counts map[Outcome]uint64
	last   string // the last failure
	at     time.Time
}

// New returns a service for completed settings.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, models: map[string]*source{}, http: dial.Client(nil, 0), engine: dial.Client(cfg.Rule, 0)}
	for _, c := range []*http.Client{s.http, s.engine} {
		c.Transport.(*http.Transport).MaxIdleConnsPerHost = DefaultInFlight
	}
	return s
}

// Unasked lists the models whose engines receive no texts, because the settings have a token but no addresses for the
// token. "default" represents the models without an entry.
func (s *Settings) Unasked() (models []string) {
	unasked := func(x *Source) bool { return x.Engines != "" && x.token != "" && x.addresses == nil }
	for _, name := range slices.Sorted(maps.Keys(s.Models)) {
		if x := s.Models[name]; unasked(&x) {
			models = append(models, name)
		}
	}
	if s.Default != nil && unasked(s.Default) {
		models = append(models, "default")
	}
	return models
}

// Serves reports whether at least one model has a tokenizer.
func (s *Service) Serves() bool { return s != nil && (len(s.cfg.Models) > 0 || s.cfg.Default != nil) }

// sourceOf returns the source of a model; nil without a source.
func (s *Service) sourceOf(model string) *source {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.models[model]; known != nil {
		return known
	}
	settings, named := s.named(model)
	if !named {
		// Only existing models get a source, so invented names use no memory.
		if s.cfg.Default == nil || len(s.cfg.Endpoints(model)) == 0 {
			return nil
		}
		settings = *s.cfg.Default
	}
	x := s.open(model, settings)
	s.models[model] = x
	return x
}

// named returns the settings of a model, under its own name or under an alias.
func (s *Service) named(model string) (settings Source, ok bool) {
	if settings, ok = s.cfg.Models[model]; ok || s.cfg.Aliases == nil {
		return settings, ok
	}
	for _, name := range s.cfg.Aliases(model) {
		if settings, ok = s.cfg.Models[name]; ok {
			settings.Model = cmp.Or(settings.Model, name)
			return settings, true
		}
	}
	return settings, false
}

// open creates a source from its settings.
func (s *Service) open(model string, settings Source) *source {
	remote := &Remote{Kind: settings.Engines, Model: model, Token: settings.token, HTTP: s.engine,
		Hedge: settings.timeout() / 4, Budget: &s.budget,
		URLs: func() ([]string, error) { return settings.servers(s.cfg.Endpoints(model)) }}
	from := fromEngines
	for kind, list := range map[Kind]URLs{Render: settings.Render, Tokenize: settings.Tokenize} {
		if len(list) > 0 {
			remote.Kind, from, remote.HTTP = kind, string(kind), s.http
			remote.URLs = func() ([]string, error) { return list, nil }
		}
	}
	if settings.Model != "" {
		remote.Model = settings.Model
	}
	x := &source{Source: settings, from: from, tokenizer: remote, counts: map[Outcome]uint64{}}
	n := settings.InFlight
	if n == 0 {
		n = DefaultInFlight
	}
	x.slots = make(chan struct{}, n)
	room := int64(DefaultCacheBytes)
	if settings.CacheBytes != nil {
		room = *settings.CacheBytes
	}
	if room > 0 {
		x.cache = newCache(room)
	}
	if settings.local != nil {
		local := *settings.local
		x.from = "local"
		if x.cache != nil {
			local.parts = parts{x.cache}
		}
		x.tokenizer = &local
	}
	return x
}

func (s *Source) timeout() time.Duration {
	if s.TimeoutMS == 0 {
		return DefaultTimeout
	}
	return time.Duration(s.TimeoutMS) * time.Millisecond
}

// engines returns the servers among the workers' serving addresses that may receive texts and the token, and the number
// of the others.
func (s *Source) engines(endpoints []string) (list []string, skipped int) {
	seen := map[string]bool{}
	for _, e := range endpoints {
		base, err := baseURL(e)
		if err != nil || dial.CheckServing(e) != nil || seen[base] {
			continue
		}
		seen[base] = true
		if u, err := url.Parse(base); err == nil && (s.addresses.Contains(u) || s.addresses == nil && s.token == "") {
			list = append(list, base)
		} else {
			skipped++
		}
	}
	return list, skipped
}

// whySkipped returns the reason why engines receive no texts.
func (s *Source) whySkipped() string {
	if s.addresses == nil {
		return "the file of --tokenizers has a token_file, but no addresses that may receive the token"
	}
	return "they are missing in addresses of the file of --tokenizers"
}

// servers returns the engines for a request. The error is the reason for an empty list.
func (s *Source) servers(endpoints []string) ([]string, error) {
	list, skipped := s.engines(endpoints)
	switch {
	case len(list) > 0:
		return list, nil
	case skipped > 0:
		return nil, failed(Unavailable, "%d engines of the model receive no texts: %s", skipped, s.whySkipped())
	}
	return nil, failed(Unavailable, "no worker of the model is registered with an http endpoint")
}

// Tokenize converts a text to tokens. The time limit is the source's, and at most half of the context's remaining time.
func (s *Service) Tokenize(ctx context.Context, model string, t *api.Text) (Tokens, error) {
	began := time.Now()
	x := s.sourceOf(model)
	if x == nil {
		s.observe(ops.Other, "none", NoSource, began)
		return Tokens{}, failed(NoSource, "no tokenizer for model %.80q; add the model to the file of --tokenizers",
			model)
	}
	k := keyOf(t)
	cached := x.cache != nil && (x.local == nil || x.local.lasting(t))
	if cached {
		if tokens, ok := x.cache.get(k); ok {
			x.count(Cached, nil)
			s.observe(model, x.from, Cached, began)
			return tokens, nil
		}
	}
	tokens, err := x.within(ctx, t)
	if err == nil && cached {
		x.cache.add(k, tokens)
	}
	if outcome := OutcomeOf(err); ctx.Err() == nil { // otherwise the caller has stopped waiting
		x.count(outcome, err)
		s.observe(model, x.from, outcome, began)
	}
	return tokens, err
}

// within waits for room and calls the tokenizer, within the time limit.
func (x *source) within(ctx context.Context, t *api.Text) (Tokens, error) {
	timeout := x.timeout()
	if deadline, has := ctx.Deadline(); has {
		timeout = min(timeout, time.Until(deadline)/2)
	}
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	select {
	case x.slots <- struct{}{}:
		defer func() { <-x.slots }()
	case <-limited.Done():
		return Tokens{}, failed(Busy, "%d texts in progress for %v; raise in_flight, or add servers", cap(x.slots),
			timeout)
	}
	began := time.Now()
	tokens, err := x.tokenizer.Tokenize(limited, t)
	tokens.Took = time.Since(began)
	if err != nil && limited.Err() != nil {
		return Tokens{}, failed(TimedOut, "no answer within %v; raise timeout_ms, or add servers", timeout)
	}
	return tokens, err
}

// keyOf returns the digest of a text's input.
func keyOf(t *api.Text) (k key) {
	h := sha256.New()
	if t.Messages == nil && t.Request == nil {
		_, _ = io.WriteString(h, "prompt "+t.Prompt)
	} else {
		asked := *t
		asked.ReturnTokenIDs = false
		_ = json.NewEncoder(h).Encode(asked) // the values are valid JSON
	}
	h.Sum(k[:0])
	return k
}

func (s *Service) observe(model, from string, o Outcome, began time.Time) {
	if s.cfg.Observe != nil {
		s.cfg.Observe(model, from, o, time.Since(began))
	}
}

func (x *source) count(o Outcome, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.counts[o]++
	if err != nil {
		x.last, x.at = err.Error(), time.Now()
	}
}

// lately is the time for which a failure is a problem of the node.
const lately = 2 * time.Minute

// Problems lists the models with recent failures.
func (s *Service) Problems(now time.Time) (list []string) {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	models := maps.Clone(s.models)
	s.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(models)) {
		x := models[name]
		if x.from == fromEngines {
			if _, skipped := x.engines(s.cfg.Endpoints(name)); skipped > 0 {
				list = append(list, fmt.Sprintf("%d engines of model %s receive no texts: %s; what to do: register addresses "+
					"that this node may use (worker-shim run --serving-endpoint, indexer serve --dial-allow)",
					skipped, name, x.whySkipped()))
			}
		}
		x.mu.Lock()
		if x.last != "" && now.Sub(x.at) < lately {
			all, failures := uint64(0), uint64(0)
			for o, n := range x.counts {
				if all += n; o != OK && o != Cached {
					failures += n
				}
			}
			list = append(list, fmt.Sprintf("%d of %d texts for model %s were not tokenized, so their requests were "+
				"answered without the workers' holdings; the last: %s; what to do: correct the model's entry in the file of "+
				"indexer serve --tokenizers, or its tokenizer's server", failures, all, name, x.last))
		}
		x.mu.Unlock()
	}
	return list
}
