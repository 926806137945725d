package integration

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/twin"
	"github.com/kvatlas/kvatlas/tools/zmtpserver"
	"github.com/vmihailenco/msgpack/v5"
)

// hybridRank is a rank of a hybrid model with a naive twin.
type hybridRank struct {
	key    events.RankKey
	groups []events.GroupSpec
	twin   *twin.Rank
	batch  events.Batch
}

const (
	hybridTrunk    = 6  // common blocks of all prompts
	hybridBlocks   = 12 // blocks of a prompt
	hybridBranches = 3
)

func hybridPrompt(branch int) []uint32 {
	tokens := harness.Tokens(1, hybridBlocks*harness.BlockSize)
	copy(tokens[hybridTrunk*harness.BlockSize:],
		harness.Tokens(100_000*(branch+1), (hybridBlocks-hybridTrunk)*harness.BlockSize))
	return tokens
}

// event returns a random change of the rank's blocks.
func (r *hybridRank) event(rng *rand.Rand, locals [][]events.LocalHash) events.Event {
	e := events.Event{Kind: events.Stored, Tier: events.Device, Group: events.GroupIndex(rng.IntN(len(r.groups)))}
	if rng.IntN(4) == 0 {
		e.Tier = events.Tier(1 + rng.IntN(3))
	}
	branch, from := rng.IntN(hybridBranches), rng.IntN(hybridBlocks)
	to := min(hybridBlocks, from+1+rng.IntN(hybridBlocks))
	name := func(i int) events.BlockHash { return events.BlockHash(100*(branch*(i/hybridTrunk)) + i + 1) }
	for i := from; i < to; i++ {
		e.Blocks = append(e.Blocks, name(i))
	}
	if rng.IntN(3) == 0 {
		e.Kind, e.Blocks = events.Removed, e.Blocks[:min(len(e.Blocks), 2)]
		return e
	}
	of := r.groups[e.Group]
	if e.Attention, e.Window, e.Drops = of.Kind, of.Window, of.Drops; of.Kind.Main() {
		if e.Locals = locals[branch][from:to]; from > 0 {
			e.HasParent, e.Parent = true, name(from-1)
		}
	}
	return e
}

