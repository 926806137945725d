package sharedstore

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// MooncakeConfig configures a [Mooncake]. All zero values except Address select the defaults.
type MooncakeConfig struct {
	// Address is HOST:PORT of the admin server, the metrics port of mooncake_master; default port 9003.
	Address string

	// MaxKeys (default 1000) and MaxURL (default 64 KiB) limit a request. A master accepted 100,000 keys in 6.9 MB in a
	// test. A proxy may accept less, such as 8 KiB.
	MaxKeys, MaxURL int

	// Parallel is the number of concurrent requests on separate connections. The default 4 is the number of the
	// master's threads.
	Parallel int

	// Check is the interval of Watch's health checks; default 1 s.
	Check time.Duration

	// Dial, if not nil, opens the connections. nil dials any address.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// Changed, if not nil, is called from any goroutine if earlier answers of the master are invalid: the role or the
	// view has changed, or a connection broke. A restart is visible only as a broken connection.
	Changed func(why string)
}

// Mooncake queries a Mooncake master over HTTP. It implements [hicache.Store] and is safe for concurrent use.
//
// The protocol is defined in mooncake-store/src/master_admin_service.cpp of kvcache-ai/Mooncake: GET
// /batch_query_keys?keys=a,b,c. The commas are literal and all other bytes are percent-encoded, because the master
// first decodes and then splits. An answer grants no lease: an object may disappear right after. The objects of a dead
// client stay for ten seconds.
type Mooncake struct {
	cfg    MooncakeConfig
	asking *pool                  // for batches
	client *http.Client           // for other requests; it reports a lost connection at once
	down   atomic.Pointer[string] // why Watch considers the master down; nil: up, or no Watch
	unseen atomic.Uint64          // unexpected keys in replies
}

