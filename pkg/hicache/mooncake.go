package hicache

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
)

// MooncakeConfig says where a Mooncake master's admin server is and how it is asked. The zero value of all but Address
// takes the defaults.
type MooncakeConfig struct {
	// Address is HOST:PORT of the admin server, which mooncake_master calls its metrics port; 9003 unless configured.
	Address string

	// MaxKeys (default 1000) and MaxURL (default 64 KiB) bound one request. The master itself was seen to take 100,000
	// keys in 6.9 MB; what stands between may not. A proxy in between wants 8 KiB.
	MaxKeys, MaxURL int

	// Parallel is how many requests are under way at once, each on a connection of its own; default 4, as many as the
	// master has threads for them.
	Parallel int

	// Check is how often Watch asks after the master's health; default 1 s.
	Check time.Duration

	// Dial, if not nil, makes the connections. Without it any address is dialled.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// Changed, if not nil, is called, from any goroutine, when what the master answered before is worth nothing any
	// more: its role or view has changed, or a connection to it broke, which is all that can be seen of a restart.
	Changed func(why string)
}

// Mooncake asks a Mooncake master over HTTP. It implements [Store]. Any number of goroutines may use it.
//
// The protocol is that of mooncake-store/src/master_admin_service.cpp in kvcache-ai/Mooncake: GET
// /batch_query_keys?keys=a,b,c, where commas stand as they are and everything else is percent-encoded, for the master
// decodes first and splits then. The master's own answers grant no lease: an object may vanish right after, and those
// of a client that died stay for ten seconds more.
type Mooncake struct {
	cfg    MooncakeConfig
	asking *pool                  // of batches
	client *http.Client           // of all else; that it loses a connection is heard at once
	down   atomic.Pointer[string] // why Watch finds that the master does not serve; nil: it does, or nobody watches
	unseen atomic.Uint64          // keys in replies that nobody had asked for
}

// NewMooncake returns a store; it connects when it is first asked.
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

// Down is why Watch finds that the master does not serve; "" if it does, or nobody watches.
func (m *Mooncake) Down() string {
	if why := m.down.Load(); why != nil {
		return *why
	}
	return ""
}

// Unseen is how many keys replies have named that nobody had asked for; they are ignored.
func (m *Mooncake) Unseen() uint64 { return m.unseen.Load() }

// watchedConn tells when the other side ends it.
type watchedConn struct {
	net.Conn
	closed atomic.Bool // by us
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

// checkMooncakeKey refuses a key that the master cannot be asked for: it splits at commas, and one key that is not
// UTF-8 makes it answer 503 for all.
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

// chunk is one request, and what is read of its reply. A master writes keys in their order.
type chunk struct {
	query string
	keys  []string // of all requests
	at    []int    // positions in keys of those that are asked for, in the order of these

	said, there Bitmap // bit i stands for at[i]
	next        int    // in at, if keys come in order
	unseen      uint64 // keys that nobody had asked for
}

// hear takes what a reply says of a key. Of what it says twice the last counts.
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

// forget drops what was read of a reply.
func (c *chunk) forget() {
	c.said, c.there, c.next, c.unseen = NewBitmap(len(c.at)), NewBitmap(len(c.at)), 0, 0
}

// leastKeys is how many keys are worth a request of their own beside others.
const leastKeys = 128

// chunks cuts keys into requests: as many as may be under way at once, for the master looks keys of one up one after
// the other. Keys that must not be sent are left out; bad is about the first of them.
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
		if len(at) == 0 { // the others are about as long
			n := min(most, len(keys)-i)
			query.Grow(min(m.cfg.MaxURL, n*(len(key)+1)))
			at = make([]int, 0, n)
		}
		var err error
		escaped := escapeKey(key)
		if len(escaped) != len(key) || key == "" { // else there is nothing wrong with it
			err = checkMooncakeKey(key)
		}
		if err == nil && len(batchPath)+len(escaped) > m.cfg.MaxURL {
			err = fmt.Errorf("mooncake: %w: %.80q is longer than a request may be", ErrKey, key)
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

// escapeKey percent-encodes all but letters, digits and "_.-".
func escapeKey(key string) string {
	for i := range len(key) {
		if !plainInQuery[key[i]] {
			return beyondQuery.Replace(url.QueryEscape(key))
		}
	}
	return key
}

// plainInQuery are the bytes that stand for themselves.
var plainInQuery = func() (plain [256]bool) {
	for _, c := range "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_.-" {
		plain[c] = true
	}
	return plain
}()

// beyondQuery encodes what url.QueryEscape leaves as it is, or encodes otherwise.
var beyondQuery = strings.NewReplacer("+", "%20", "~", "%7E")

func (m *Mooncake) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	present, known = NewBitmap(len(keys)), NewBitmap(len(keys))
	if why := m.down.Load(); why != nil {
		return present, known, fmt.Errorf("mooncake: %w: %s", ErrStandby, *why)
	}
	list, bad := m.chunks(keys)
	var group errgroup.Group // not of a context: what one request learns stays true when another fails
	group.SetLimit(m.cfg.Parallel)
	ask := func(i int) error { return m.batch(ctx, &list[i]) }
	if len(list) == 1 { // the usual one: without another goroutine
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
			err = fmt.Errorf("mooncake: %w: it lacks %d of %d keys", ErrReply, len(c.at)-n, len(c.at))
		}
		m.unseen.Add(c.unseen)
	}
	return present, known, errors.Join(err, bad)
}

