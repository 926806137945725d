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
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// Settings say what makes tokens for which model.
type Settings struct {
	Models  map[string]Source `json:"models"`
	Default *Source           `json:"default"` // of models that are not named; engines only
}

// Source says what makes tokens of a model's texts: one of Render, Tokenize, Engines and Path.
type Source struct {
	Render   URLs `json:"render"`   // of vLLM's renderer
	Tokenize URLs `json:"tokenize"` // of vLLM or SGLang
	Engines  Kind `json:"engines"`  // what the model's workers are asked for

	Path string `json:"path"` // of a tokenizer.json

	// ChatTemplate is the path of the template of Path's chats; by default what transformers finds in its folder; none:
	// prompts only.
	ChatTemplate string `json:"chat_template"`

	Model     string `json:"model"`      // as the servers call it; default: as it is called here
	TokenFile string `json:"token_file"` // with the bearer token that they want

	// Addresses are the engines that get texts and the token: HOST:PORT, hosts and CIDRs. Without it, engines get texts if
	// there is no token, and nothing if there is one: their addresses are what workers registered.
	Addresses []string `json:"addresses"`

	TimeoutMS  int    `json:"timeout_ms"`  // how long a text may take; default 250
	InFlight   int    `json:"in_flight"`   // texts at once; more wait; default 64
	CacheBytes *int64 `json:"cache_bytes"` // of the cache of this model; default 64 MiB; 0: none

	token     string
	addresses *dial.Addresses // nil: none are given
	local     *Local          // of Path
}

// Defaults of a [Source].
const (
	DefaultTimeout    = 250 * time.Millisecond
	DefaultInFlight   = 64
	DefaultCacheBytes = 64 << 20
)

// URLs are one or more.
type URLs []string

// UnmarshalJSON takes text for one.
func (u *URLs) UnmarshalJSON(data []byte) error {
	var one string
	if json.Unmarshal(data, &one) == nil {
		*u = URLs{one}
		return nil
	}
	return json.Unmarshal(data, (*[]string)(u))
}

// Complete checks the settings, all of them, and reads the files that they name by read.
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
			err = errors.New("it may only be engines: render or engines: tokenize; what else there is belongs to one model")
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
		errs = append(errs, fmt.Errorf("it has %d of render, tokenize, engines and path; give one of them", given))
	}
	if s.Engines != "" && s.Engines != Render && s.Engines != Tokenize {
		errs = append(errs, fmt.Errorf("engines is %.40q; it may be %s or %s", string(s.Engines), Render, Tokenize))
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
			errs = append(errs, errors.New("addresses is for engines only; the other servers are named in the file"))
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
		errs = append(errs, errors.New("chat_template is for a path only"))
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

// baseURL checks a server's address, and returns it without what may stand at its end: a slash or /v1.
func baseURL(text string) (string, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.RawQuery != "" ||
		u.Fragment != "" || u.User != nil {
		named := fmt.Sprintf("%.80q", text)
		if err != nil || strings.Contains(text, "@") {
			named = "a URL" // which may have a password
		}
		return "", fmt.Errorf("%s is not http://HOST:PORT or https://HOST:PORT", named)
	}
	return strings.TrimSuffix(strings.TrimSuffix(u.String(), "/"), "/v1"), nil
}

// Config is what a service needs.
type Config struct {
	Settings

	// Rule judges the addresses of engines; nil permits all. Servers that the settings name are dialled anywhere.
	Rule *dial.Rule

	// Endpoints are where workers of a model serve, if engines are a source.
	Endpoints func(model string) []string

	// Aliases are further names of a model, under which Settings may have it; nil: there are none.
	Aliases func(model string) []string

	// Observe is told of each text; from is its source. It may be nil.
	Observe func(model, from string, o Outcome, took time.Duration)
}

// Service makes tokens for all models. Any number of goroutines may use it.
type Service struct {
	cfg    Config
	http   *http.Client // of servers that the settings name
	engine *http.Client // of those that workers registered
	budget rpc.Budget

	mu     sync.Mutex
	models map[string]*source
}

// fromEngines is [source.from] of what workers registered.
const fromEngines = "engines"

// source is what a service has for one model.
type source struct {
	Source
	from      string
	tokenizer Tokenizer
	slots     chan struct{} // one element for each text under way
	cache     *cache        // nil: none

	mu     sync.Mutex
	counts map[Outcome]uint64
	last   string // failure
	at     time.Time
}

// New returns a service for settings that are complete.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, models: map[string]*source{}, http: dial.Client(nil, 0), engine: dial.Client(cfg.Rule, 0)}
	for _, c := range []*http.Client{s.http, s.engine} {
		c.Transport.(*http.Transport).MaxIdleConnsPerHost = DefaultInFlight
	}
	return s
}