// NewMooncake returns a store. The store connects at the first request.
func NewMooncake(cfg MooncakeConfig) (*Mooncake, error) {
	if _, _, err := dial.SplitHostPort(cfg.Address); err != nil {
		return nil, fmt.Errorf("mooncake master: %w", err)
	}
	cfg.MaxKeys = cmp.Or(max(cfg.MaxKeys, 0), 1000)
	cfg.MaxURL = cmp.Or(max(cfg.MaxURL, 0), 64<<10)
	cfg.Parallel = cmp.Or(max(cfg.Parallel, 0), 4)
	cfg.Check = cmp.Or(max(cfg.Check, 0), time.Second)
	if cfg.Dial == nil {
		cfg.Dial = dial.Quick(nil).DialContext
	}
	m := &Mooncake{cfg: cfg}
	watched := func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := cfg.Dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &watchedConn{Conn: c, lost: func() { m.changed("a connection to the master broke") }}, nil
	}
	m.asking = newPool(cfg.Address, cfg.Parallel, func(ctx context.Context) (net.Conn, error) {
		return watched(ctx, "tcp", cfg.Address)
	})
	m.client = &http.Client{
		Transport: &http.Transport{
			MaxConnsPerHost: 2, MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute, DisableCompression: true,
			DialContext: watched,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return m, nil
}

func (m *Mooncake) changed(why string) {
	if m.cfg.Changed != nil {
		m.cfg.Changed(why)
	}
}

// Down returns the reason why Watch considers the master down, or "". Without Watch, it is always "".
func (m *Mooncake) Down() string {
	if why := m.down.Load(); why != nil {
		return *why
	}
	return ""
}

// Unseen returns the number of unexpected keys in replies. The store ignores unexpected keys.
func (m *Mooncake) Unseen() uint64 { return m.unseen.Load() }

// watchedConn reports a close by the other side.
type watchedConn struct {
	net.Conn
	closed atomic.Bool // by this side
	lost   func()
}

func (c *watchedConn) Close() error {
	c.closed.Store(true)
	return c.Conn.Close()
}

func (c *watchedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.judge(err)
	return n, err
}

func (c *watchedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.judge(err)
	return n, err
}

func (c *watchedConn) judge(err error) {
	late, is := errors.AsType[net.Error](err)
	if err != nil && !(is && late.Timeout()) && c.closed.CompareAndSwap(false, true) {
		c.lost()
	}
}

// checkMooncakeKey returns an error for a key that a request cannot have. The master splits keys at commas, and replies
// 503 to a request with a key that is not UTF-8.
func checkMooncakeKey(key string) error {
	switch {
	case key == "":
		return fmt.Errorf("mooncake: %w: it is empty", ErrKey)
	case strings.IndexByte(key, ',') >= 0:
		return fmt.Errorf("mooncake: %w: %.80q has a comma", ErrKey, key)
	case !utf8.ValidString(key):
		return fmt.Errorf("mooncake: %w: %.80q is not UTF-8", ErrKey, key)
	}
	return nil
}

const batchPath = "/batch_query_keys?keys="

// chunk is a request with the parsed reply. A master writes the keys in order.
type chunk struct {
	query string
	keys  []string // keys of all requests
	at    []int    // positions in keys of the requested keys, sorted by key

	said, there hicache.Bitmap // bit i is for at[i]
	next        int            // expected position in at, if the reply is in order
	unseen      uint64         // unexpected keys
}

// hear records the reply for a key. The last reply for a key counts.
func (c *chunk) hear(key string, ok bool) {
	i := c.next
	if i >= len(c.at) || c.keys[c.at[i]] != key {
		i, _ = slices.BinarySearchFunc(c.at, key, func(at int, key string) int { return cmp.Compare(c.keys[at], key) })
		if i == len(c.at) || c.keys[c.at[i]] != key {
			c.unseen++
			return
		}
	}
	for ; i < len(c.at) && c.keys[c.at[i]] == key; i++ {
		c.said.Set(i)
		c.there[i>>6] &^= 1 << (i & 63)
		if ok {
			c.there.Set(i)
		}
	}
	c.next = i
}

// forget discards the parsed reply.
func (c *chunk) forget() {
	c.said, c.there, c.next, c.unseen = hicache.NewBitmap(len(c.at)), hicache.NewBitmap(len(c.at)), 0, 0
}

// leastKeys is the minimum number of keys of a separate request.
const leastKeys = 128

// chunks divides keys into concurrent requests, because the master looks up the keys of a request one after the other.
// It skips keys that a request cannot have; bad is the error of the first skipped key.
func (m *Mooncake) chunks(keys []string) (out []chunk, bad error) {
	most := min(m.cfg.MaxKeys, max(leastKeys, (len(keys)+m.cfg.Parallel-1)/m.cfg.Parallel))
	var query strings.Builder
	var at []int
	end := func() {
		if len(at) > 0 {
			slices.SortFunc(at, func(a, b int) int { return cmp.Compare(keys[a], keys[b]) })
			out = append(out, chunk{query: query.String(), keys: keys, at: at})
			at = nil
			query.Reset()
		}
	}
	for i, key := range keys {
		if len(at) == 0 { // an estimate, since the keys have similar lengths
			n := min(most, len(keys)-i)
			query.Grow(min(m.cfg.MaxURL, n*(len(key)+1)))
			at = make([]int, 0, n)
		}
		var err error
		escaped := escapeKey(key)
		if len(escaped) != len(key) || key == "" { // escaped keys need a check
			err = checkMooncakeKey(key)
		}
		if err == nil && len(batchPath)+len(escaped) > m.cfg.MaxURL {
			err = fmt.Errorf("mooncake: %w: %.80q is longer than the maximum size of a request", ErrKey, key)
		}
		if err != nil {
			if bad == nil {
				bad = err
			}
			continue
		}
		if len(at) == most || len(batchPath)+query.Len()+1+len(escaped) > m.cfg.MaxURL {
			end()
		}
		if len(at) > 0 {
			query.WriteByte(',')
		}
		query.WriteString(escaped)
		at = append(at, i)
	}
	end()
	return out, bad
}

// escapeKey percent-encodes all bytes except letters, digits and "_.-".
func escapeKey(key string) string {
	for i := range len(key) {
		if !plainInQuery[key[i]] {
			return beyondQuery.Replace(url.QueryEscape(key))
		}
	}
	return key
}

// plainInQuery has the bytes that need no encoding.
var plainInQuery = func() (plain [256]bool) {
	for _, c := range "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_.-" {
		plain[c] = true
	}
	return plain
}()

// beyondQuery encodes bytes that url.QueryEscape encodes differently or not at all.
var beyondQuery = strings.NewReplacer("+", "%20", "~", "%7E")

func (m *Mooncake) Exists(ctx context.Context, keys []string) (present, known hicache.Bitmap, err error) {
	present, known = hicache.NewBitmap(len(keys)), hicache.NewBitmap(len(keys))
	if why := m.down.Load(); why != nil {
		return present, known, fmt.Errorf("mooncake: %w: %s", ErrStandby, *why)
	}
	list, bad := m.chunks(keys)
	var group errgroup.Group // no shared context: the answers of a request stay valid if another request fails
	group.SetLimit(m.cfg.Parallel)
	ask := func(i int) error { return m.batch(ctx, &list[i]) }
	if len(list) == 1 { // the usual case, without a further goroutine
		err = ask(0)
	} else {
		for i := range list {
			group.Go(func() error { return ask(i) })
		}
		err = group.Wait()
	}
	for i := range list {
		c := &list[i]
		for i, at := range c.at {
			if !c.said.Get(i) {
				continue
			}
			known.Set(at)
			if c.there.Get(i) {
				present.Set(at)
			}
		}
		if n := c.said.Count(); err == nil && n < len(c.at) {
			err = fmt.Errorf("mooncake: %w: the reply lacks %d of %d keys", ErrReply, len(c.at)-n, len(c.at))
		}
		m.unseen.Add(c.unseen)
	}
	return present, known, errors.Join(err, bad)
}

// batch requests the keys of a chunk and parses the reply.
func (m *Mooncake) batch(ctx context.Context, c *chunk) error {
	const perKey = 8 << 10 // size of a reply; some 300 bytes are usual
	c.forget()
	err := m.asking.get(ctx, batchPath+c.query, int64(64<<10+perKey*len(c.at)), func(body []byte, status int) error {
		if status != http.StatusOK {
			return refusal(status, body)
		}
		return readBatchReply(body, c)
	})
	if err != nil {
		c.forget()
		return fmt.Errorf("mooncake: query %d keys: %w", len(c.at), err)
	}
	return nil
}

// get sends a GET request and reads at most limit bytes of the reply.
func (m *Mooncake) get(ctx context.Context, path string, limit int64) (body []byte, status int, err error) {
	res, err := m.open(ctx, path)
	if err != nil {
		return nil, 0, err
	}
	defer res.Body.Close()
	body, err = io.ReadAll(io.LimitReader(res.Body, limit+1))
	if err != nil {
		return nil, 0, dial.Fixed(err)
	}
	if int64(len(body)) > limit {
		err = fmt.Errorf("%w: the reply has more than %d bytes", ErrReply, limit)
	}
	return body, res.StatusCode, err
}

// getJSON sends a GET request and decodes the JSON reply.
func (m *Mooncake) getJSON(ctx context.Context, path string, into any) error {
	body, status, err := m.get(ctx, path, 64<<10)
	if err == nil && status != http.StatusOK {
		err = refusal(status, body)
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, into); err != nil { // without the text of the error, which has a part of the body
		return fmt.Errorf("%w: the reply is not the JSON of a master", ErrReply)
	}
	return nil
}

// open sends a GET request. The caller closes the body.
func (m *Mooncake) open(ctx context.Context, path string) (*http.Response, error) {
	target := url.URL{Scheme: "http", Host: m.cfg.Address, Path: path}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		return nil, err
	}
	res, err := m.client.Do(req)
	if err != nil {
		return nil, dial.Fixed(err)
	}
	return res, nil
}

