package dynamo

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/loop"
)

// EtcdConfig says where etcd is. Only URLs are required.
type EtcdConfig struct {
	URLs     []string // http://HOST:PORT or https://HOST:PORT; another one is asked when one fails
	User     string   // if etcd has authentication on
	Password string
	TLS      *tls.Config
}

// Etcd keeps a copy of what Dynamo's workers have registered in etcd, as DYN_DISCOVERY_BACKEND=etcd has them do. It
// speaks etcd's HTTP gateway, which etcd serves on its client port (3.4 and later). Its keys are under leases of their
// processes: what is gone is deleted.
type Etcd struct {
	cfg    EtcdConfig
	client *http.Client

	mu      sync.Mutex
	records map[string][]byte // by key
	err     error             // why the copy is not known to be whole; of the beginning until it is
}

const (
	firstKey, behindKeys = "v1/event_", "v1/event`" // event_channels and event_sources

	pageKeys   = 500              // of a listing
	maxRecords = 200_000          // of a copy
	maxPage    = 64 << 20         // bytes of one answer, or of one message of a watch
	patience   = 10 * time.Second // for an answer
	watchFor   = time.Minute      // after it, all is listed anew: a member that is cut off says nothing
	retryAfter = time.Second
)

// ErrNotAsked is returned by [Etcd.Publishers] until etcd has answered for the first time, or could not be asked.
var ErrNotAsked = errors.New("etcd has not been asked yet")

// ErrUserInURL is returned by [NewEtcd], which does not repeat the URL: who asks etcd is not part of it.
var ErrUserInURL = errors.New("a URL of etcd with a user or password")

// NewEtcd makes a copy that is empty until [Etcd.Run] runs.
func NewEtcd(cfg EtcdConfig) (*Etcd, error) {
	for i, u := range cfg.URLs {
		p, err := url.Parse(u)
		switch {
		case strings.Contains(u, "@"):
			return nil, fmt.Errorf("URL %d of %d: %w", i+1, len(cfg.URLs), ErrUserInURL)
		case err != nil: // which repeats the URL, and a comma in a password cuts it in two
			return nil, fmt.Errorf("URL %d of %d is not http://HOST:PORT or https://HOST:PORT", i+1, len(cfg.URLs))
		case p.Scheme != "http" && p.Scheme != "https" || p.Host == "" || strings.Trim(p.Path, "/") != "" ||
			p.RawQuery != "":
			return nil, fmt.Errorf("%q is not http://HOST:PORT or https://HOST:PORT", u)
		}
	}
	if len(cfg.URLs) == 0 {
		return nil, errors.New("no URL of etcd")
	}
	dialer := &net.Dialer{Timeout: patience,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: patience, Interval: 5 * time.Second, Count: 3}}
	return &Etcd{cfg: cfg, err: ErrNotAsked, client: &http.Client{Transport: &http.Transport{
		DialContext: dialer.DialContext, TLSClientConfig: cfg.TLS, ForceAttemptHTTP2: true,
		Proxy: http.ProxyFromEnvironment, TLSHandshakeTimeout: patience}}}, nil
}

// Publishers lists the publishers of KV-cache events that are registered, by id. wrong is what is in records that are
// passed over. An error says that etcd cannot be asked now, and why; who is registered is not known then.
func (e *Etcd) Publishers() (list []Publisher, wrong []error, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil {
		return nil, nil, e.err
	}
	var channels, sources []record
	for key, text := range e.records {
		switch r := (record{key, text}); {
		case strings.HasPrefix(key, "v1/"+channelsKind+"/"):
			channels = append(channels, r)
		case strings.HasPrefix(key, "v1/"+sourcesKind+"/"):
			sources = append(sources, r)
		}
	}
	list, wrong = publishers(channels, sources)
	return list, wrong, nil
}

// Run keeps the copy until ctx ends.
func (e *Etcd) Run(ctx context.Context) {
	defer e.client.CloseIdleConnections()
	for at := 0; ctx.Err() == nil; {
		base := strings.TrimRight(e.cfg.URLs[at%len(e.cfg.URLs)], "/")
		if err := e.follow(ctx, base); err != nil {
			e.mu.Lock()
			e.err = fmt.Errorf("%s: %w", base, err)
			e.mu.Unlock()
			at++
		}
		loop.Wait(ctx, retryAfter)
	}
}

