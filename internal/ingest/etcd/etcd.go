package etcd

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// Config configures the range of keys and the connection of a [Copy]. URLs, From and Behind are required.
type Config struct {
	URLs     []string // http://HOST:PORT or https://HOST:PORT; after a failure the next URL is used
	User     string   // if etcd requires authentication
	Password string
	TLS      *tls.Config

	From, Behind string // the range of keys: From is included, Behind is not

	Records int // bound on the number of keys; default 200,000. A larger range is an error.
	Bytes   int // bound on an answer, and on a message of a watch; default 64 MiB

	// Dial connects to etcd. nil permits every address.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// Changed is called by Run after each change of the copy or of its error. nil disables it.
	Changed func()
}

// Copy is a copy of a range of etcd's keys. It uses etcd's HTTP gateway on the client port (3.4 and later). Records is
// safe for concurrent use.
type Copy struct {
	cfg    Config
	client *http.Client

	mu      sync.Mutex
	records map[string][]byte // by key
	err     error             // why the copy may be incomplete; set until the first listing
}

const (
	pageKeys   = 500              // keys of a page
	patience   = 10 * time.Second // bound on a request
	watchFor   = time.Minute      // after watchFor the range is listed again, because an isolated member sends no error
	retryAfter = time.Second
)

// ErrNotAsked is returned by [Copy.Records] until etcd has answered, or failed to answer, for the first time.
var ErrNotAsked = errors.New("etcd has not answered yet")

// ErrUserInURL is returned by [New] for a URL with a user or password. The error does not contain the URL.
var ErrUserInURL = errors.New("a URL of etcd with a user or password")

// New returns a copy that is empty until [Copy.Run] runs.
func New(cfg Config) (*Copy, error) {
	for i, u := range cfg.URLs {
		p, err := url.Parse(u)
		switch {
		case strings.Contains(u, "@"):
			return nil, fmt.Errorf("URL %d of %d: %w", i+1, len(cfg.URLs), ErrUserInURL)
		case err != nil: // err repeats the URL, and a comma in a password splits the URL
			return nil, fmt.Errorf("URL %d of %d is not http://HOST:PORT or https://HOST:PORT", i+1, len(cfg.URLs))
		case p.Scheme != "http" && p.Scheme != "https" || p.Host == "" || strings.Trim(p.Path, "/") != "" ||
			p.RawQuery != "":
			return nil, fmt.Errorf("%q is not http://HOST:PORT or https://HOST:PORT", u)
		}
	}
	if len(cfg.URLs) == 0 {
		return nil, errors.New("no URL of etcd")
	}
	cfg.Records, cfg.Bytes = cmp.Or(cfg.Records, 200_000), cmp.Or(cfg.Bytes, 64<<20)
	if cfg.Changed == nil {
		cfg.Changed = func() {}
	}
	transport := &http.Transport{TLSClientConfig: cfg.TLS, ForceAttemptHTTP2: true, TLSHandshakeTimeout: patience,
		DialContext: cfg.Dial}
	if cfg.Dial == nil {
		dialer := &net.Dialer{Timeout: patience,
			KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: patience, Interval: 5 * time.Second, Count: 3}}
		transport.DialContext, transport.Proxy = dialer.DialContext, http.ProxyFromEnvironment
	}
	return &Copy{cfg: cfg, err: ErrNotAsked, client: &http.Client{Transport: transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}, nil
}

// Records returns the copy, by key. The error is the reason if etcd is unreachable now; then the records are unknown.
func (e *Copy) Records() (map[string][]byte, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil {
		return nil, e.err
	}
	return maps.Clone(e.records), nil
}

// Run updates the copy until ctx ends.
func (e *Copy) Run(ctx context.Context) {
	defer e.client.CloseIdleConnections()
	for at := 0; ctx.Err() == nil; {
		base := strings.TrimRight(e.cfg.URLs[at%len(e.cfg.URLs)], "/")
		if err := e.follow(ctx, base); err != nil && ctx.Err() == nil {
			e.mu.Lock()
			e.err = fmt.Errorf("%s: %w", base, err)
			e.mu.Unlock()
			e.cfg.Changed()
			at++
		}
		loop.Wait(ctx, retryAfter)
	}
}

// follow lists the range and watches its changes. It returns nil if a new listing is due.
func (e *Copy) follow(ctx context.Context, base string) error {
	token, err := e.authenticate(ctx, base)
	if err != nil {
		return err
	}
	records, revision, err := e.list(ctx, base, token)
	if err != nil {
		return err
	}
	e.mu.Lock()
	e.records, e.err = records, nil
	e.mu.Unlock()
	e.cfg.Changed()
	return e.watch(ctx, base, token, revision+1)
}