// refusal returns the error for a reply with a status other than 200. It contains nothing of the body: a worker's
// registration named the server, and clients get the error.
func refusal(status int, body []byte) error {
	var said struct {
		Code int `json:"error_code"`
	}
	if json.Unmarshal(body, &said) == nil && said.Code == -1011 { // UNAVAILABLE_IN_CURRENT_MODE
		return fmt.Errorf("%w: the master is unavailable in its current mode", ErrStandby)
	}
	return fmt.Errorf("%w: status %d", ErrReply, status)
}

// health is the reply of /health. A master without high availability has null in some fields, and they keep their
// values.
type health struct {
	Role   string `json:"role"`
	Ready  bool   `json:"service_ready"`
	Leader string `json:"leader_address"`
	View   int64  `json:"view_version"`
}

func (h *health) identity() string {
	return fmt.Sprintf("role %q, leader %q, view %d", h.Role, h.Leader, h.View)
}

// Health returns the identity of the master, and an error if the master does not serve.
func (m *Mooncake) Health(ctx context.Context) (identity string, err error) {
	h := health{View: -1}
	if err := m.getJSON(ctx, "/health", &h); err != nil {
		return "", fmt.Errorf("mooncake: health: %w", err)
	}
	if !h.Ready {
		return h.identity(), fmt.Errorf("mooncake: %w: the master is not ready", ErrStandby)
	}
	return h.identity(), nil
}

