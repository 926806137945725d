package hicache

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// startMaster starts the built-in master, which decodes first and splits at commas then, as a real one does.
func startMaster(t testing.TB) *mastersim.Master {
	f, err := mastersim.Start("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Stop)
	return f
}

// storeOf is a store that asks a master.
func storeOf(t testing.TB, f *mastersim.Master, cfg MooncakeConfig) *Mooncake {
	cfg.Address = f.Addr()
	m, err := NewMooncake(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// patience is how long a test waits for what must come. The machine may stand still for minutes.
const patience = 4 * time.Minute

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
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
		t.Errorf("keys that cannot be asked for: %v", err)
	}
	for i, key := range keys {
		asked := i >= 3 && i != 7
		if known.Get(i) != asked || present.Get(i) != (asked && f.Has(key)) {
			t.Errorf("%.20q: known %v, present %v", key, known.Get(i), present.Get(i))
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

// Requests have raw commas between keys, and no more keys and bytes than they may.
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
				if text, err := url.QueryUnescape(part); err != nil || text != keys[c.at[i]] || asked[c.at[i]] {
					t.Fatalf("%q stands for %q (%v)", part, keys[c.at[i]], err)
				}
				asked[c.at[i]] = true
			}
		}
		for i, key := range keys {
			if fits := len(batchPath)+len(escapeKey(key)) <= 300; asked[i] != fits {
				t.Fatalf("%q is asked for: %v, fits: %v", key, asked[i], fits)
			}
		}
	}
}

// However much is asked for, only so many requests are under way at once, on connections that are kept.
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
		select { // the first ones wait for each other
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
			t.Fatalf("%v, %d known", err, known.Count())
		}
	}
	if n := most.Load(); n != parallel {
		t.Errorf("%d requests were under way at once, want %d", n, parallel)
	}
	if n := f.Dialled(); n > 4*parallel || len(f.Asked()) != 5*len(keys) {
		t.Errorf("%d connections for %d requests", n, len(f.Asked()))
	}
}

// TestMooncakeShares: many keys are asked for in as many requests as may be under way at once, few in one.
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
			t.Errorf("%d keys are asked for as %d, want %d", n, got, want)
		}
	}
}

// One deadline is for all requests: what was answered in time is known, the rest is not, and nobody waits longer.
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
		case "k2": // it is asked for when k0 is known, since k1 is not
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
	_, known, err := m.Exists(ctx, keys) // and does not wait for the rest
	if !errors.Is(err, context.Canceled) || known.Count() != 1 || !known.Get(0) {
		t.Errorf("%v, %d known", err, known.Count())
	}
}

// A master that is ill makes an error, never a wrong answer.
func TestMooncakeFaults(t *testing.T) {
	f := startMaster(t)
	f.Put("a")
	say := func(body string) func(http.ResponseWriter, []string) bool {
		return func(w http.ResponseWriter, _ []string) bool { fmt.Fprint(w, body); return true }
	}
	for name, c := range map[string]struct {
		fault func(http.ResponseWriter, []string) bool
		want  error
		known string
	}{
		"half an answer": {say(`{"success":true,"data":{"a":{"ok":true}}}`), ErrReply, "a"},
		"cut off":        {say(`{"success":true,"data":{"a":{"ok":tr`), ErrReply, ""},
		"another type":   {say(`{"success":true,"data":{"a":{"ok":"yes"}}}`), ErrReply, ""},
		"a list":         {say(`[]`), ErrReply, ""},
		"nulls":          {say(`{"success":true,"data":{"a":null,"b":{"ok":null}}}`), ErrReply, ""},
		"no data":        {say(`{"success":true,"data":null}`), ErrReply, ""},
		"no success":     {say(`{"data":{"a":{"ok":true},"b":{"ok":true}}}`), ErrReply, ""},
		"failure":        {say(`{"success":false,"error":"no"}`), ErrReply, ""},
		"nothing":        {say(``), ErrReply, ""},
		"unasked":        {say(`{"success":true,"data":{"z":{"ok":true},"y":{"ok":true}}}`), ErrReply, ""},
		"too much":       {say(`{"success":true,"data":{}}` + strings.Repeat(" ", 1<<20)), ErrReply, ""},
		"500": {func(w http.ResponseWriter, _ []string) bool { w.WriteHeader(500); return true }, ErrReply,
			""},
		"standby": {func(w http.ResponseWriter, _ []string) bool {
			w.WriteHeader(503)
			fmt.Fprint(w, `{"success":false,"error_code":-1011}`)
			return true
		}, ErrStandby, ""},
		"connection reset": {func(http.ResponseWriter, []string) bool { panic(http.ErrAbortHandler) }, nil, ""},
	} {
		f.Fault(c.fault)
		m := storeOf(t, f, MooncakeConfig{})
		present, known, err := m.Exists(soon(t), []string{"a", "b"})
		if err == nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if known.Get(0) != (c.known == "a") || known.Get(1) || present.Get(1) {
			t.Errorf("%s: present %b, known %b", name, present, known)
		}
		if name == "unasked" && m.Unseen() != 2 {
			t.Errorf("%d keys that nobody asked for", m.Unseen())
		}
	}
}

