package node

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// l3Node is a node with one model. Its workers hold prefixes of one prompt and share the folder of SGLang's file
// backend. The test passes the log directly to its machine.
type l3Node struct {
	*Node
	prompt []uint32
	config hicache.SGLang
	ctx    context.Context
}

// newL3Node adds workers "w000", "w001" and so on with depth blocks each of a prompt of tokens.
func newL3Node(t testing.TB, tokens, workers int, depth func(worker int) int, configure func(*hicache.SGLang)) *l3Node {
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	t.Cleanup(cancel)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	server, err := natsserver.Start(ctx, natsserver.Options{Dir: t.TempDir(), Listen: "127.0.0.1:0",
		SyncInterval: time.Minute})
	must(err)
	t.Cleanup(server.Stop)
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{Server: server, Wait: true})
	must(err)
	t.Cleanup(conn.Close)
	ns, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "test", Partitions: 1})
	must(err)
	x := &l3Node{ctx: ctx, config: hicache.SGLang{Backend: "file", PageSize: 16, TPSize: 1, PPSize: 1, ModelName: "m",
		Directory: t.TempDir()}}
	if configure != nil {
		configure(&x.config)
	}
	x.Node = New(Config{Namespace: ns, L3: L3Config{
		Models: map[string]hicache.Config{"m": {SGLang: &x.config}}, Timeout: patience, Check: patience,
		Cache: hicache.CacheConfig{HitLife: time.Hour, MissLife: time.Hour, Patience: patience},
	}})
	x.l3.watch(ctx)
	x.put(0, servingAt(0))
	for i := range tokens {
		x.prompt = append(x.prompt, uint32(i*7919%151_936))
	}
	hasher, err := events.NewHasher(uint32(x.config.PageSize), events.Space{})
	must(err)
	locals := hasher.Hash(nil, x.prompt)
	names := make([]events.BlockHash, len(locals))
	for i := range names {
		names[i] = events.BlockHash(i + 1)
	}
	var msgs []jetstream.Message
	for w := range workers {
		batch := events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: uint32(x.config.PageSize),
			Events: []events.Event{{Kind: events.Cleared, Reason: events.ReasonEngine}}}
		for from := 0; from < depth(w); from += events.MaxBlocksPerEvent {
			to := min(depth(w), from+events.MaxBlocksPerEvent)
			e := events.Event{Kind: events.Stored, Tier: events.Device, Blocks: names[from:to], Locals: locals[from:to]}
			if from > 0 {
				e.HasParent, e.Parent = true, names[from-1]
			}
			batch.Events = append(batch.Events, e)
		}
		data, err := events.AppendBatch(nil, &batch)
		must(err)
		msgs = append(msgs, jetstream.Message{Seq: events.StreamSeq(w + 1), Time: 1000,
			Key: events.RankKey{Instance: events.WorkerID(fmt.Sprintf("w%03d", w))}, Data: data})
	}
	if !x.shards[0].machine.Apply(0, msgs) {
		t.Fatal("the machine rejects the log")
	}
	return x
}