// follow lists what there is and watches what becomes of it. Without an error all is to be listed anew.
func (e *Etcd) follow(ctx context.Context, base string) error {
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
	return e.watch(ctx, base, token, revision+1)
}

// authenticate is the token of a user; empty without one.
func (e *Etcd) authenticate(ctx context.Context, base string) (token string, err error) {
	if e.cfg.User == "" {
		return "", nil
	}
	var answer struct{ Token string }
	err = e.ask(ctx, base, "/v3/auth/authenticate", "", map[string]any{"name": e.cfg.User, "password": e.cfg.Password},
		&answer)
	return answer.Token, err
}

// etcdKV is a key with its value.
type etcdKV struct{ Key, Value []byte }

// etcdHeader begins an answer. Revisions are numbers as text.
type etcdHeader struct {
	Revision json.Number
}

// list reads all records, as they were at one revision.
func (e *Etcd) list(ctx context.Context, base, token string) (records map[string][]byte, revision int64, err error) {
	records = map[string][]byte{}
	from := []byte(firstKey)
	for {
		asked := map[string]any{"key": from, "range_end": []byte(behindKeys), "limit": pageKeys}
		if revision > 0 {
			asked["revision"] = revision
		}
		var page struct {
			Header etcdHeader
			KVs    []etcdKV
			More   bool
		}
		if err := e.ask(ctx, base, "/v3/kv/range", token, asked, &page); err != nil {
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
		if len(records) > maxRecords {
			return nil, 0, fmt.Errorf("more than %d records of Dynamo's", maxRecords)
		}
		if !page.More || len(page.KVs) == 0 {
			return records, revision, nil
		}
		from = append(page.KVs[len(page.KVs)-1].Key, 0)
	}
}

// watch takes what changes from a revision on, until it is time to list anew: after watchFor, when etcd ends the watch,
// and when the revision is so old that etcd has compacted it.
func (e *Etcd) watch(ctx context.Context, base, token string, from int64) error {
	ctx, cancel := context.WithTimeout(ctx, watchFor)
	defer cancel()
	body, err := e.post(ctx, base, "/v3/watch", token, map[string]any{"create_request": map[string]any{
		"key": []byte(firstKey), "range_end": []byte(behindKeys), "start_revision": from}})
	for err == nil {
		var m struct {
			Result struct {
				Canceled bool
				Events   []struct {
					Type string
					KV   etcdKV
				}
			}
			Error *struct{ Message string }
		}
		if err = body.decode(&m); err != nil {
			break
		}
		if m.Result.Canceled || m.Error != nil {
			break // the listing that follows says what is wrong, if it still is
		}
		e.mu.Lock()
		for _, change := range m.Result.Events {
			if change.Type == "DELETE" {
				delete(e.records, string(change.KV.Key))
			} else if len(e.records) < maxRecords {
				e.records[string(change.KV.Key)] = change.KV.Value
			}
		}
		e.mu.Unlock()
	}
	if body != nil {
		body.Close()
	}
	if ctx.Err() != nil || errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// ask asks once, and reads the answer.
func (e *Etcd) ask(ctx context.Context, base, path, token string, asked, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	body, err := e.post(ctx, base, path, token, asked)
	if err != nil {
		return err
	}
	defer body.Close()
	return body.decode(answer)
}

// etcdBody is values of JSON, of which each is bounded.
type etcdBody struct {
	io.Closer
	limit *io.LimitedReader
	json  *json.Decoder
}

func (b *etcdBody) decode(into any) error {
	b.limit.N = maxPage
	err := b.json.Decode(into)
	if err != nil && b.limit.N == 0 {
		return fmt.Errorf("an answer of more than %d bytes", maxPage)
	}
	return err
}

func (e *Etcd) post(ctx context.Context, base, path, token string, asked any) (*etcdBody, error) {
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
		said, _ := io.ReadAll(io.LimitReader(answer.Body, 300)) // what can be read of it
		answer.Body.Close()
		return nil, fmt.Errorf("%s: %s: %s", path, answer.Status, bytes.TrimSpace(said))
	}
	limit := &io.LimitedReader{R: answer.Body}
	return &etcdBody{answer.Body, limit, json.NewDecoder(limit)}, nil
}
