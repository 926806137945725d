package demo

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/child"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// L3Config configures the engines' shared store.
type L3Config struct {
	// Python is an interpreter with Mooncake's package (mooncake-transfer-engine) for a real master and a real client;
	// empty: the built-in master.
	Python string

	// Timeout is the longest wait of an answer for the store; 0 means no limit.
	Timeout time.Duration
}

// L3Result is the result for the shared store.
type L3Result struct {
	Master      string `json:"master"`       // "built-in" or "mooncake_master"
	PagesStored int    `json:"pages_stored"` // evicted by an engine, each once
	// of prompts, missing on their worker: computed without the store
	TokensMissed int `json:"tokens_missed"`
	TokensLoaded int `json:"tokens_loaded"` // of these, what it loads from the store, by its engine's rules
	Requests     int `json:"requests"`      // for which something is loaded
	Partial      int `json:"partial"`       // answers that do not say all, as the store took too long

	WithoutP50 float64 `json:"query_without_p50_us"` // of the same queries, if they do not ask for the store
	WithoutP99 float64 `json:"query_without_p99_us"`
	Longest    float64 `json:"query_longest_us"` // of those that do
}

// sharedStore is a master with a client that stores objects.
type sharedStore interface {
	address() string // HOST:PORT of the master's HTTP
	put(keys []string) error
	stop()
}

// builtIn is a master in this process.
type builtIn struct{ *mastersim.Master }

func (b builtIn) address() string         { return b.Addr() }
func (b builtIn) put(keys []string) error { b.Put(keys...); return nil }
func (b builtIn) stop()                   { b.Stop() }

//go:embed mooncake.py
var mooncakeScript string

// realMooncake is a process with a real client. A real master is its child.
type realMooncake struct {
	http   string
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	stderr bytes.Buffer
	once   sync.Once
}

// objectMemory is the memory of the real client for objects, in bytes: 4 bytes for an object and the allocator's
// overhead.
const objectMemory = 512 << 20

func startRealMooncake(python string) (*realMooncake, error) {
	var ports []string
	for range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0") // a free port
		if err != nil {
			return nil, err
		}
		defer l.Close()
		_, port, err := net.SplitHostPort(l.Addr().String())
		if err != nil {
			return nil, err
		}
		ports = append(ports, port)
		l.Close()
	}
	r := &realMooncake{http: "127.0.0.1:" + ports[1]}
	r.cmd = exec.Command(python, "-c", mooncakeScript, ports[0], ports[1], fmt.Sprint(objectMemory))
	r.cmd.Stderr = &r.stderr
	r.cmd.SysProcAttr = child.DiesWithUs()
	in, err := r.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	r.in, r.out = in, bufio.NewReader(out)
	if err := r.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a real Mooncake master: %w", err)
	}
	if err := r.expect("ready"); err != nil {
		r.stop()
		return nil, fmt.Errorf("start a real Mooncake master: %w", err)
	}
	return r, nil
}

// expect reads lines until the wanted line. The client also writes other lines.
func (r *realMooncake) expect(want string) error {
	guard := time.AfterFunc(patience, func() { r.cmd.Process.Kill() })
	defer guard.Stop()
	for {
		line, err := r.out.ReadString('\n')
		switch line = strings.TrimSpace(line); {
		case err != nil:
			r.cmd.Process.Kill()
			r.cmd.Wait()
			said := bytes.TrimSpace(r.stderr.Bytes())
			return fmt.Errorf("%w: %s", err, said[max(0, len(said)-1000):])
		case line == want:
			return nil
		case strings.HasPrefix(line, "put says"):
			return fmt.Errorf("the Mooncake client: %s", line)
		}
	}
}

func (r *realMooncake) address() string { return r.http }

func (r *realMooncake) put(keys []string) error {
	line, err := json.Marshal(keys)
	if err != nil {
		return err
	}
	if _, err := r.in.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("the Mooncake client: %w", err)
	}
	return r.expect("ok")
}

// stop ends the client. The client then ends the master.
func (r *realMooncake) stop() {
	r.once.Do(func() {
		r.in.Close()
		guard := time.AfterFunc(10*time.Second, func() { r.cmd.Process.Kill() })
		defer guard.Stop()
		r.cmd.Wait()
	})
}

// l3 is the shared store of a demonstration with a naive twin of the content. Engines put evicted blocks there.
type l3 struct {
	store  sharedStore
	result L3Result
	page   int             // tokens
	there  map[string]bool // objects
}