// A deadline is kept, and a broken connection, another role and silence are told.
func TestMooncakeIsWatched(t *testing.T) {
	f := startMaster(t)
	told := make(chan string, 100)
	m := storeOf(t, f, MooncakeConfig{Check: 5 * time.Millisecond, Changed: func(why string) { told <- why }})
	hear := func(want string) {
		t.Helper()
		for deadline := time.After(patience); ; {
			select {
			case why := <-told:
				if strings.Contains(why, want) {
					return
				}
			case <-deadline:
				t.Fatalf("not told of %q", want)
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { m.Watch(ctx); close(ended) }()
	for ctx := soon(t); ; { // it has no connection before it is asked; who stood still finds the master silent once
		_, _, err := m.Exists(ctx, []string{"a"})
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
	f.Drop()
	hear("connection")
	f.SetRole("standby")
	hear("standby")
	for deadline := time.Now().Add(patience); ; {
		_, _, err := m.Exists(soon(t), []string{"a"})
		if errors.Is(err, ErrStandby) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("a standby answers: %v", err)
		}
	}
	cancel()
	<-ended
}

func TestMooncakeKeepsTheDeadline(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and says nothing
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
		t.Fatalf("%v, %d known", err, known.Count())
	}
	if _, err := NewMooncake(MooncakeConfig{Address: "nowhere"}); err == nil {
		t.Error("an address without a port")
	}
}

func TestFolder(t *testing.T) {
	dir := t.TempDir()
	s := &SGLang{Backend: "file", PageSize: 4, TPSize: 2, PPSize: 2, ModelName: "org/m", Directory: dir}
	pages := s.PageHashes(nil, []uint32{1, 2, 3, 4, 5, 6, 7, 8}, Space{})
	keys := s.FileKeys(pages)
	if want := pages[0].String() + "_org-m_1_2_2_0"; keys.PerPage != 4 || keys.Keys[1] != want {
		t.Fatalf("%q, want %q", keys.Keys[1], want)
	}
	for _, key := range keys.Keys[:5] {
		if err := os.WriteFile(filepath.Join(dir, key+".bin"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	present, known, err := NewFolder(dir).Exists(soon(t), append(keys.Keys, "../x"))
	if !errors.Is(err, ErrKey) || present.Count() != 5 || known.Count() != 8 {
		t.Errorf("%d present, %d known, %v", present.Count(), known.Count(), err)
	}
	if _, known, err := NewFolder(filepath.Join(dir, "none")).Exists(soon(t), keys.Keys); err != nil ||
		known.Count() != 8 {
		t.Errorf("a folder that is not there: %d known, %v", known.Count(), err)
	}
	over, cancel := context.WithCancel(context.Background())
	cancel()
	if _, known, err := NewFolder(dir).Exists(over, keys.Keys); !errors.Is(err, context.Canceled) || known.Count() > 0 {
		t.Errorf("too late: %d known, %v", known.Count(), err)
	}
}

// memory is a store in memory.
type memory struct {
	mu      sync.Mutex
	objects map[string]bool
	keys    atomic.Int64
	calls   atomic.Int64
	gate    chan struct{} // if not nil, calls wait for it
	err     error
}

func (m *memory) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	m.calls.Add(1)
	m.keys.Add(int64(len(keys)))
	if m.gate != nil {
		<-m.gate
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	present, known = NewBitmap(len(keys)), NewBitmap(len(keys))
	if m.err != nil {
		return present, known, m.err
	}
	for i, k := range keys {
		known.Set(i)
		if m.objects[k] {
			present.Set(i)
		}
	}
	return present, known, nil
}

// runs is how many runs some pages are remembered in.
func runs(pages int) (n int) {
	for first := 0; first < pages; first += runLength(first) {
		if runOf(first) != n || runOf(min(pages, first+runLength(first))-1) != n {
			panic("runs are not numbered in order")
		}
		n++
	}
	return n
}

// Two prompts share the fingerprints of those runs whose pages have the same names, and no others.
func TestMarksAgainstNames(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	salts := []string{"", "x"}
	for range 1000 {
		s := &SGLang{Backend: "mooncake", PageSize: 1 + rng.IntN(4), TPSize: 1, PPSize: 1, IsEagle: rng.IntN(2) == 0}
		a := make([]uint32, rng.IntN([]int{60, 60, 60, 1300}[rng.IntN(4)]*s.PageSize))
		for i := range a {
			a[i] = rng.Uint32N(3)
		}
		b := slices.Clone(a)
		if len(b) > 0 && rng.IntN(4) > 0 {
			b = b[:1+rng.IntN(len(b))]
			b[rng.IntN(len(b))] = rng.Uint32N(3)
		}
		lane := func(tokens []uint32) (Lane, []PageHash) {
			var space Space
			if rng.IntN(4) == 0 {
				space.CacheSalt = &salts[rng.IntN(2)]
			}
			return s.lane(tokens, space), s.PageHashes(nil, tokens, space)
		}
		x, names := lane(a)
		y, others := lane(b)
		if x.Pages != len(names) || len(x.fingerprints) != runs(len(names)) {
			t.Fatalf("%d pages, %d fingerprints, %d names", x.Pages, len(x.fingerprints), len(names))
		}
		for r := range min(len(x.fingerprints), len(y.fingerprints)) {
			end := min(r+1, 64)*16 + max(r-63, 0)*64
			p, q := min(x.Pages, end), min(y.Pages, end)
			if same := p == q && names[p-1] == others[q-1]; (x.fingerprints[r] == y.fingerprints[r]) != same {
				t.Fatalf("run %d: the names are the same: %v, the fingerprints: %v\n%+v\n%v\n%v", r, same, !same, s, a, b)
			}
		}
		for from := range x.Pages {
			if rng.IntN(x.Pages) > 2 {
				continue
			}
			to := from + 1 + rng.IntN(x.Pages-from)
			if got, want := x.Names(from, to).Keys, s.Keys(names[from:to]).Keys; !slices.Equal(got, want) {
				t.Fatalf("pages %d to %d: %v, want %v", from, to, got, want)
			}
		}
	}
}

// all has a cache asked for all pages of a lane.
func all(c *Cache, l Lane, from int) *Question {
	q := c.Begin(l, from)
	q.Ask(0, l.Pages)
	return q
}

// clock is one that the test holds.
type clock struct{ at atomic.Int64 }

func (c *clock) now() time.Time          { return time.Unix(0, c.at.Load()) }
func (c *clock) advance(d time.Duration) { c.at.Add(int64(d)) }

func lane(n int) Lane {
	s := &SGLang{Backend: "mooncake", PageSize: 1, TPSize: 1, PPSize: 1}
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	return s.lane(tokens, Space{})
}

// Against the store itself: what the cache says was so within its lives, whatever comes and goes.
func TestCacheAgainstStore(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		c := &clock{}
		c.advance(time.Hour)
		const pages = 400
		l := lane(pages)
		m := &memory{objects: map[string]bool{}}
		cache := NewCache(m, CacheConfig{HitLife: 10 * time.Second, MissLife: 3 * time.Second, Now: c.now})
		keys := l.Names(0, pages)
		type change struct {
			at   time.Time
			what bool
		}
		history := make([][]change, l.Pages)
		page := func(i int) bool { return m.objects[keys.Keys[2*i]] && m.objects[keys.Keys[2*i+1]] }
		for i := range history {
			history[i] = []change{{time.Unix(0, 0), false}}
		}
		for range 300 {
			c.advance(time.Duration(rng.IntN(2000)) * time.Millisecond)
			k := rng.IntN(len(keys.Keys))
			m.objects[keys.Keys[k]] = rng.IntN(3) > 0
			history[k/2] = append(history[k/2], change{c.now(), page(k / 2)})
			from, to := rng.IntN(pages), 1+rng.IntN(pages)
			from = min(from, to)
			found := all(cache, lane(to), from).Wait(soon(t))
			if found.Err != nil {
				t.Fatal(found.Err)
			}
			for i := range to {
				if found.Known.Get(i) != (i >= from) {
					t.Fatalf("seed %d: page %d of %d to %d: known %v", seed, i, from, to, found.Known.Get(i))
				}
				if i < from {
					continue
				}
				life := 3 * time.Second
				if found.Present.Get(i) {
					life = 10 * time.Second
				}
				ok := false // was it so at some moment within the life?
				for h := len(history[i]) - 1; h >= 0 && !ok; h-- {
					ok = history[i][h].what == found.Present.Get(i)
					if c.now().Sub(history[i][h].at) > life {
						break
					}
				}
				if !ok {
					t.Fatalf("seed %d: page %d is said to be %v and has not been for %v", seed, i, found.Present.Get(i),
						life)
				}
			}
			if found.Age > 10*time.Second {
				t.Fatalf("an answer is %v old", found.Age)
			}
		}
	}
}

// The memory of answers is bounded in bytes, and one run takes no more than is reckoned for it.
func TestCacheIsBoundedInBytes(t *testing.T) {
	const runs = 20_000
	fill := func(c *Cache, n int) {
		for i := range n {
			f := &flight{done: make(chan struct{}), runs: map[runKey]cachedRun{}}
			todo := []ask{{key: runKey{fingerprint: fingerprint{byte(i), byte(i >> 8), byte(i >> 16)}}, pages: 1,
				names: PageKeys{Keys: []string{"k"}, PerPage: 1}}}
			c.flights++
			c.request(f, todo, c.epoch)
		}
	}
	heap := func() uint64 {
		runtime.GC()
		runtime.GC() // what pools have kept goes with the second
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	c := NewCache(&memory{}, CacheConfig{Bytes: runs * runBytes})
	fill(c, 3*runs)
	took := int64(heap()) - int64(before)
	if c.Stats().Runs != runs || took > runs*runBytes*5/4 {
		t.Errorf("%d runs are remembered in %d bytes, want %d in %d", c.Stats().Runs, took, runs, runs*runBytes)
	}
	t.Logf("%d bytes a run", took/runs)
	runtime.KeepAlive(c)
}

func TestCacheAsksOnce(t *testing.T) {
	m := &memory{objects: map[string]bool{}, gate: make(chan struct{})}
	c := NewCache(m, CacheConfig{Flights: 1, Patience: time.Minute, HitLife: time.Hour, MissLife: time.Hour})
	l := lane(40)
	for _, k := range l.Names(0, 40).Keys {
		m.objects[k] = true
	}
	late, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if f := all(c, l, 0).Wait(late); !errors.Is(f.Err, context.DeadlineExceeded) || f.Known.Count() > 0 {
		t.Fatalf("a slow store: %v, %d known", f.Err, f.Known.Count())
	}
	other := l
	other.ID = 1
	if f := all(c, other, 0).Wait(soon(t)); !errors.Is(f.Err, errBusy) {
		t.Fatalf("one too many: %v", f.Err)
	}
	waiting := []*Question{all(c, l, 0), all(c, l, 0)}
	close(m.gate)
	for _, q := range waiting {
		if f := q.Wait(soon(t)); f.Err != nil || f.Present.Count() != 40 {
			t.Fatalf("%v, %d present", f.Err, f.Present.Count())
		}
	}
	if f := all(c, l, 0).Wait(late); f.Err != nil || f.Present.Count() != 40 {
		t.Fatalf("what is remembered takes no time: %v, %d present", f.Err, f.Present.Count())
	}
	if m.keys.Load() != 80 || m.calls.Load() != 2 {
		t.Errorf("%d keys in %d calls", m.keys.Load(), m.calls.Load())
	}
	c.Forget()
	m.mu.Lock()
	m.objects = map[string]bool{}
	m.mu.Unlock()
	if f := all(c, l, 0).Wait(soon(t)); f.Present.Count() != 0 || m.keys.Load() != 120 {
		t.Errorf("after Forget: %d present, %d keys: a miss costs one", f.Present.Count(), m.keys.Load())
	}
	c.Forget()
	m.err = errors.New("broken")
	if f := all(c, l, 0).Wait(soon(t)); f.Err == nil || c.Stats().Runs != 0 || c.Stats().Failed == 0 {
		t.Errorf("a broken store: %v, %d remembered", f.Err, c.Stats().Runs)
	}
}

// Map and Rule say what a controller does that walks batch by batch.
func TestMapAgainstController(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 3000 {
		n := rng.IntN(400)
		present, known, pages := NewBitmap(n), NewBitmap(n).fill(n), make([]bool, n)
		density := []float64{rng.Float64(), 0.99, 1}[rng.IntN(3)]
		for i := range n {
			if rng.Float64() < density {
				pages[i] = true
				present.Set(i)
			}
		}
		s := &SGLang{PageSize: 1 + rng.IntN(100), PrefetchThreshold: rng.IntN(2) * rng.IntN(1000),
			PrefetchCapacity: rng.IntN(2) * rng.IntN(5000)}
		m := NewMap(n, present, known)
		total := 0
		var ranges [][2]uint32
		for i := range pages {
			if !pages[i] {
				continue
			}
			total++
			if i == 0 || !pages[i-1] {
				ranges = append(ranges, [2]uint32{uint32(i)})
			}
			ranges[len(ranges)-1][1] = uint32(i + 1)
		}
		if int(m.Total()) != total || !slices.Equal(m.Ranges(), ranges) {
			t.Fatalf("%v: total %d, ranges %v", pages, m.Total(), m.Ranges())
		}
		for have := range n + 2 {
			got, why := m.Load(uint32(have), s.Rule())
			there, would := wouldLoad(s, pages, have)
			if int(got) != would || (would < there) != (why == BeyondThreshold || why == BeyondCapacity) {
				t.Fatalf("%+v %v from %d: %d (%s), want %d of %d", s, pages, have, got, why, would, there)
			}
		}
	}
}

// The merge for 256 workers.
func BenchmarkMerge256(b *testing.B) {
	const blocks = 767
	present, known := NewBitmap(blocks).fill(blocks), NewBitmap(blocks).fill(blocks)
	rule := (&SGLang{PageSize: 16}).Rule()
	b.ReportAllocs()
	for b.Loop() {
		m := NewMap(blocks, present, known)
		for w := range uint32(256) {
			m.Load(w*3, rule)
		}
	}
}

func BenchmarkRemembered(b *testing.B) {
	l := lane(767)
	m := &memory{objects: map[string]bool{}}
	c := NewCache(m, CacheConfig{HitLife: time.Hour, MissLife: time.Hour})
	all(c, l, 0).Wait(context.Background())
	b.ReportAllocs()
	for b.Loop() {
		all(c, l, 0).Wait(context.Background())
	}
}

// fill sets bits 0 to n-1.
func (b Bitmap) fill(n int) Bitmap {
	for i := range b {
		b[i] = 1<<64 - 1
	}
	if n&63 != 0 {
		b[n>>6] &= 1<<(n&63) - 1
	}
	return b
}

func BenchmarkMarks4096Pages(b *testing.B) {
	tokens := prompt(4096, 16)
	m := fingerprinter{pageSize: 16}
	var fingerprints []fingerprint
	b.ReportAllocs()
	for b.Loop() {
		fingerprints = m.append(fingerprints[:0], tokens, 4096)
	}
}

// What an engine would load, and why no more, is what it is if all pages are asked for: for stores with holes, some of
// which is cached, from whatever depths. Nothing is asked for twice, and of a store that has nothing, a run for each
// depth.
func TestFollowAgainstAll(t *testing.T) {
	asked, whole := 0, 0
	for seed := range uint64(1000) {
		rng := rand.New(rand.NewPCG(seed, 3))
		pages := 1 + rng.IntN([]int{20, 400, 2500}[rng.IntN(3)])
		l := lane(pages)
		m := &memory{objects: map[string]bool{}}
		keys := l.Names(0, pages)
		hole := []float64{0, 0.001, 0.02, 0.3, 1}[rng.IntN(5)]
		for at := 0; at < pages; {
			to := min(pages, at+1+rng.IntN(pages))
			for ; at < to; at++ {
				m.objects[keys.Keys[2*at]] = rng.Float64() >= hole
				m.objects[keys.Keys[2*at+1]] = rng.Float64() >= hole/2
			}
			at += rng.IntN(4) * rng.IntN(pages)
		}
		starts := make([]int, 1+rng.IntN(6))
		for i := range starts {
			starts[i] = rng.IntN(pages + 1)
		}
		cache := NewCache(outOfOrder{m}, CacheConfig{HitLife: time.Hour, MissLife: time.Hour})
		if rng.IntN(2) == 0 {
			cache.Begin(l, 0).Follow(soon(t), []int{rng.IntN(pages)})
		}
		if rng.IntN(2) == 0 {
			q := cache.Begin(l, 0)
			q.Ask(rng.IntN(pages), rng.IntN(pages))
			q.Wait(soon(t))
		}
		before := m.keys.Load()
		q := cache.Begin(l, 0)
		q.Ask(0, 1)
		q.Follow(soon(t), starts)
		found := q.Wait(soon(t))
		if found.Err != nil || m.keys.Load() > int64(2*pages) {
			t.Fatalf("seed %d: %v, %d keys were asked for", seed, found.Err, m.keys.Load())
		}
		if n := m.keys.Load() - before; hole == 1 && n > int64(shortRun+len(starts)*longRun) {
			t.Fatalf("seed %d: of a store that has nothing %d keys were asked for", seed, n)
		}
		asked, whole = asked+found.Known.Count(), whole+pages
		need := shortRun // and what is asked for beyond
		for _, start := range starts {
			need += next(found.Present, found.Known, start, pages, ^uint64(0)) - start + maxAhead + 2*longRun
		}
		if n := m.keys.Load() - before; n > int64(2*need) {
			t.Fatalf("seed %d: %d keys were asked for, want %d at most", seed, n, 2*need)
		}
		twin := all(NewCache(m, CacheConfig{}), l, 0).Wait(soon(t))
		got, want := NewMap(pages, found.Present, found.Known), NewMap(pages, twin.Present, twin.Known)
		rule := Rule{least: uint32(rng.IntN(20)), most: noBound}
		if rng.IntN(2) == 0 {
			rule.most = uint32(rng.IntN(200))
		}
		for _, start := range starts {
			a, why := got.Load(uint32(start), rule)
			b, because := want.Load(uint32(start), rule)
			if a != b || why != because {
				t.Fatalf("seed %d: from %d of %d %d are loaded (%s), want %d (%s)", seed, start, pages, a, why, b, because)
			}
		}
	}
	t.Logf("%d of %d pages were asked for", asked, whole)
}

// outOfOrder is a store whose answers overtake each other.
type outOfOrder struct{ *memory }

func (s outOfOrder) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	for range rand.IntN(10) {
		runtime.Gosched()
	}
	return s.memory.Exists(ctx, keys)
}

// ailing is a store that treats requests for some keys otherwise.
type ailing struct {
	*memory
	keys map[string]bool
	ails func(ctx context.Context) error
}

func (s *ailing) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	for _, key := range keys {
		if s.keys[key] {
			return NewBitmap(len(keys)), NewBitmap(len(keys)), s.ails(ctx)
		}
	}
	return s.memory.Exists(ctx, keys)
}

// Who follows a run needs no answer about what lies behind its end: it may not come, or be an error. An error of what
// is needed is one.
func TestFollowNeedsNoMore(t *testing.T) {
	l := lane(1000)
	keys := l.Names(0, l.Pages)
	for _, end := range []int{0, 15, 16, 100, 300, 600} {
		for name, ails := range map[string]func(context.Context) error{
			"silent": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
			"broken": func(context.Context) error { return errors.New("broken") },
		} {
			m := &ailing{&memory{objects: map[string]bool{}}, map[string]bool{}, ails}
			for i, key := range keys.Keys {
				m.objects[key] = i < end*keys.PerPage
				m.keys[key] = i >= (end+requestPages+shortRun)*keys.PerPage
			}
			c := NewCache(m, CacheConfig{Patience: patience})
			q := c.Begin(l, 0)
			q.Follow(soon(t), []int{0})
			f := q.Wait(soon(t))
			if n := next(f.Present, f.Known, 0, l.Pages, ^uint64(0)); f.Err != nil || n != end || !f.Known.Get(end) {
				t.Errorf("%s: %v, %d pages are there, want %d", name, f.Err, n, end)
			}
			if name == "broken" {
				needed := map[string]bool{keys.Keys[(end/2)*keys.PerPage]: true}
				q = NewCache(&ailing{m.memory, needed, ails}, CacheConfig{}).Begin(l, 0)
				if q.Follow(soon(t), []int{0}); q.Wait(soon(t)).Err == nil {
					t.Errorf("page %d was needed, and there is no error", end/2)
				}
			}
		}
	}
}

// Where pages were there when they were asked for last, the store is asked for 512 at once, though what it said then is
// too old to count.
func TestFollowAsksAheadOfWhatItSaw(t *testing.T) {
	l := lane(700)
	m := &memory{objects: map[string]bool{}}
	keys := l.Names(0, l.Pages)
	for _, key := range keys.Keys {
		m.objects[key] = true
	}
	now := time.Unix(1, 0)
	var together sync.WaitGroup
	s := &gathering{memory: m, all: &together}
	c := NewCache(s, CacheConfig{Now: func() time.Time { return now }})
	q := c.Begin(l, 0)
	if q.Follow(soon(t), []int{5}); q.Wait(soon(t)).Err != nil {
		t.Fatal(q.err)
	}
	now = now.Add(time.Minute)
	clear(m.objects)
	m.keys.Store(0)
	together.Add(maxAhead / requestPages) // requests, none of which is answered before all are made
	s.gather.Store(true)
	q = c.Begin(l, 0)
	q.Follow(soon(t), []int{5})
	f := q.Wait(soon(t))
	if f.Err != nil || f.Present.Count() > 0 || !f.Known.Get(5) || m.keys.Load() != maxAhead {
		t.Errorf("%v, %d present, %d keys", f.Err, f.Present.Count(), m.keys.Load())
	}
}

// gathering is a store that answers requests together.
type gathering struct {
	*memory
	gather atomic.Bool
	all    *sync.WaitGroup
}

func (s *gathering) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	present, known, err = s.memory.Exists(ctx, keys)
	if s.gather.Load() {
		s.all.Done()
		s.all.Wait()
	}
	return present, known, err
}

// Who follows a run stops when his time is over, and says so, though all that he was told is known.
func TestFollowStopsInTime(t *testing.T) {
	l := lane(400)
	m := &memory{objects: map[string]bool{}}
	for _, key := range l.Names(0, l.Pages).Keys {
		m.objects[key] = true
	}
	ctx, cancel := context.WithCancel(soon(t))
	stop := stopAfter{m, 2, cancel}
	q := NewCache(&stop, CacheConfig{}).Begin(l, 0)
	q.Follow(ctx, []int{0})
	// each window is asked for first keys, then the others; only the first window was
	if f := q.Wait(ctx); !errors.Is(f.Err, context.Canceled) || f.Present.Count() > shortRun || m.calls.Load() > 2 {
		t.Errorf("%v, %d present, %d requests", f.Err, f.Present.Count(), m.calls.Load())
	}
}

// stopAfter ends somebody's patience with a request to a store.
type stopAfter struct {
	*memory
	calls  int
	cancel func()
}

func (s *stopAfter) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	if s.calls--; s.calls == 0 {
		s.cancel()
	}
	return s.memory.Exists(ctx, keys)
}
