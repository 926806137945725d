package sharedstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// startMaster starts the simulated master. Like a real master, it decodes first and then splits at commas.
func startMaster(t testing.TB) *mastersim.Master {
	f, err := mastersim.Start("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Stop)
	return f
}

// storeOf returns a store on a master.
func storeOf(t testing.TB, f *mastersim.Master, cfg MooncakeConfig) *Mooncake {
	cfg.Address = f.Addr()
	m, err := NewMooncake(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMooncakeAsksInChunks(t *testing.T) {
	f := startMaster(t)
	m := storeOf(t, f, MooncakeConfig{MaxKeys: 10, MaxURL: 400})
	keys := []string{"with,comma", "not\xff8", "", "a b", "a+b", "a%2Cb", "pre@m@tp_rank:0/ü\n\"",
		strings.Repeat("x", 500)}
	const odd = 8
	for i := range 100 {
		keys = append(keys, fmt.Sprintf("key-%d-%s", i, strings.Repeat("y", i%60)))
	}
	for i := 3; i < len(keys); i += 2 {
		f.Put(keys[i])
	}
	present, known, err := m.Exists(soon(t), keys)
	if !errors.Is(err, ErrKey) {
		t.Errorf("invalid keys: %v", err)
	}
	for i, key := range keys {
		asked := i >= 3 && i != 7
		if known.Get(i) != asked || present.Get(i) != (asked && f.Has(key)) {
			t.Errorf("%.20q: answered %v, present %v", key, known.Get(i), present.Get(i))
		}
	}
	for _, n := range f.Asked() {
		if n > 10 {
			t.Errorf("a request has %d keys", n)
		}
	}
	if present.Count() != (len(keys)-odd)/2+2 {
		t.Errorf("%d are there", present.Count())
	}
}

// TestMooncakeRequests: requests have literal commas between keys, and at most the permitted keys and bytes.
func TestMooncakeRequests(t *testing.T) {
	m, err := NewMooncake(MooncakeConfig{Address: "127.0.0.1:1", MaxKeys: 7, MaxURL: 300})
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 9))
	for range 300 {
		keys := make([]string, rng.IntN(60))
		for i := range keys {
			text := make([]byte, 1+rng.IntN(120))
			for j := range text {
				text[j] = byte(' ' + rng.IntN(95))
			}
			keys[i] = strings.ReplaceAll(string(text), ",", ";")
		}
		list, _ := m.chunks(keys)
		asked := map[int]bool{}
		for _, c := range list {
			path := batchPath + c.query
			parts := strings.Split(c.query, ",")
			if len(path) > 300 || len(c.at) > 7 || len(parts) != len(c.at) || len(c.at) == 0 {
				t.Fatalf("a request of %d bytes, %d keys, %d parts", len(path), len(c.at), len(parts))
			}
			for i, part := range parts {
				if parts[i], err = url.QueryUnescape(part); err != nil {
					t.Fatal(err)
				}
			}
			slices.Sort(parts)
			for i, part := range parts {
				if part != keys[c.at[i]] || asked[c.at[i]] {
					t.Fatalf("%q is the encoding of %q", part, keys[c.at[i]])
				}
				asked[c.at[i]] = true
			}
		}
		for i, key := range keys {
			if fits := len(batchPath)+len(escapeKey(key)) <= 300; asked[i] != fits {
				t.Fatalf("%q is requested: %v, fits: %v", key, asked[i], fits)
			}
		}
	}
}

// TestMooncakeParallelAndKeepAlive: the number of concurrent requests is limited, and connections are kept.
func TestMooncakeParallelAndKeepAlive(t *testing.T) {
	f := startMaster(t)
	const parallel = 3
	m := storeOf(t, f, MooncakeConfig{MaxKeys: 1, Parallel: parallel})
	var now, most atomic.Int64
	together := make(chan struct{})
	f.Fault(func(http.ResponseWriter, []string) bool {
		n := now.Add(1)
		defer now.Add(-1)
		for {
			old := most.Load()
			if n <= old || most.CompareAndSwap(old, n) {
				break
			}
		}
		if n == parallel && most.Load() == parallel {
			select {
			case <-together:
			default:
				close(together)
			}
		}
		select { // the first requests wait for each other
		case <-together:
		case <-time.After(patience):
		}
		return false
	})
	keys := make([]string, 40)
	for i := range keys {
		keys[i] = fmt.Sprint("k", i)
	}
	for range 5 {
		if _, known, err := m.Exists(soon(t), keys); err != nil || known.Count() != len(keys) {
			t.Fatalf("%v, %d answered", err, known.Count())
		}
	}
	if n := most.Load(); n != parallel {
		t.Errorf("%d concurrent requests, want %d", n, parallel)
	}
	if n := f.Dialled(); n > 4*parallel || len(f.Asked()) != 5*len(keys) {
		t.Errorf("%d connections for %d requests", n, len(f.Asked()))
	}
}

// TestMooncakeShares: many keys are divided into the maximum number of concurrent requests, few keys are a single
// request.
func TestMooncakeShares(t *testing.T) {
	t.Parallel()
	m, err := NewMooncake(MooncakeConfig{Address: "127.0.0.1:1", MaxKeys: 300})
	if err != nil {
		t.Fatal(err)
	}
	for n, want := range map[int][]int{1: {1}, 128: {128}, 129: {128, 1}, 600: {150, 150, 150, 150},
		1300: {300, 300, 300, 300, 100}} {
		keys := make([]string, n)
		for i := range keys {
			keys[i] = fmt.Sprint("k", i)
		}
		list, err := m.chunks(keys)
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for _, c := range list {
			got = append(got, len(c.at))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%d keys are requested as %d, want %d", n, got, want)
		}
	}
}

// TestMooncakeOneDeadlineForAll: all requests share a deadline. Exists returns the received answers, and does not
// wait for the others.
func TestMooncakeOneDeadlineForAll(t *testing.T) {
	t.Parallel()
	f := startMaster(t)
	release := make(chan struct{})
	defer close(release)
	ctx, over := context.WithCancel(soon(t))
	f.Fault(func(_ http.ResponseWriter, keys []string) bool {
		switch keys[0] {
		case "k0":
			return false
		case "k2": // the request for k2 follows the answer for k0, since k1 has none
			over()
		}
		<-release
		return false
	})
	m := storeOf(t, f, MooncakeConfig{MaxKeys: 1, Parallel: 2})
	keys := make([]string, 30)
	for i := range keys {
		keys[i] = fmt.Sprint("k", i)
	}
	if _, _, err := m.Exists(soon(t), keys[:1]); err != nil {
		t.Fatal(err)
	}
	_, known, err := m.Exists(ctx, keys) // does not wait for the others
	if !errors.Is(err, context.Canceled) || known.Count() != 1 || !known.Get(0) {
		t.Errorf("%v, %d answered", err, known.Count())
	}
}

// TestMooncakeFaults: a faulty master causes an error, never a wrong answer.
func TestMooncakeFaults(t *testing.T) {
	f := startMaster(t)
	f.Put("a")
	reply := func(body string) func(http.ResponseWriter, []string) bool {
		return func(w http.ResponseWriter, _ []string) bool { fmt.Fprint(w, body); return true }
	}
	for name, c := range map[string]struct {
		fault func(http.ResponseWriter, []string) bool
		want  error
		known string
	}{
		"half an answer": {reply(`{"success":true,"data":{"a":{"ok":true}}}`), ErrReply, "a"},
		"cut off":        {reply(`{"success":true,"data":{"a":{"ok":tr`), ErrReply, ""},
		"another type":   {reply(`{"success":true,"data":{"a":{"ok":"yes"}}}`), ErrReply, ""},
		"a list":         {reply(`[]`), ErrReply, ""},
		"nulls":          {reply(`{"success":true,"data":{"a":null,"b":{"ok":null}}}`), ErrReply, ""},
		"no data":        {reply(`{"success":true,"data":null}`), ErrReply, ""},
		"no success":     {reply(`{"data":{"a":{"ok":true},"b":{"ok":true}}}`), ErrReply, ""},
		"failure":        {reply(`{"success":false,"error":"no"}`), ErrReply, ""},
		"nothing":        {reply(``), ErrReply, ""},
		"unasked":        {reply(`{"success":true,"data":{"z":{"ok":true},"y":{"ok":true}}}`), ErrReply, ""},
		"too much":       {reply(`{"success":true,"data":{}}` + strings.Repeat(" ", 1<<20)), ErrReply, ""},
		"500": {func(w http.ResponseWriter, _ []string) bool { w.WriteHeader(500); return true }, ErrReply,
			""},
		"standby": {func(w http.ResponseWriter, _ []string) bool {
			w.WriteHeader(503)
			fmt.Fprint(w, `{"success":false,"error_code":-1011}`)
			return true
		}, ErrStandby, ""},
		"words":     {reply(`SECRET`), ErrReply, ""},
		"a word":    {reply(`{"success":true,"data":{"a":{"ok":"SECRET"}}}`), ErrReply, ""},
		"an error":  {reply(`{"success":false,"error":"SECRET"}`), ErrReply, ""},
		"no number": {reply(`{"success":true,"data":98765432109876}`), ErrReply, ""},
		"401 with words": {func(w http.ResponseWriter, _ []string) bool {
			w.WriteHeader(401)
			fmt.Fprint(w, "SECRET")
			return true
		}, ErrReply, ""},
		"standby with words": {func(w http.ResponseWriter, _ []string) bool {
			w.WriteHeader(503)
			fmt.Fprint(w, `{"success":false,"error_code":-1011,"error_message":"SECRET"}`)
			return true
		}, ErrStandby, ""},
		"another protocol": {func(w http.ResponseWriter, _ []string) bool {
			if c, _, err := http.NewResponseController(w).Hijack(); err == nil {
				fmt.Fprint(c, "SSH-2.0-SECRET\r\n")
				c.Close()
			}
			return true
		}, ErrReply, ""},
		"connection reset": {func(http.ResponseWriter, []string) bool { panic(http.ErrAbortHandler) }, nil, ""},
	} {
		f.Fault(c.fault)
		m := storeOf(t, f, MooncakeConfig{})
		present, known, err := m.Exists(soon(t), []string{"a", "b"})
		if err == nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && (strings.Contains(err.Error(), "SECRET") || strings.Contains(err.Error(), "98765")) {
			t.Errorf("%s: the error has a part of the master's reply: %v", name, err)
		}
		if known.Get(0) != (c.known == "a") || known.Get(1) || present.Get(1) {
			t.Errorf("%s: present %b, answered %b", name, present, known)
		}
		if name == "unasked" && m.Unseen() != 2 {
			t.Errorf("%d unexpected keys", m.Unseen())
		}
	}
}

// TestMooncakeAddress: the address cannot change the request, and Dial opens the connections.
func TestMooncakeAddress(t *testing.T) {
	for address, want := range map[string]string{
		"mooncake": "mooncake:9003", "mooncake:50051": "mooncake:9003", "[::1]:50051": "[::1]:9003", "[::1]": "[::1]:9003",
		"::1": "[::1]:9003", "10.0.0.1:1": "10.0.0.1:9003", "": "",

		"a/b?x": "!", "a/b:1": "!", "a?x:1": "!", "a#x": "!", "u:p@a:1": "!", "http://a:1": "!", "a b": "!", "a\r\nb:1": "!",
		"fe80::1%eth0": "!", "[fe80::1%eth0]:1": "!", "a:x": "!", "a:1:2": "!", "k8s://a/b": "!", "/etc/passwd": "!",
	} {
		for _, c := range []hicache.Config{{VLLM: &hicache.VLLM{Master: hicache.Master{Address: address}}},
			{SGLang: &hicache.SGLang{Backend: "mooncake", Master: hicache.Master{Address: address}}}} {
			if err := c.CheckMaster(); (err != nil) != (want == "!") || err == nil && c.Where() != want ||
				err != nil && c.Where() != "" {
				t.Errorf("%q is at %q, %v; want %q", address, c.Where(), err, want)
			}
		}
	}
	refused := errors.New("refused")
	m, err := NewMooncake(MooncakeConfig{Address: "127.0.0.1:1",
		Dial: func(context.Context, string, string) (net.Conn, error) { return nil, refused }})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := m.Exists(soon(t), []string{"a"}); !errors.Is(err, refused) {
		t.Errorf("a query does not use Dial: %v", err)
	}
	if _, err := m.Health(soon(t)); !errors.Is(err, refused) {
		t.Errorf("the health check does not use Dial: %v", err)
	}
}

// TestMooncakeIsWatched: Watch reports a broken connection, a changed role and silence.
func TestMooncakeIsWatched(t *testing.T) {
	f := startMaster(t)
	changes := make(chan string, 100)
	m := storeOf(t, f, MooncakeConfig{Check: 5 * time.Millisecond, Changed: func(why string) { changes <- why }})
	expect := func(want string) {
		t.Helper()
		for deadline := time.After(patience); ; {
			select {
			case why := <-changes:
				if strings.Contains(why, want) {
					return
				}
			case <-deadline:
				t.Fatalf("no report of %q", want)
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { m.Watch(ctx); close(ended) }()
	for ctx := soon(t); ; { // the first health check may fail after a pause of the process
		_, _, err := m.Exists(ctx, []string{"a"})
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
	f.Drop()
	expect("connection")
	f.SetRole("standby")
	expect("its role")
	testkit.Eventually(t, "the standby refuses", func() (bool, string) {
		_, _, err := m.Exists(soon(t), []string{"a"})
		return errors.Is(err, ErrStandby) && m.Down() != "", fmt.Sprintf("%v, down %q", err, m.Down())
	})
	f.SetRole("leader")
	testkit.Eventually(t, "the leader answers", func() (bool, string) {
		_, _, err := m.Exists(soon(t), []string{"a"})
		return err == nil && m.Down() == "", fmt.Sprintf("%v, down %q", err, m.Down())
	})
	cancel()
	<-ended
}

func TestMooncakeKeepsTheDeadline(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and sends nothing
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	m, err := NewMooncake(MooncakeConfig{Address: l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, known, err := m.Exists(ctx, []string{"a"}); !errors.Is(err, context.DeadlineExceeded) || known.Count() > 0 {
		t.Fatalf("%v, %d answered", err, known.Count())
	}
	if _, err := NewMooncake(MooncakeConfig{Address: "nowhere"}); err == nil {
		t.Error("an address without a port is accepted")
	}
}
