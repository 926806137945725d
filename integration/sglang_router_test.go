package integration

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/faces/kvindexer/kvindexerpb"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestSGLangRouter queries two nodes over gRPC, as SGLang's router does, about workers with blocks in device or host
// memory, some with hybrid models or another model. The matches must be the naive twin's, with the registered addresses
// of the workers.
func TestSGLangRouter(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	ctx := harness.Context(t)
	var nodes []*harness.Indexer
	var clients []kvindexerpb.KVIndexerClient
	for i := range 2 {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id",
			fmt.Sprint("n", i), "--partitions", "4",
			"--partition-replicas", "1", "--http-listen", "127.0.0.1:0", "--grpc-listen",
			"127.0.0.1:0")}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		nodes, clients = append(nodes, x), append(clients, kvindexerpb.NewKVIndexerClient(dialGRPC(t, x)))
	}
	ns := harness.OpenNamespace(t, ctx, nats)
	const blocks = 60
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	locals := hasher.Hash(nil, harness.Tokens(1, blocks*harness.BlockSize))
	rng := rand.New(rand.NewPCG(16, 5))
	var hashes []int64
	var names []events.BlockHash
	for range blocks {
		name := rng.Uint64()
		hashes, names = append(hashes, int64(name)), append(names, events.BlockHash(name))
	}
	asked := map[string]func(n int) uint32{} // by address
	for i, groups := range []string{"full", "full", "full", "full,swa:40", "full,mamba", "full", "full"} {
		kinds, err := events.ParseGroups(groups)
		if err != nil {
			t.Fatal(err)
		}
		worker, model, truth := events.WorkerID(fmt.Sprint("w", i)), "m", harness.NewTruth()
		address := fmt.Sprintf("http://10.0.0.%d:30000/", i)
		if i == 5 {
			model = "another"
		}
		b := &events.Batch{Incarnation: 1, FirstID: 1, Model: model, BlockSize: harness.BlockSize}
		for n := range blocks - rng.IntN(20) {
			for g, k := range kinds {
				e := events.Event{Kind: events.Stored, Group: events.GroupIndex(g), Attention: k.Kind, Window: k.Window,
					Tier: events.Tier(1 + rng.IntN(2)), Blocks: names[n : n+1]}
				if rng.IntN(40) == 0 {
					e.Tier = events.Disk
				}
				if g == 0 {
					e.Locals = locals[n : n+1]
					if e.HasParent = n > 0; n > 0 {
						e.Parent = names[n-1]
					}
				}
				b.Events = append(b.Events, e)
			}
		}
		truth.Apply(0, b.Events)
		harness.PublishAs(t, ctx, ns, worker, b)
		body := fmt.Sprintf(`{"instance":%q,"model":%q,"block_size":%d}`, worker, model, harness.BlockSize)
		if i != 6 { // worker 6 has no address
			body = strings.TrimSuffix(body, "}") + fmt.Sprintf(`,"endpoint":%q}`, address)
			asked[address] = func(n int) uint32 { return uint32(truth.Within(locals[:n], events.Device, events.Host)) }
		}
		if code, reply, err := harness.Request(nodes[0].HTTP, "POST", "/v1/workers", body); code != 200 {
			t.Fatal(code, reply, err)
		}
	}
	for i, client := range clients {
		for _, n := range []int{blocks, 33, 1} {
			q := &kvindexerpb.MatchExternalKvPrefixRequest{Hashes: hashes, MaxBlocks: uint32(n % blocks)}
			var want []string
			for address, depth := range asked {
				if d := depth(n); d > 0 {
					want = append(want, fmt.Sprintf("%3d %s", d, address))
				}
			}
			slices.Sort(want)
			harness.Eventually(t, fmt.Sprintf("node %d answers %q", i, want), func() (bool, string) {
				a, err := client.MatchExternalKvPrefix(ctx, q)
				if err != nil {
					return false, err.Error()
				}
				var got []string
				for _, m := range a.Matches {
					got = append(got, fmt.Sprintf("%3d %s", m.MatchedPrefixBlocks, m.WorkerAddress))
				}
				sorted := slices.IsSortedFunc(a.Matches, func(x, y *kvindexerpb.ExternalKvPrefixMatch) int {
					return int(y.MatchedPrefixBlocks) - int(x.MatchedPrefixBlocks)
				})
				slices.Sort(got)
				return slices.Equal(got, want) && sorted && a.BestPrefixBlocks == a.Matches[0].MatchedPrefixBlocks &&
					a.BlocksRead == uint32(n), fmt.Sprint(got, a.BestPrefixBlocks, a.BlocksRead)
			})
		}
		strange := &kvindexerpb.MatchExternalKvPrefixRequest{Hashes: hashes[1:]}
		if a, err := client.MatchExternalKvPrefix(ctx, strange); err != nil || len(a.Matches) > 0 ||
			a.BlocksRead != blocks-1 {
			t.Errorf("not from the first block: %+v, %v", a, err)
		}
		large := &kvindexerpb.MatchExternalKvPrefixRequest{Hashes: make([]int64, api.MaxTokens)} // and two heads
		if _, err := client.MatchExternalKvPrefix(ctx, large); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("more than 8 MiB: %v", err)
		}
	}
	nobody := dialGRPC(t, nodes[0])
	if err := nobody.Invoke(ctx, "/kv_indexer.v1.KVIndexer/ApplyExternalKvBatch",
		&kvindexerpb.MatchExternalKvPrefixRequest{}, &kvindexerpb.MatchExternalKvPrefixResponse{},
		grpc.WaitForReady(true)); status.Code(err) != codes.Unimplemented {
		t.Errorf("an unknown call: %v", err)
	}
}