// authenticate returns the token of the user; empty without a user.
func (e *Copy) authenticate(ctx context.Context, base string) (token string, err error) {
	if e.cfg.User == "" {
		return "", nil
	}
	var answer struct{ Token string }
	err = e.call(ctx, base, "/v3/auth/authenticate", "", map[string]any{"name": e.cfg.User, "password": e.cfg.Password},
		&answer)
	return answer.Token, err
}

// keyValue is a key with its value.
type keyValue struct{ Key, Value []byte }

// header is the beginning of an answer. Revisions are numbers as text.
type header struct {
	Revision json.Number
}

// list reads all records at one revision.
func (e *Copy) list(ctx context.Context, base, token string) (records map[string][]byte, revision int64, err error) {
	records = map[string][]byte{}
	from := []byte(e.cfg.From)
	for {
		asked := map[string]any{"key": from, "range_end": []byte(e.cfg.Behind), "limit": pageKeys}
		if revision > 0 {
			asked["revision"] = revision
		}
		var page struct {
			Header header
			KVs    []keyValue
			More   bool
		}
		if err := e.call(ctx, base, "/v3/kv/range", token, asked, &page); err != nil {
			return nil, 0, err
		}
		if revision == 0 {
			if revision, err = page.Header.Revision.Int64(); err != nil {
				return nil, 0, fmt.Errorf("an answer without a revision: %w", err)
			}
		}
		for _, kv := range page.KVs {
			records[string(kv.Key)] = kv.Value
		}
		if len(records) > e.cfg.Records {
			return nil, 0, fmt.Errorf("more than %d keys from %q on", e.cfg.Records, e.cfg.From)
		}
		if !page.More || len(page.KVs) == 0 {
			return records, revision, nil
		}
		from = append(page.KVs[len(page.KVs)-1].Key, 0)
	}
}

// watch applies changes from a revision on, until a new listing is due: after watchFor, after the end of the watch, or
// if etcd has compacted the revision.
func (e *Copy) watch(ctx context.Context, base, token string, from int64) error {
	ctx, cancel := context.WithTimeout(ctx, watchFor)
	defer cancel()
	b, err := e.post(ctx, base, "/v3/watch", token, map[string]any{"create_request": map[string]any{
		"key": []byte(e.cfg.From), "range_end": []byte(e.cfg.Behind), "start_revision": from}})
	for err == nil {
		var m struct {
			Result struct {
				Canceled bool
				Events   []struct {
					Type string
					KV   keyValue
				}
			}
			Error *struct{ Message string }
		}
		if err = b.decode(&m); err != nil {
			break
		}
		if m.Result.Canceled || m.Error != nil {
			break // the listing that follows returns the error, if the fault persists
		}
		e.mu.Lock()
		for _, change := range m.Result.Events {
			if change.Type == "DELETE" {
				delete(e.records, string(change.KV.Key))
			} else if len(e.records) < e.cfg.Records || e.records[string(change.KV.Key)] != nil {
				e.records[string(change.KV.Key)] = change.KV.Value
			}
		}
		e.mu.Unlock()
		e.cfg.Changed()
	}
	if b != nil {
		b.Close()
	}
	if ctx.Err() != nil || errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// call sends one request and decodes the answer.
func (e *Copy) call(ctx context.Context, base, path, token string, asked, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	b, err := e.post(ctx, base, path, token, asked)
	if err != nil {
		return err
	}
	defer b.Close()
	return b.decode(answer)
}

// body reads JSON values with a bound on each.
type body struct {
	io.Closer
	most  int // bytes
	limit *io.LimitedReader
	json  *json.Decoder
}

func (b *body) decode(into any) error {
	b.limit.N = int64(b.most)
	err := b.json.Decode(into)
	if err != nil && b.limit.N == 0 {
		return fmt.Errorf("an answer of more than %d bytes", b.most)
	}
	return err
}

func (e *Copy) post(ctx context.Context, base, path, token string, asked any) (*body, error) {
	text, err := json.Marshal(asked)
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, base+path, bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	if token != "" {
		r.Header.Set("Authorization", token)
	}
	answer, err := e.client.Do(r)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(answer.Body, 300)) // an error leaves the text shorter
		answer.Body.Close()
		return nil, fmt.Errorf("%s: %s: %s", path, answer.Status, bytes.TrimSpace(said))
	}
	limit := &io.LimitedReader{R: answer.Body}
	return &body{answer.Body, e.cfg.Bytes, limit, json.NewDecoder(limit)}, nil
}