// store writes pages of the prompt into the shared folder.
func (x *l3Node) store(t testing.TB, from, to int) {
	t.Helper()
	keys := x.config.FileKeys(x.config.PageHashes(nil, x.prompt, hicache.Space{}))
	for _, key := range keys.Keys[from*keys.PerPage : to*keys.PerPage] {
		if err := os.WriteFile(filepath.Join(x.config.Directory, key+".bin"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// BenchmarkFindL3 runs a query over 256 workers with growing prefixes of a prompt: without the shared store, with the
// store and its cached responses, and without the store but with the store's names of the prompt. The three alternate,
// so they run under equal conditions. ratio is the cost of the store relative to a query without it; beyond-hashing is
// relative to a query with equal hashing.
func BenchmarkFindL3(b *testing.B) {
	for _, tokens := range []int{4096, 65_536} {
		const workers = 256
		blocks := tokens / 16
		x := newL3Node(b, tokens, workers, func(w int) int { return 1 + w*(blocks-1)/workers }, nil)
		x.store(b, 0, blocks)
		config := hicache.Config{SGLang: &x.config}
		ask := func(b *testing.B, l3 api.L3Ask, name bool) time.Duration {
			begun := time.Now()
			if name {
				if _, err := config.Prompt(x.prompt, "", "", 16); err != nil {
					b.Fatal(err)
				}
			}
			a, err := x.Find(x.ctx, &api.Query{Model: "m", Tokens: x.prompt, L3: l3})
			took := time.Since(begun)
			if err != nil || len(a.Workers) != workers || (l3 == api.L3All) != (a.L3.Total == uint32(blocks)) {
				b.Fatalf("%v, %+v", err, a)
			}
			return took
		}
		b.Run(fmt.Sprintf("tokens=%d", tokens), func(b *testing.B) {
			ask(b, api.L3All, false) // the store's responses are cached from now on
			var without, named, with time.Duration
			for b.Loop() {
				without += ask(b, api.L3Off, false)
				with += ask(b, api.L3All, false)
				named += ask(b, api.L3Off, true)
			}
			for what, took := range map[string]time.Duration{"without": without, "named": named, "with": with} {
				b.ReportMetric(float64(took.Nanoseconds())/1000/float64(b.N), "µs-"+what)
			}
			b.ReportMetric(float64(with)/float64(without), "ratio")
			b.ReportMetric(float64(with)/float64(named), "beyond-hashing")
		})
	}
}

// TestTheStoreHasItsOwnTime: the store's time limit counts from its request. If the request follows the lookup in the
// index, the time of the index and of other nodes does not count.
func TestTheStoreHasItsOwnTime(t *testing.T) {
	const blocks, own = 64, 20
	x := newL3Node(t, blocks*16, 1, func(int) int { return own }, nil)
	x.store(t, 0, blocks)
	for _, l3 := range []api.L3Ask{"", api.L3Beyond} {
		s := x.BeginL3(&api.Query{Model: "m", Tokens: x.prompt, L3: l3}, 16)
		s.deadline = time.Now().Add(-time.Second)
		a := &api.Answer{Workers: []api.Overlap{{Instance: "w000", Device: own}}}
		if s.Merge(x.ctx, a); a.L3.Status != api.L3OK || a.Workers[0].L3 != blocks-own {
			t.Errorf("%q: %+v, %+v", l3, a.L3, a.Workers)
		}
	}
}

// TestRequestsToTheStore: the request to the store covers the loads of workers, the whole prompt at once, or only
// blocks that no worker holds. A slow store costs the answer its blocks, but no more time than the query's limit.
func TestRequestsToTheStore(t *testing.T) {
	master, err := mastersim.Start("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer master.Stop()
	host, port, err := net.SplitHostPort(master.Addr())
	if err != nil {
		t.Fatal(err)
	}
	const blocks, own = 64, 20
	x := newL3Node(t, blocks*16, 3, func(w int) int { return own - w }, func(c *hicache.SGLang) {
		*c = hicache.SGLang{Backend: "mooncake", PageSize: 16, TPSize: 1, PPSize: 1, IsMLA: true,
			Master: hicache.Master{Address: host}}
		if c.MetricsPort, err = strconv.Atoi(port); err != nil {
			t.Fatal(err)
		}
	})
	keys := x.config.Keys(x.config.PageHashes(nil, x.prompt, hicache.Space{})).Keys
	master.Put(keys...)
	asked := func() (n int) {
		for _, keys := range master.Asked() {
			n += keys
		}
		return n
	}
	find := func(q api.Query) *api.Answer {
		t.Helper()
		q.Model, q.Tokens = "m", x.prompt
		a, err := x.Find(x.ctx, &q)
		if err != nil || len(a.Workers) != 3 || a.Workers[0].Device != own {
			t.Fatalf("%v, %+v", err, a)
		}
		return a
	}

	// In runs of 16 pages: the runs before the end of the best worker's prefix are not requested.
	if a := find(api.Query{L3: api.L3Beyond}); a.L3.Status != api.L3OK || a.Workers[0].L3 != blocks-own ||
		asked() > blocks-own/16*16 {
		t.Errorf("beyond: %d keys requested, %+v", asked(), a)
	}
	if a := find(api.Query{L3: api.L3All}); a.L3.Status != api.L3OK || a.L3.Total != blocks ||
		a.Workers[2].L3 != blocks-(own-2) || asked() != blocks {
		t.Errorf("all: %d keys requested, %+v", asked(), a)
	}
	if find(api.Query{L3: api.L3All}); asked() != blocks {
		t.Errorf("%d cached keys were requested again", asked())
	}

	release := make(chan struct{})
	master.Fault(func(http.ResponseWriter, []string) bool { <-release; return false })
	let := sync.OnceFunc(func() { close(release) })
	defer let()
	begun := time.Now()
	a := find(api.Query{L3TimeoutMS: 2000})
	if a.L3.Status != api.L3OK { // all responses are cached
		t.Errorf("a slow store with all keys cached: %+v", a.L3)
	}
	x.prompt = append(x.prompt, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
	a = find(api.Query{L3TimeoutMS: 2000})
	if s := x.l3.status(); len(s) != 1 || s[0].Store != master.Addr() || s[0].Down != "" || s[0].Questions < 2 ||
		s[0].Remembered == 0 || s[0].Set != nil {
		t.Errorf("status: %+v", s)
	}
	if a.L3.Status != api.L3Partial || a.L3.Total != blocks || !strings.Contains(a.L3.Reason, "2s") ||
		time.Since(begun) > patience/2 {
		t.Errorf("a slow store: after %v %+v", time.Since(begun), a.L3)
	}
	let()
	testkit.Eventually(t, "the store answers again", func() (bool, string) {
		a := find(api.Query{})
		return a.L3.Status == api.L3OK, fmt.Sprintf("%+v", a.L3)
	})
}