// TestHybridModelsOnEveryFace publishes random events of hybrid models with all kinds of groups, in all tiers, with and
// without draft models. Queries over NATS and HTTP, by tokens and by hashes, and those of Dynamo's clients, must return
// the reusable blocks of the naive twin, also after a dump and a load.
func TestHybridModelsOnEveryFace(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "", "--snapshot-interval", "1h")
	ctx := harness.Context(t)
	ns := harness.OpenNamespace(t, ctx, x.NATS)
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	var locals [][]events.LocalHash
	for b := range hybridBranches {
		locals = append(locals, hasher.Hash(nil, hybridPrompt(b)))
	}
	rng := rand.New(rand.NewPCG(13, 2))
	var ranks []*hybridRank
	places := map[events.Partition]events.StreamSeq{}
	for i, text := range []string{
		"full", "full:eagle", "full,swa:48", "full:eagle,swa:48:eagle", "full,chunked:64", "full,mamba", "mamba,full",
		"full:eagle,swa:20:eagle,mamba", "full,swa:17,swa:80", "full,swa:40,chunked:32,mamba", "full,mla,swa:33",
		"swa:40,mla,swa:40",
	} {
		groups, err := events.ParseGroups(text)
		if err != nil {
			t.Fatal(err)
		}
		for rank := range 2 {
			r := &hybridRank{key: events.RankKey{Instance: events.WorkerID(fmt.Sprint(i)), Rank: events.Rank(rank)},
				groups: groups, twin: harness.NewTruth()}
			r.batch = events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: harness.BlockSize}
			for g, of := range groups { // main groups store all blocks at the start, so that no block waits for a parent
				for b := 0; of.Kind.Main() && b < hybridBranches; b++ {
					e := events.Event{Kind: events.Stored, Tier: events.Device, Group: events.GroupIndex(g),
						Attention: of.Kind, Drops: of.Drops, Locals: locals[b]}
					for i := range hybridBlocks {
						e.Blocks = append(e.Blocks, events.BlockHash(100*(b*(i/hybridTrunk))+i+1))
					}
					r.batch.Events = append(r.batch.Events, e)
				}
			}
			ranks = append(ranks, r)
		}
	}
	publish := func(r *hybridRank) {
		r.twin.Apply(0, r.batch.Events)
		data, err := events.AppendBatch(nil, &r.batch)
		if err != nil {
			t.Fatal(err)
		}
		log := shim.NewStreamLog(ns, r.key, nil)
		if _, err := log.Last(ctx); err != nil {
			t.Fatal(err)
		}
		seq, err := log.Publish(ctx, [][]byte{data})
		if err != nil {
			t.Fatal(err)
		}
		p, err := ns.PartitionOf(r.key.Instance)
		if err != nil {
			t.Fatal(err)
		}
		places[p] = seq
		r.batch.FirstID += events.EventID(len(r.batch.Events))
		r.batch.Events = nil
	}
	asker := harness.Client(t, ns.Conn(), "default", client.Options{})
	cut, credited := 0, 0
	check := func(when string) {
		t.Helper()
		var at []api.PartitionSeq
		for p, seq := range places {
			at = append(at, api.PartitionSeq{Partition: p, Seq: seq})
		}
		for b := range hybridBranches {
			n := hybridBlocks - rng.IntN(3)
			tokens, hashes := hybridPrompt(b)[:n*harness.BlockSize], api.Hashes{}
			for _, l := range locals[b][:n] {
				hashes = append(hashes, uint64(l))
			}
			want := map[events.RankKey][events.NumTiers]uint32{}
			type instance struct {
				Longest uint64 `json:"longest_matched"`
				GPU     uint64
				DP      map[string]uint64
				CPU     uint64
				Disk    uint64
			}
			compat := map[string]*instance{}
			for _, r := range ranks {
				d := r.twin.Match(locals[b][:n])
				if d != r.twin.Held(locals[b][:n]) {
					cut++
				}
				if d == ([events.NumTiers]uint32{}) {
					continue
				}
				want[r.key] = d
				credited++
				name := string(r.key.Instance)
				if compat[name] == nil {
					compat[name] = &instance{DP: map[string]uint64{}}
				}
				in, tokens := compat[name], func(tiers ...uint32) (n uint64) {
					for _, d := range tiers {
						n += uint64(d) * harness.BlockSize
					}
					return n
				}
				in.GPU, in.CPU, in.Disk = max(in.GPU, tokens(d[0])), max(in.CPU, tokens(d[0], d[1])), max(in.Disk,
					tokens(d[:]...))
				if in.Longest = in.Disk; d[0] > 0 {
					in.DP[fmt.Sprint(r.key.Rank)] = tokens(d[0])
				}
			}
			for face, q := range map[string]*api.Query{"tokens": {Model: "m", Tokens: tokens, MinSeq: at},
				"hashes": {Model: "m", Hashes: hashes, MinSeq: at}} {
				over := map[string]func() (*api.Answer, error){
					"NATS": func() (*api.Answer, error) { return asker.Find(ctx, q) },
					"HTTP": func() (*api.Answer, error) {
						var a api.Answer
						return &a, harness.HTTPDo(x.HTTP, "POST", "/v1/find", q, &a)
					},
				}
				for name, find := range over {
					a, err := find()
					if err != nil {
						t.Fatalf("%s: %s over %s: %v", when, face, name, err)
					}
					got := map[events.RankKey][events.NumTiers]uint32{}
					for _, o := range a.Workers {
						got[events.RankKey{Instance: o.Instance, Rank: o.Rank}] = [events.NumTiers]uint32{o.Device,
							o.Host, o.Disk, o.External}
						if o.Bound != "" {
							t.Errorf("%s: %s/%d: bound %q", when, o.Instance, o.Rank, o.Bound)
						}
					}
					if !maps.Equal(got, want) {
						t.Errorf("%s: branch %d, %d blocks by %s over %s: %v, want %v", when, b, n, face, name, got,
							want)
					}
				}
			}
			for path, q := range map[string]map[string]any{"/query": {"model_name": "m", "token_ids": tokens},
				"/query_by_hash": {"model_name": "m", "block_hashes": hashes}} {
				body, err := json.Marshal(q)
				if err != nil {
					t.Fatal(err)
				}
				status, text, err := harness.Request(x.HTTP, "POST", path, string(body))
				var got struct {
					Scores    map[string]map[string]uint64
					Instances map[string]*instance
				}
				if err != nil || status != 200 || json.Unmarshal([]byte(text), &got) != nil {
					t.Fatalf("%s: %d %s %v", path, status, text, err)
				}
				scores := map[string]map[string]uint64{}
				for name, in := range compat {
					if len(in.DP) > 0 {
						scores[name] = in.DP
					}
				}
				if !reflect.DeepEqual(got.Instances, compat) || !reflect.DeepEqual(got.Scores, scores) {
					t.Errorf("%s: branch %d, %d blocks: %s: %s, want %v", when, b, n, path, text, scores)
				}
			}
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	for round := range 12 {
		for _, r := range ranks {
			for range 1 + rng.IntN(12) {
				r.batch.Events = append(r.batch.Events, r.event(rng, locals))
			}
			publish(r)
		}
		check(fmt.Sprint("round ", round))
	}
	if cut < 50 || credited < 200 {
		t.Errorf("%d answers of %d are cut short: no test", cut, credited)
	}
	t.Logf("%d depths were more than nothing, %d cut short", credited, cut)

	dumped := harness.Run(t, "indexer", "dump", "--now", "--nats", x.NATS)
	file := filepath.Join(t.TempDir(), "dump")
	if err := os.WriteFile(file, []byte(dumped.Stdout), 0o600); err != nil || dumped.Code != 0 {
		t.Fatalf("dump: %+v, %v", dumped, err)
	}
	if r := harness.Run(t, "indexer", "import", "--model", "m", "--block-size", fmt.Sprint(harness.BlockSize), "--nats",
		x.NATS, file); r.Code != 0 {
		t.Fatalf("load: %+v", r)
	}
	for p := range places {
		info, err := ns.StreamInfo(ctx, p)
		if err != nil {
			t.Fatal(err)
		}
		places[p] = info.Last
	}
	check("dumped and loaded")
}

// TestRegisteredGroups registers engines over HTTP with kv_groups, for events without chunk sizes or draft models.
// Answers are exact. Without kv_groups the answers are marked as a bound.
func TestRegisteredGroups(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	prompt := harness.Tokens(1, 10*harness.BlockSize)
	stored := func(group int, kind string, blocks ...int) map[string]any {
		tokens := prompt[blocks[0]*harness.BlockSize : (blocks[len(blocks)-1]+1)*harness.BlockSize]
		e := map[string]any{
			"type": "BlockStored", "block_hashes": blocks, "token_ids": tokens, "block_size": harness.BlockSize,
			"medium":    "GPU",
			"group_idx": group, "kv_cache_spec_kind": kind,
		}
		return e
	}
	all := []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}
	// With chunks of four blocks, the engine has the second chunk up to block 6, and no block of the third.
	full, chunks := stored(0, "full_attention", all...), stored(1, "chunked_local_attention", 4, 5, 6)
	last := stored(1, "chunked_local_attention", 8, 9)
	check := func(i int, groups string, list []map[string]any, device uint32, bound api.Bound) {
		t.Helper()
		engine := startPublisher(t)
		instance := fmt.Sprint(i)
		body, err := json.Marshal(map[string]any{
			"instance_id": i, "endpoint": engine.endpoint, "model_name": "m", "block_size": harness.BlockSize,
			"kv_groups": groups,
		})
		if err != nil {
			t.Fatal(err)
		}
		if status, text, err := harness.Request(x.HTTP, "POST", "/register", string(body)); err != nil ||
			status != 201 {
			t.Fatal(status, text, err)
		}
		if err := engine.WaitSubscribers(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		engine.publish(list...)
		x.WaitDepth(t, "m", prompt, instance, device)
		if o := harness.OverlapOf(t, x, "m", instance, harness.Prompt{Tokens: prompt}); o.Bound != bound {
			t.Errorf("kv_groups %q: %+v, want bound %q", groups, o, bound)
		}
	}
	for i, c := range []struct {
		groups string
		events []map[string]any
		device uint32
		bound  api.Bound
	}{
		{"", []map[string]any{full, chunks}, 10, api.BoundFullAttentionOnly},
		{"full,chunked:64", []map[string]any{full, chunks}, 8, ""},
		{"full,chunked:48", []map[string]any{full, chunks}, 9, ""},
		{"full,chunked:64", []map[string]any{full, chunks, last}, 10, ""},
		{"full:eagle,chunked:64", []map[string]any{full, chunks, last}, 9, ""},
		{"full:eagle", []map[string]any{full}, 9, ""},
	} {
		check(i, c.groups, c.events, c.device, c.bound)
	}
	// The first engine is registered again, with its groups.
	if status, text, err := harness.Request(x.HTTP, "POST", "/unregister",
		`{"instance_id":0,"model_name":"m"}`); err != nil || status != 200 {
		t.Fatal(status, text, err)
	}
	x.WaitDepth(t, "m", prompt, "0", 0)
	check(0, "full,chunked:64", []map[string]any{full, chunks}, 8, "")
}

// publisher is an engine's socket for events from a test.
type publisher struct {
	*zmtpserver.Pub
	t        *testing.T
	endpoint string
	seq      uint64
}

func startPublisher(t *testing.T) *publisher {
	t.Helper()
	endpoint := "tcp://" + loopback.Reserve(t)
	pub, err := zmtpserver.ListenPub(t.Context(), endpoint, zmtp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return &publisher{Pub: pub, t: t, endpoint: endpoint}
}

// publish publishes events as vLLM does.
func (p *publisher) publish(events ...map[string]any) {
	p.t.Helper()
	payload, err := msgpack.Marshal([]any{1.5, events, nil})
	if err == nil {
		err = p.Send(nil, binary.BigEndian.AppendUint64(nil, p.seq), payload)
	}
	if err != nil {
		p.t.Fatal(err)
	}
	p.seq++
}

// TestExplainNamesTheGroup checks that `indexer query --explain` names the group that limits every worker of a hybrid
// model.
func TestExplainNamesTheGroup(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	ctx := harness.Context(t)
	ns := harness.OpenNamespace(t, ctx, x.NATS)
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	prompt := harness.Tokens(1, 10*harness.BlockSize)
	full := events.Event{Kind: events.Stored, Tier: events.Device, Attention: events.AttentionFull,
		Locals: hasher.Hash(nil, prompt)}
	for i := range full.Locals {
		full.Blocks = append(full.Blocks, events.BlockHash(i+1))
	}
	other := func(group events.GroupIndex, kind events.Attention, window uint32,
		blocks ...events.BlockHash) events.Event {
		return events.Event{Kind: events.Stored, Tier: events.Device, Group: group, Attention: kind, Window: window,
			Blocks: blocks}
	}
	draft := full
	draft.Drops = true
	for name, evs := range map[events.WorkerID][]events.Event{
		"full":   {full},
		"draft":  {draft},
		"window": {full, other(1, events.AttentionSlidingWindow, 48, 3, 4, 5, 9, 10)},
		"chunk":  {full, other(2, events.AttentionChunkedLocal, 64, 5, 6, 7)},
		"state":  {full, other(1, events.AttentionMamba, 0, 6)},
		"both": {full, other(1, events.AttentionSlidingWindow, 20, 3, 4, 7, 8, 9, 10),
			other(3, events.AttentionMamba, 0, 1, 4, 6)},
		"none":  {full, other(1, events.AttentionMamba, 0)},
		"bound": {full, other(1, events.AttentionChunkedLocal, 0, 1)},
	} {
		batch := &events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: harness.BlockSize, Events: evs}
		harness.PublishAs(t, ctx, ns, name, batch)
	}
	harness.Eventually(t, "all workers are registered", func() (bool, string) {
		list := harness.IndexerJSON[api.WorkerList](t, x.NATS, "workers")
		return len(list.Workers) == 8, fmt.Sprint(list)
	})
	query := func(args ...string) string {
		t.Helper()
		args = append([]string{"query", "--nats", x.NATS, "--model", "m", "--tokens", harness.CommaList(prompt)},
			args...)
		r := harness.Run(t, "indexer", args...)
		if r.Code != 0 {
			t.Fatalf("%+v", r)
		}
		lines := strings.SplitAfter(r.Stdout, "\n")
		for i, l := range lines { // without the common part
			l, _, _ = strings.Cut(strings.TrimRight(l, " \n"), "no worker of this model has registered")
			lines[i] = strings.TrimRight(l, " 0") + "\n"
		}
		return strings.Join(lines[:len(lines)-1], "")
	}
	const needs = "no longer prefix has the blocks for group"
	const behind = "later blocks are of no use)"
	got, want := query("--explain"), `m: 10 blocks of 16 tokens

BLOCKS  DEVICE                                              HOST  DISK  EXTERNAL  STORE
[0,10)  bound/0 full/0 draft/0 chunk/0 state/0 window/0 +2  -     -     -         -

WORKER    OWN  STOPPED
bound/0   10   the prompt ends; the engine may reuse less: the needs of some group of the cache are unknown
full/0    10   the prompt ends
draft/0   9    block 9: the engine computes the last held block again, for the draft model (1 `+behind+`
chunk/0   8    block 8: `+needs+` 2 (chunked_local_attention, 64 tokens) (2 `+behind+`
state/0   6    block 6: `+needs+` 1 (mamba) (4 `+behind+`
window/0  5    block 5: `+needs+` 1 (sliding_window, 48 tokens) (5 `+behind+`
both/0    4    block 4: `+needs+` 3 (mamba) (6 `+behind+`
none/0    0    block 0: `+needs+` 1 (mamba) (10 `+behind+`
`
	head, _, _ := strings.Cut(got, "LOADS")
	_, table, _ := strings.Cut(got, "NO MORE, FOR\n")
	if got = strings.TrimRight(head, " ") + "\n" + table; got != want {
		t.Errorf("query --explain prints\n%s\nwant\n%s", got, want)
	}
	want = `m: 10 blocks of 16 tokens
WORKER  RANK  DEVICE  HOST  DISK  EXTERNAL  OF PROMPT
bound   0     10      0     0     0         at most 100%
full    0     10      0     0     0         100%
`
	if got := query("--worker", "bound", "--worker", "full"); got != want {
		t.Errorf("query prints\n%s\nwant\n%s", got, want)
	}
}
