//go:build judges

package sglang

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/faces/kvindexer/kvindexerpb"
	"github.com/kvatlas/kvatlas/tools/pyenv"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"
)

var seed = flag.Uint64("seed", 1, "of the workers' blocks")

const (
	pinned = "sglang==0.5.12" // the last release with hashes in Python
	page   = 16
	pages  = 40
)

// answer is the client's answer of a match.
type answer struct {
	Code       string
	Matches    [][3]any
	Best, Read int
}

// worker is a publisher of SGLang with the announced blocks.
type worker struct {
	engine  *pyenv.Engine
	address string
	held    map[string]map[int64]bool // by medium
}

// depth counts the leading blocks in device or host memory, naively.
func (w *worker) depth(hashes []int64) (n int) {
	for n < len(hashes) && (w.held["GPU"][hashes[n]] || w.held["CPU_PINNED"][hashes[n]]) {
		n++
	}
	return n
}

// TestRouter moves blocks of four prompts between device, host and disk with SGLang's publishers. After every round it
// queries every prompt, by all of the hashes and by some of the hashes. Answers must be equal to a naive count.
func TestRouter(t *testing.T) {
	x := harness.StartIndexer(t, t.TempDir(), "", "--grpc-listen", "127.0.0.1:0")
	file, err := filepath.Abs("../../../internal/faces/kvindexer/kvindexerpb/kv_indexer.proto")
	if err != nil {
		t.Fatal(err)
	}
	client := pyenv.StartKVIndexerClient(t, pyenv.Wheel(t, pinned), file, x.WaitFor(`gRPC is served" listen=(\S+)`)[1])
	sameProtocol(t, client)

	rng := rand.New(rand.NewPCG(*seed, 16))
	var tokens [4][]uint32
	var hashes [4][]int64
	for i := range tokens {
		tokens[i] = make([]uint32, pages*page)
		for at := range tokens[i] {
			tokens[i][at] = rng.Uint32N(1 << 17)
		}
		copy(tokens[i], tokens[0][:[]int{0, 10, 10, 25}[i]*page])
		var said struct{ Hashes []int64 }
		client.Do(map[string]any{"op": "hashes", "tokens": tokens[i], "page": page}, &said)
		hashes[i] = said.Hashes
	}
	var workers []*worker
	for i := range 4 {
		w := &worker{engine: pyenv.StartEngine(t, pyenv.EngineOptions{Wheel: pyenv.Wheel(t, pinned)}),
			address: fmt.Sprintf("http://10.1.2.%d:30000", i), held: map[string]map[int64]bool{"GPU": {}, "CPU_PINNED": {},
				"DISK": {}}}
		args := []string{"run", "--engine", w.engine.Endpoint, "--replay", w.engine.Replay, "--worker", fmt.Sprint("w", i),
			"--model", fmt.Sprint("model-", i%2), "--block-size", fmt.Sprint(page), "--source", "sglang", "--nats", x.NATS}
		if i == 3 {
			w.address = "" // registered without an address
		} else {
			args = append(args, "--serving-endpoint", w.address)
		}
		harness.Start(t, "worker-shim", args...).WaitFor("connected to the engine")
		workers = append(workers, w)
	}
	matched, deeper := 0, 0
	for round := range 8 {
		for _, w := range workers {
			w.change(rng, tokens, hashes)
		}
		for i := range tokens {
			n := []int{0, 1 + rng.IntN(pages)}[round%2]
			asked := hashes[i]
			if n > 0 {
				asked = asked[:n]
			}
			want := [][3]any{}
			for k, w := range workers {
				if d := w.depth(asked); d > 0 && w.address != "" {
					want = append(want, [3]any{w.address, float64(d), fmt.Sprint("w", k)})
					matched++
					for at, h := range asked[:d] {
						if at > 0 && w.held["GPU"][h] && !w.held["GPU"][asked[at-1]] { // in device, after a block in host
							deeper++
							break
						}
					}
				}
			}
			slices.SortStableFunc(want, func(a, b [3]any) int { return int(b[1].(float64) - a[1].(float64)) })
			harness.Eventually(t, fmt.Sprintf("seed %d, round %d, prompt %d: %v", *seed, round, i, want),
				func() (bool, string) {
					var got answer
					client.Do(map[string]any{"op": "match", "hashes": hashes[i], "max_blocks": n, "timeout": 60}, &got)
					best := 0
					if len(want) > 0 {
						best = int(want[0][1].(float64))
					}
					return got.Code == "OK" && slices.Equal(got.Matches, want) && got.Best == best && got.Read == len(asked),
						fmt.Sprintf("%+v", got)
				})
		}
	}
	if matched < 20 || deeper < 10 {
		t.Errorf("seed %d: only %d matches, %d with blocks alternating between device and host", *seed, matched, deeper)
	}
	t.Logf("%d matches, %d with blocks alternating between device and host", matched, deeper)
}

// change announces new, moved and removed blocks of some prompts.
func (w *worker) change(rng *rand.Rand, tokens [4][]uint32, hashes [4][]int64) {
	media := []string{"GPU", "GPU", "GPU", "CPU_PINNED", "CPU_PINNED", "DISK"}
	if rng.IntN(2) == 0 {
		media = media[:5]
	}
	var batch []map[string]any
	for _, i := range rng.Perm(len(tokens))[:2] {
		to := 1 + rng.IntN(pages)
		for at := range to {
			h := hashes[i][at]
			medium := media[rng.IntN(len(media))]
			for old, held := range w.held {
				if old != medium && held[h] {
					delete(held, h)
					defer w.engine.Publish(map[string]any{"type": "BlockRemoved", "block_hashes": []any{h}, "medium": old})
				}
			}
			if w.held[medium][h] {
				continue
			}
			w.held[medium][h] = true
			e := map[string]any{"type": "BlockStored", "block_hashes": []any{h}, "token_ids": tokens[i][at*page:][:page],
				"block_size": page, "medium": medium}
			if at > 0 {
				e["parent_block_hash"] = hashes[i][at-1]
			}
			batch = append(batch, e)
		}
		for at := to; at < pages; at++ { // later blocks are sometimes removed too
			for medium, held := range w.held {
				if h := hashes[i][at]; held[h] && rng.IntN(3) == 0 {
					delete(held, h)
					batch = append(batch, map[string]any{"type": "BlockRemoved", "block_hashes": []any{h}, "medium": medium})
				}
			}
		}
	}
	w.engine.Publish(batch...)
}

// sameProtocol compares protoc's result for Python with the source of the Go code.
func sameProtocol(t *testing.T, client *pyenv.KVIndexerClient) {
	t.Helper()
	var said struct{ Descriptor []byte }
	client.Do(map[string]any{"op": "descriptor"}, &said)
	var theirs descriptorpb.FileDescriptorProto
	if err := proto.Unmarshal(said.Descriptor, &theirs); err != nil {
		t.Fatal(err)
	}
	ours := protodesc.ToFileDescriptorProto(kvindexerpb.File_kv_indexer_proto)
	text := func(d *descriptorpb.FileDescriptorProto) []byte {
		for _, m := range d.MessageType {
			for _, f := range m.Field {
				f.JsonName = nil // only Go has the name
			}
		}
		b, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	if a, b := text(ours), text(&theirs); !bytes.Equal(a, b) {
		t.Errorf("the Go code is of another protocol; run go generate\n%s\n%s", a, b)
	}
}
