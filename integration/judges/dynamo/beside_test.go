//go:build judges

package dynamo

import (
	"encoding/json"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/tools/pyenv"
	"github.com/kvatlas/kvatlas/tools/twin"
)

// besideSize is the block size of the tests in tokens.
const besideSize = 4

// beside is Dynamo's standalone indexer and kvatlas's indexer on the same engines, with a naive twin for every engine's
// rank.
type beside struct {
	t       testing.TB
	bases   [2]string // of HTTP: ours, Dynamo's
	engines []*besideEngine
	hasher  *events.Hasher
	marks   uint32
	mended  bool // of the current example: see line
}

// besideEngine is an engine. Its events go to both indexers through the socket, and to the twin.
type besideEngine struct {
	*pyenv.Publisher
	id     string
	twin   *twin.Rank
	groups int // of main attention, beside the first
}

// named is a block: the repeated token and the engine's hash.
type named struct {
	token uint32
	name  uint64
}

// change is an event of an engine.
type change struct {
	engine int
	op     string // "store", "copy" (a store without tokens), "remove" or "clear"
	tier   events.Tier
	parent *uint64
	blocks []named
	group  int
}

// media maps tiers to the engine's names.
var media = map[events.Tier]string{events.Device: "GPU", events.Host: "CPU", events.Disk: "DISK",
	events.External: "EXTERNAL"}

// startBeside starts both indexers with a number of engines.
func startBeside(t *testing.T, engines int) *beside {
	t.Helper()
	dynamo := startDynamo(t)
	x := harness.StartIndexer(t, t.TempDir(), "")
	b := &beside{t: t, bases: [2]string{x.HTTP, dynamo}}
	var err error
	if b.hasher, err = events.NewHasher(besideSize, events.Space{}); err != nil {
		t.Fatal(err)
	}
	for i := range engines {
		e := &besideEngine{Publisher: pyenv.StartPublisher(t, pyenv.PublisherOptions{BlockSize: besideSize}),
			id: strconv.Itoa(i + 1)}
		e.twin = twin.New(twin.Config{MaxPending: radix.DefaultMaxPending,
			MaxTombstones: radix.DefaultMaxTombstones, TombstoneFor: radix.DefaultTombstoneFor}, besideSize)
		register := fmt.Sprintf(
			`{"instance_id":%s,"endpoint":%q,"replay_endpoint":%q,"model_name":"m","block_size":%d}`, e.id, e.Endpoint,
			e.Replay, besideSize)
		for _, base := range b.bases {
			if status, text, err := harness.Request(base, "POST", "/register", register); err != nil || status != 201 {
				t.Fatalf("register: %d %s %v", status, text, err)
			}
		}
		e.WaitSubscribers(2)
		b.engines = append(b.engines, e)
	}
	return b
}

// locals returns the hashes of blocks with a single repeated token.
func (b *beside) locals(tokens []uint32) []events.LocalHash {
	return b.hasher.Hash(nil, spread(tokens))
}

// spread writes every block's token as often as a block has tokens.
func spread(tokens []uint32) (all []uint32) {
	for _, t := range tokens {
		for range besideSize {
			all = append(all, t)
		}
	}
	return all
}

// apply has an engine announce something.
func (b *beside) apply(c change) {
	b.t.Helper()
	e := b.engines[c.engine]
	e.groups = max(e.groups, c.group)
	said := map[string]any{"op": c.op, "medium": media[c.tier], "group": c.group, "kind": "full_attention"}
	means := events.Event{Kind: events.Stored, Tier: c.tier, Group: events.GroupIndex(c.group),
		Attention: events.AttentionFull}
	var tokens []uint32
	var names []uint64
	for _, x := range c.blocks {
		tokens, names = append(tokens, x.token), append(names, x.name)
		means.Blocks = append(means.Blocks, events.BlockHash(x.name))
	}
	said["hashes"] = names
	switch c.op {
	case "store":
		said["tokens"], said["parent"], means.Locals = spread(tokens), c.parent, b.locals(tokens)
		if c.parent != nil {
			means.HasParent, means.Parent = true, events.BlockHash(*c.parent)
		}
	case "copy":
		said["op"], said["tokens"] = "store", []uint32{}
	case "remove":
		means.Kind, means.Attention = events.Removed, 0
	case "clear":
		means = events.Event{Kind: events.Cleared, Reason: events.ReasonEngine}
		e.groups = 0
	}
	e.Do(map[string]any{"op": "batch", "events": []any{said}}, nil)
	e.twin.Apply(1, []events.Event{means})
}

// depth is how many blocks of a prompt are held: on the device, then on in host memory, then on further below.
type depth [3]int

// parting returns the first block that only one side reports in some tier or above.
func (d depth) parting(other depth) int {
	first, a, b := 1<<30, 0, 0
	for i := range d {
		a, b = a+d[i], b+other[i]
		if a != b {
			first = min(first, a, b)
		}
	}
	return first
}

// lower and higher compare the blocks in some tier or above.
func (d depth) lower(than depth) bool {
	a, b := 0, 0
	for i := range d {
		if a, b = a+d[i], b+than[i]; a < b {
			return true
		}
	}
	return false
}

// ask queries both indexers about a prompt. It returns, by engine, their answers and the twin's.
func (b *beside) ask(tokens []uint32) (ours, dynamo, twins []depth) {
	b.t.Helper()
	body := `{"model_name":"m","token_ids":` + harness.JSONList(spread(tokens)) + `}`
	said := [2][]depth{make([]depth, len(b.engines)), make([]depth, len(b.engines))}
	for i, base := range b.bases {
		status, text, err := harness.Request(base, "POST", "/query", body)
		var answer struct {
			Instances map[string]struct{ GPU, CPU, Disk int }
		}
		if err != nil || status != 200 || json.Unmarshal([]byte(text), &answer) != nil {
			b.t.Fatalf("query: %d %s %v", status, text, err)
		}
		for j, e := range b.engines {
			a := answer.Instances[e.id]
			said[i][j] = depth{a.GPU / besideSize, (a.CPU - a.GPU) / besideSize, (a.Disk - a.CPU) / besideSize}
		}
	}
	for _, e := range b.engines {
		d := e.twin.Match(b.locals(tokens))
		twins = append(twins, depth{int(d[0]), int(d[1]), int(d[2] + d[3])})
	}
	return said[0], said[1], twins
}

// settle waits until both indexers reflect all announced events. Marks are announced last, with a mark in every tier,
// and settle waits for the marks. A block counts only if every group holds the block. The events of the last group are
// announced first, so an index with the last mark has all groups.
func (b *beside) settle() {
	b.t.Helper()
	var mark []uint32
	for i := range uint32(events.NumTiers) {
		mark = append(mark, 1<<31+b.marks+i)
	}
	b.marks += events.NumTiers
	for i, e := range b.engines {
		for group := e.groups; group >= 0; group-- {
			var parent *uint64
			for j, token := range mark {
				name := uint64(token)
				b.apply(change{engine: i, op: "store", tier: events.Tier(j + 1), parent: parent,
					blocks: []named{{token, name}}, group: group})
				parent = &name
			}
		}
	}
	want := depth{1, 1, 2}
	for deadline := time.Now().Add(harness.Patience); ; time.Sleep(time.Millisecond) {
		ours, dynamo, _ := b.ask(mark)
		there := true
		for i := range b.engines {
			there = there && ours[i] == want && dynamo[i] == want
		}
		if there {
			return
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("the marks do not arrive: ours %v, Dynamo %v", ours, dynamo)
		}
	}
}