// batch asks for a chunk's keys, and has it hear the reply.
func (m *Mooncake) batch(ctx context.Context, c *chunk) error {
	const perKey = 8 << 10 // of a reply; some 300 bytes are usual
	c.forget()
	err := m.asking.get(ctx, batchPath+c.query, int64(64<<10+perKey*len(c.at)), func(body []byte, status int) error {
		if status != http.StatusOK {
			return refusal(status, body)
		}
		return readBatchReply(body, c)
	})
	if err != nil {
		c.forget()
		return fmt.Errorf("mooncake: ask for %d keys: %w", len(c.at), err)
	}
	return nil
}

// get asks for a path and reads at most limit bytes.
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
		err = fmt.Errorf("%w: it has more than %d bytes", ErrReply, limit)
	}
	return body, res.StatusCode, err
}

// getJSON asks for a path whose answer is JSON.
func (m *Mooncake) getJSON(ctx context.Context, path string, into any) error {
	body, status, err := m.get(ctx, path, 64<<10)
	if err == nil && status != http.StatusOK {
		err = refusal(status, body)
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, into); err != nil { // whose text repeats a part of the body
		return fmt.Errorf("%w: it is not the JSON of a master", ErrReply)
	}
	return nil
}

// open begins to read an answer, whose body the caller closes.
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

// refusal makes an error of a reply that is not 200. It repeats nothing of the body: a worker's registration named the
// server, and the error is in answers to clients.
func refusal(status int, body []byte) error {
	var said struct {
		Code int `json:"error_code"`
	}
	if json.Unmarshal(body, &said) == nil && said.Code == -1011 { // UNAVAILABLE_IN_CURRENT_MODE
		return fmt.Errorf("%w: the master is unavailable in its current mode", ErrStandby)
	}
	return fmt.Errorf("%w: status %d", ErrReply, status)
}

// health is what /health says. The fields that a master without high availability does not have are null, which leaves
// them as they are.
type health struct {
	Role   string `json:"role"`
	Ready  bool   `json:"service_ready"`
	Leader string `json:"leader_address"`
	View   int64  `json:"view_version"`
}

func (h *health) identity() string {
	return fmt.Sprintf("role %q, leader %q, view %d", h.Role, h.Leader, h.View)
}

// Health asks the master whether it serves, and what it is.
func (m *Mooncake) Health(ctx context.Context) (identity string, err error) {
	h := health{View: -1}
	if err := m.getJSON(ctx, "/health", &h); err != nil {
		return "", fmt.Errorf("mooncake: ask after its health: %w", err)
	}
	if !h.Ready {
		return h.identity(), fmt.Errorf("mooncake: %w: the master is not ready", ErrStandby)
	}
	return h.identity(), nil
}

// Watch asks after the master's health again and again until ctx ends. While the master does not answer or does not
// serve, Exists fails at once with the reason instead of waiting for it.
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
			if last != "" || m.down.Load() != nil { // who it was before it was away is not known
				m.changed("the master is another, or has another role or view")
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

// Keys lists the store for a [Mirror] by /get_all_keys, which lists the default tenant's objects, one key a line.
func (m *Mooncake) Keys(ctx context.Context, key func([]byte) bool) error {
	res, err := m.open(ctx, "/get_all_keys")
	if err != nil {
		return fmt.Errorf("mooncake: list all keys: %w", err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(res.Body, 64<<10)) // to say what it says
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

// EventStatus is what a master says of its event stream.
type EventStatus struct {
	Enabled bool   `json:"enabled"`           // false, too, where it was built without
	Batches uint64 `json:"published_batches"` // published by this process
	Dropped uint64 `json:"dropped_events"`    // not published
}

// Events asks the master what it has published.
func (m *Mooncake) Events(ctx context.Context) (s EventStatus, err error) {
	if err = m.getJSON(ctx, "/kv_events/status", &s); err != nil {
		err = fmt.Errorf("mooncake: ask after its events: %w", err)
	}
	return s, err
}