// Watch checks the health of the master until ctx is done. While the master is down, Exists fails at once with the
// reason.
func (m *Mooncake) Watch(ctx context.Context) {
	defer m.client.CloseIdleConnections()
	defer m.asking.closeIdle()
	last := ""
	tick := time.NewTicker(m.cfg.Check)
	defer tick.Stop()
	for {
		m.asking.closeBroken()
		asking, cancel := context.WithTimeout(ctx, max(m.cfg.Check, time.Second))
		identity, err := m.Health(asking)
		cancel()
		if ctx.Err() != nil {
			return
		}
		if identity != "" && identity != last {
			if last != "" || m.down.Load() != nil { // the identity before the outage is unknown
				m.changed("the master, its role or its view has changed")
			}
			last = identity
		}
		if err != nil {
			why := err.Error()
			if m.down.Swap(&why) == nil {
				m.changed(why)
			}
		} else {
			m.down.Store(nil)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Keys lists the store for a [Mirror] with /get_all_keys: the default tenant's objects, a key per line.
func (m *Mooncake) Keys(ctx context.Context, key func([]byte) bool) error {
	res, err := m.open(ctx, "/get_all_keys")
	if err != nil {
		return fmt.Errorf("mooncake: list all keys: %w", err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(res.Body, 64<<10)) // for the error
		return fmt.Errorf("mooncake: list all keys: %w", refusal(res.StatusCode, body))
	}
	for in := bufio.NewReaderSize(res.Body, 64<<10); ; {
		line, err := in.ReadSlice('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("mooncake: list all keys: %w: %w", ErrReply, dial.Fixed(err))
		}
		line = bytes.TrimSuffix(line, []byte("\n"))
		if len(line) > 0 && !key(line) || err != nil {
			return nil
		}
	}
}

// EventStatus is the state of a master's event stream.
type EventStatus struct {
	Enabled bool   `json:"enabled"`           // also false in builds without events
	Batches uint64 `json:"published_batches"` // batches of this process
	Dropped uint64 `json:"dropped_events"`    // unpublished events
}

// Events returns the state of the master's event stream.
func (m *Mooncake) Events(ctx context.Context) (s EventStatus, err error) {
	if err = m.getJSON(ctx, "/kv_events/status", &s); err != nil {
		err = fmt.Errorf("mooncake: state of the events: %w", err)
	}
	return s, err
}
