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
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// The errors of [Asker.Ask], by the caller's reaction.
var (
	// ErrNotReady: the engine does not answer yet, or is loading. A retry may succeed.
	ErrNotReady = errors.New("the engine does not answer over HTTP")

	// ErrUnknown: the server is not a supported engine, or refuses the request. A configuration must change.
	ErrUnknown = errors.New("no vLLM and no SGLang answers there")

	// ErrNoEvents: the engine publishes no events. The engine needs other settings.
	ErrNoEvents = errors.New("the engine publishes no KV-cache events")
)

// The kinds of engines.
const (
	VLLM   = "vllm"
	SGLang = "sglang"
)

// Engine contains the settings that an engine reports. Fields without a report are empty.
type Engine struct {
	Kind      string // VLLM or SGLang
	Version   string
	Model     string // the name under which it is served
	BlockSize uint32 // tokens
	Nominal   bool   // blocks in events may be a multiple of BlockSize, because BlockSize ignores context parallelism
	Ranks     []Rank // ascending; nil: endpoints not reported

	Nodes uint32 // hosts of the engine's ranks; 0: unknown

	Names Names // the present names: adapters change while the engine runs

	Role          string // prefill, decode or encode; empty: aggregated, or not reported
	BootstrapPort uint32 // of a prefill engine of SGLang; 0: not reported

	TotalKVBlocks    uint64 // each rank's device memory, in blocks
	MaxBatchedTokens uint64 // bound on the tokens that a rank computes in a step

	UnnamedAdapters bool // the engine may serve adapters, and its events do not name the adapter of a block

	Store *Store // the store behind SGLang's HiCache; nil: none, or not reported
}

// Rank contains the endpoints of one data-parallel rank.
type Rank struct {
	Rank     uint32
	Endpoint string // tcp: // tcp:// or ipc:// address to dial; exceptions: Listen and Unclear
	Replay   string // address to dial; empty: no replay socket
	Topic    string

	// Load is the address of the rank's load socket, with the topic LoadTopic (SGLang); empty: none.
	Load, LoadTopic string

	// Listen: the engine dials Endpoint, and the shim listens there. Unclear: the engine's report does not decide this.
	Listen, Unclear bool
}

// Asker reads the settings of one engine.
type Asker struct {
	base  *url.URL
	token string
	http  *http.Client

	tensorrt atomic.Bool // the engine's /metrics are those of TensorRT-LLM
}

// New returns an Asker for the engine at the URL http://HOST:PORT or https://HOST:PORT. If token is not empty, requests
// contain it as bearer token. The rule restricts the engine's address; nil permits every address. Redirects are not
// followed.
func New(address, token string, rule *dial.Rule) (*Asker, error) {
	base, err := url.Parse(address)
	isHTTP := err == nil && (base.Scheme == "http" || base.Scheme == "https") && base.Hostname() != ""
	switch {
	case isHTTP && base.User != nil:
		return nil, errors.New("the URL must not contain a user or password; use an API key")
	case err != nil || !isHTTP && strings.Contains(address, "@"): // the address is not repeated: it may contain a password
		return nil, errors.New("the URL is not http://HOST:PORT")
	case !isHTTP:
		return nil, fmt.Errorf("%q is not http://HOST:PORT", address)
	case base.RawQuery != "" || base.Fragment != "":
		return nil, fmt.Errorf("%q has more than a host, a port and a path", address)
	}
	return &Asker{base: base, token: token, http: dial.Client(rule, timeout)}, nil
}

// Bounds of a request.
const (
	timeout = 5 * time.Second
	maxBody = 16 << 20
)

// Host returns the host of the URL.
func (a *Asker) Host() string { return a.base.Hostname() }

// Port returns the port of the URL, or the default port of its scheme.
func (a *Asker) Port() string {
	if p := a.base.Port(); p != "" {
		return p
	}
	if a.base.Scheme == "https" {
		return "443"
	}
	return "80"
}

// Ask reads the engine's settings. Fields without a report stay empty, without an error.
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

// refusal explains a status, with the remedy for the operator.
func refusal(status int) string {
	text := fmt.Sprintf("%d %s", status, http.StatusText(status))
	if status == http.StatusUnauthorized || status == http.StatusForbidden {
		text += "; the engine requires its API key: give --engine-http-token-file"
	}
	return text
}

// get requests a path, possibly with a query. The error wraps ErrNotReady or ErrUnknown. Without an answer the status
// is 0.
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
		return nil, 0, fmt.Errorf("%w: %s has more than %d bytes", ErrUnknown, path, maxBody)
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

// reachable replaces the host of an endpoint by the host of the URL, if the endpoint's host means all interfaces.
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

// splitHostPort is net.SplitHostPort that also accepts tcp://:::5557, as ZeroMQ does.
func splitHostPort(text string) (host, port string, err error) {
	if rest, ok := strings.CutPrefix(text, ":::"); ok {
		return "::", rest, nil
	}
	return net.SplitHostPort(text)
}

func isWildcard(host string) bool { return host == "*" || host == "0.0.0.0" || host == "::" }