// Unasked lists the models whose engines get no texts, since the settings have a token and no addresses that may get
// it. "default" stands for the models that are not named.
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

// Serves reports whether anything makes tokens, of whichever model.
func (s *Service) Serves() bool { return s != nil && (len(s.cfg.Models) > 0 || s.cfg.Default != nil) }

// of returns what makes tokens for a model; nil: nothing does.
func (s *Service) of(model string) *source {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.models[model]; known != nil {
		return known
	}
	settings, named := s.named(model)
	if !named {
		// only models that are there, so that names made up take no memory
		if s.cfg.Default == nil || len(s.cfg.Endpoints(model)) == 0 {
			return nil
		}
		settings = *s.cfg.Default
	}
	x := s.open(model, settings)
	s.models[model] = x
	return x
}

// named returns the settings of a model: under its own name, or under another one that its engines accept.
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

// open makes a source of its settings.
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

// engines are the servers among the serving addresses of workers that may get texts, and the token. The others are
// skipped.
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

// whySkipped is why engines get no texts.
func (s *Source) whySkipped() string {
	if s.addresses == nil {
		return "the file of --tokenizers has a token_file and no addresses, which lists the engines that may get the token"
	}
	return "they are not in addresses of the file of --tokenizers"
}

// servers are the engines to be asked. The error says why there are none.
func (s *Source) servers(endpoints []string) ([]string, error) {
	list, skipped := s.engines(endpoints)
	switch {
	case len(list) > 0:
		return list, nil
	case skipped > 0:
		return nil, failed(Unavailable, "%d engines of the model get no texts: %s", skipped, s.whySkipped())
	}
	return nil, failed(Unavailable, "no worker of the model is registered with an http endpoint")
}

// Tokenize makes tokens of a text. It takes no longer than the source's time limit, and than half of the time that the
// context has left.
func (s *Service) Tokenize(ctx context.Context, model string, t *api.Text) (Tokens, error) {
	began := time.Now()
	x := s.of(model)
	if x == nil {
		s.observe(api.OpOther, "none", NoSource, began)
		return Tokens{}, failed(NoSource, "nothing makes tokens for model %.80q; name it in the file of --tokenizers",
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
	if outcome := OutcomeOf(err); ctx.Err() == nil { // else nobody wants it any more
		x.count(outcome, err)
		s.observe(model, x.from, outcome, began)
	}
	return tokens, err
}

// within asks the tokenizer when there is room, within the time limit.
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
		return Tokens{}, failed(Busy, "%d texts were under way for %v; raise in_flight, or add servers", cap(x.slots),
			timeout)
	}
	tokens, err := x.tokenizer.Tokenize(limited, t)
	if err != nil && limited.Err() != nil {
		return Tokens{}, failed(TimedOut, "no answer within %v; raise timeout_ms, or add servers", timeout)
	}
	return tokens, err
}

// keyOf is the digest of all that makes a text.
func keyOf(t *api.Text) (k key) {
	h := sha256.New()
	if t.Messages == nil {
		_, _ = io.WriteString(h, "prompt "+t.Prompt)
	} else {
		asked := *t
		asked.ReturnTokenIDs = false
		_ = json.NewEncoder(h).Encode(asked) // which was checked to be JSON
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

// lately is for how long a failure is a problem of the node.
const lately = 2 * time.Minute

// Problems says for which models texts failed of late.
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
				list = append(list, fmt.Sprintf("%d engines of model %s get no texts: %s; what to do: register addresses "+
					"that this node may ask (worker-shim run --serving-endpoint, indexer serve --dial-allow)", skipped, name, x.whySkipped()))
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
			list = append(list, fmt.Sprintf("%d of %d texts for model %s were not tokenized, so that their requests were "+
				"answered without what workers hold; the last: %s; what to do: mend the model's entry in the file of indexer "+
				"serve --tokenizers, or its tokenizer's server", failures, all, name, x.last))
		}
		x.mu.Unlock()
	}
	return list
}