// startL3 starts a store and writes the indexer's configuration of the store.
func startL3(cfg Config, dir string) (l *l3, configFile string, err error) {
	l = &l3{page: cfg.BlockSize, there: map[string]bool{}}
	if cfg.L3.Python == "" {
		l.result.Master = "built-in"
		master, err := mastersim.Start("127.0.0.1:0")
		if err != nil {
			return nil, "", err
		}
		l.store = builtIn{master}
	} else {
		l.result.Master = "mooncake_master"
		if l.store, err = startRealMooncake(cfg.L3.Python); err != nil {
			return nil, "", err
		}
	}
	host, port, err := net.SplitHostPort(l.store.address())
	if err != nil {
		return l, "", err
	}
	config := hicache.SGLang{Backend: "mooncake", PageSize: cfg.BlockSize, TPSize: 1, PPSize: 1, IsMLA: true,
		Master: hicache.Master{Address: host}}
	if _, err := fmt.Sscan(port, &config.MetricsPort); err != nil {
		return l, "", err
	}
	text, err := json.Marshal(map[string]hicache.Config{model: {SGLang: &config}})
	if err != nil {
		return l, "", err
	}
	configFile = filepath.Join(dir, "l3.json")
	return l, configFile, os.WriteFile(configFile, text, 0o600)
}

// put stores the evicted pages of an engine.
func (l *l3) put(pages []hicache.PageHash) error {
	const most = 1000 // at once
	var keys []string
	for i, page := range pages {
		if key := pageKey(page); !l.there[key] {
			l.there[key] = true
			l.result.PagesStored++
			keys = append(keys, key)
		}
		if len(keys) == most || i == len(pages)-1 && len(keys) > 0 {
			if err := l.store.put(keys); err != nil {
				return err
			}
			keys = keys[:0]
		}
	}
	return nil
}

// pageKey returns the key of the single object of a page of an MLA model.
func pageKey(page hicache.PageHash) string { return hex.EncodeToString(page[:]) + "__k" }

// nextPage returns SGLang's name of a page: SHA-256 over the name of the page before, if any, and the tokens.
func nextPage(before *hicache.PageHash, tokens []uint32) hicache.PageHash {
	h := sha256.New()
	if before != nil {
		h.Write(before[:])
	}
	binary.Write(h, binary.LittleEndian, tokens)
	return hicache.PageHash(h.Sum(nil))
}

// truth returns the pages of a prompt that are in the store.
func (l *l3) truth(tokens []uint32) (there []bool) {
	var before *hicache.PageHash
	for len(tokens) >= l.page {
		page := nextPage(before, tokens[:l.page])
		there = append(there, l.there[pageKey(page)])
		before, tokens = &page, tokens[l.page:]
	}
	return there
}

// load returns the number of blocks that a worker with a given prefix would load: the unbroken run after the prefix, if
// the run has at least 256 tokens.
func (l *l3) load(there []bool, own uint32) (blocks uint32) {
	for int(own+blocks) < len(there) && there[own+blocks] {
		blocks++
	}
	if int(blocks)*l.page < 256 {
		return 0
	}
	return blocks
}

// check compares an answer about the store with the twin. The answer may contain only a part of the store. The result
// is empty without a difference.
func (l *l3) check(there []bool, answer *api.Answer) string {
	switch status := answer.L3.Status; {
	case status == api.L3OK:
		if load := l.load(there, 0); load != answer.L3.FromStart {
			return fmt.Sprintf("from the start %d blocks would be loaded, the index has %d", load, answer.L3.FromStart)
		}
	case (status == api.L3Partial || status == api.L3Unavailable) && strings.Contains(answer.L3.Reason, "within"):
		l.result.Partial++
	default:
		return fmt.Sprintf("the store's status is %q: %s", status, answer.L3.Reason)
	}
	total := 0
	for _, r := range answer.L3.Ranges {
		for i := r[0]; i < r[1]; i++ {
			if total++; !there[i] {
				return fmt.Sprintf("the index has block %d, which is not in the store", i)
			}
		}
	}
	if int(answer.L3.Total) != total {
		return fmt.Sprintf("%d blocks were found in the store, the index has %d", total, answer.L3.Total)
	}
	return ""
}

// count adds the missing blocks of a request's worker and the part that the worker would load.
func (l *l3) count(missed, loaded int) {
	l.result.TokensMissed += missed * l.page
	l.result.TokensLoaded += loaded * l.page
	if loaded > 0 {
		l.result.Requests++
	}
}

// applyPages updates the held and evicted pages from an engine's event. The caller holds w.mu.
func (w *worker) applyPages(a enginesim.Announced) {
	switch a.Kind {
	case events.Stored:
		var before *hicache.PageHash
		if a.HasParent {
			p := w.pages[a.Parent]
			before = &p
		}
		for i, b := range a.Blocks {
			p := nextPage(before, a.Tokens[i*w.page:(i+1)*w.page])
			w.pages[b] = p
			before = &p
		}
	case events.Removed:
		for _, b := range a.Blocks {
			w.evicted = append(w.evicted, w.pages[b])
			delete(w.pages, b)
		}
	}
}

// takeEvicted returns the pages that were evicted since the last call.
func (w *worker) takeEvicted() []hicache.PageHash {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.evicted
	w.evicted = nil
	return out
}
