package enginehttp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// The errors of [Asker.Ask], by what is done next.
var (
	// ErrNotReady: the engine does not answer yet, or is loading. Ask again.
	ErrNotReady = errors.New("the engine does not answer over HTTP")

	// ErrUnknown: what answers is no engine that is known here, or does not let us ask. Somebody must change something.
	ErrUnknown = errors.New("no vLLM and no SGLang answers there")

	// ErrNoEvents: the engine publishes no events. It must be started with other settings.
	ErrNoEvents = errors.New("the engine publishes no KV-cache events")
)

// The kinds of engines.
const (
	VLLM   = "vllm"
	SGLang = "sglang"
)

// Engine is what an engine says of itself. What it does not say is empty.
type Engine struct {
	Kind      string // VLLM or SGLang
	Version   string
	Model     string // the name under which it is served
	BlockSize uint32 // tokens
	Nominal   bool   // events may have a multiple of BlockSize: it does not count context parallelism
	Ranks     []Rank // ascending; nil: it does not say where it publishes

	Nodes uint32 // hosts on which its ranks run; 0: not known

	Names Names // as they are now: adapters come and go while the engine runs

	TotalKVBlocks    uint64 // room of each rank's device memory, in blocks
	MaxBatchedTokens uint64 // what each rank computes in a step at most

	UnnamedAdapters bool // it may serve adapters, and its events do not tell their blocks from the base model's

	Store *Store // behind SGLang's HiCache; nil: it has none, or does not say
}

// Rank is where one data-parallel rank publishes.
type Rank struct {
	Rank     uint32
	Endpoint string // tcp:// or ipc://; to be dialled, but see Listen and Unclear
	Replay   string // to be dialled; empty: it has none
	Topic    string

	// Listen: the engine dials out to Endpoint, where a shim listens. Unclear: the engine's words fit both.
	Listen, Unclear bool
}

// Asker asks one engine.
type Asker struct {
	base  *url.URL
	token string
	http  *http.Client
}

// New returns an asker of the engine at a URL, http://HOST:PORT or https://HOST:PORT. token, if not empty, is sent as
// bearer token. The rule judges the engine's address; nil permits all. Redirects are not followed.
func New(address, token string, rule *dial.Rule) (*Asker, error) {
	base, err := url.Parse(address)
	isHTTP := err == nil && (base.Scheme == "http" || base.Scheme == "https") && base.Hostname() != ""
	switch {
	case isHTTP && base.User != nil:
		return nil, errors.New("a user or password is no part of the URL; an engine takes an API key")
	case err != nil || !isHTTP && strings.Contains(address, "@"): // not repeated: it may have a password
		return nil, errors.New("it is not http://HOST:PORT")
	case !isHTTP:
		return nil, fmt.Errorf("%q is not http://HOST:PORT", address)
	case base.RawQuery != "" || base.Fragment != "":
		return nil, fmt.Errorf("%q has more than a host, a port and a path", address)
	}
	return &Asker{base: base, token: token, http: dial.Client(rule, timeout)}, nil
}

// Bounds of one request.
const (
	timeout = 5 * time.Second
	maxBody = 16 << 20
)

// Host is the engine's host as the URL has it.
func (a *Asker) Host() string { return a.base.Hostname() }

// Port is the URL's port, or what its scheme stands for.
func (a *Asker) Port() string {
	if p := a.base.Port(); p != "" {
		return p
	}
	if a.base.Scheme == "https" {
		return "443"
	}
	return "80"
}

// Ask asks the engine. What is returned without an error may leave open what the engine does not say.
func (a *Asker) Ask(ctx context.Context) (Engine, error) {
	body, status, err := a.get(ctx, "/kv_event_sources")
	switch {
	case err != nil:
		return Engine{}, err
	case status == http.StatusOK:
		return a.vllm(ctx, body)
	case status != http.StatusNotFound:
		return Engine{}, fmt.Errorf("%w: /kv_event_sources: %s", ErrUnknown, refusal(status))
	}
	for _, path := range []string{"/server_info", "/get_server_info"} {
		body, status, err := a.get(ctx, path)
		switch {
		case err != nil:
			return Engine{}, err
		case status == http.StatusUnauthorized || status == http.StatusForbidden:
			return Engine{}, fmt.Errorf("%w: %s: %s", ErrUnknown, path, refusal(status))
		case status == http.StatusOK && isSGLang(body):
			e, err := a.sglang(ctx, body)
			if err == nil {
				e.Names, err = a.Names(ctx)
			}
			return e, err
		}
	}
	return a.oldVLLM(ctx)
}

// refusal says what a status means to who configures a shim.
func refusal(status int) string {
	text := fmt.Sprintf("%d %s", status, http.StatusText(status))
	if status == http.StatusUnauthorized || status == http.StatusForbidden {
		text += "; the engine wants its API key: --engine-http-token-file"
	}
	return text
}

// get asks for a path, which may have a query. The error is ErrNotReady, or about what came; without an answer the
// status is 0.
func (a *Asker) get(ctx context.Context, path string) (body []byte, status int, err error) {
	path, query, _ := strings.Cut(path, "?")
	target := a.base.JoinPath(path)
	target.RawQuery = query
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		return nil, 0, err
	}
	if a.token != "" {
		r.Header.Set("Authorization", "Bearer "+a.token)
	}
	answer, err := a.http.Do(r)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	defer answer.Body.Close()
	body, err = io.ReadAll(io.LimitReader(answer.Body, maxBody+1))
	switch {
	case err != nil:
		return nil, 0, fmt.Errorf("%w: %s: %w", ErrNotReady, path, err)
	case len(body) > maxBody:
		return nil, 0, fmt.Errorf("%w: %s says more than %d bytes", ErrUnknown, path, maxBody)
	case answer.StatusCode >= 500:
		return nil, answer.StatusCode, fmt.Errorf("%w: %s: %d %s", ErrNotReady, path, answer.StatusCode,
			http.StatusText(answer.StatusCode))
	}
	return body, answer.StatusCode, nil
}

func decode(path string, body []byte, into any) error {
	if err := strictjson.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrUnknown, path, err)
	}
	return nil
}

// reachable gives an endpoint that an engine binds the host of the URL, if its own stands for all interfaces.
func (a *Asker) reachable(endpoint string) (string, error) {
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		if strings.HasPrefix(endpoint, "ipc://") {
			return endpoint, nil
		}
		return "", fmt.Errorf("%w to other processes: its endpoint is %s", ErrNoEvents, endpoint)
	}
	host, port, err := splitHostPort(rest)
	if err != nil {
		return "", fmt.Errorf("%w: endpoint %s: %w", ErrUnknown, endpoint, err)
	}
	if isWildcard(host) {
		host = a.Host()
	}
	return "tcp://" + net.JoinHostPort(host, port), nil
}

// splitHostPort is net.SplitHostPort that takes tcp://:::5557 too, as ZeroMQ does.
func splitHostPort(text string) (host, port string, err error) {
	if rest, ok := strings.CutPrefix(text, ":::"); ok {
		return "::", rest, nil
	}
	return net.SplitHostPort(text)
}

func isWildcard(host string) bool { return host == "*" || host == "0.0.0.0" || host == "::" }
