package integration

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestPrefixesOfAllNodes compares the tree of three nodes with a third of the partitions with the tree of a single node
// with all partitions. All three nodes return the same tree. A request for a single node returns the node's own tree,
// joined if the node has several indexes.
func TestPrefixesOfAllNodes(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t)
	nats := harness.StartNATS(t)
	var three []*harness.Process
	for i := range 3 {
		three = append(three, harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", fmt.Sprint("n", i),
			"--partitions", "8", "--partition-replicas", "1", "--http-listen", "127.0.0.1:0",
			"--index-shards", fmt.Sprint(i+1)))
	}
	one := harness.StartIndexer(t, t.TempDir(), "", "--node-id", "one", "--index-shards", "1")
	sharded := harness.StartIndexer(t, t.TempDir(), "", "--node-id", "sharded", "--index-shards", "3")
	nodes := []string{one.HTTP}
	for _, n := range three {
		nodes = append(nodes, n.WaitFor(`HTTP is served" listen=(\S+)`)[1])
		n.WaitFor(`msg=ready`)
	}
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	const workers = 24
	for _, address := range []string{one.NATS, sharded.NATS, nats} {
		ns := harness.OpenNamespace(t, ctx, address)
		for i := range workers { // a system prompt, a prompt of one of four users, and a unique part
			tokens := slices.Concat(harness.Tokens(1, 20*harness.BlockSize),
				harness.Tokens(100_000*(1+i%4), (5+i%4)*harness.BlockSize),
				harness.Tokens(1_000_000*(1+i), (1+i)*harness.BlockSize))
			locals := hasher.Hash(nil, tokens)
			names := make([]events.BlockHash, len(locals))
			for b := range names {
				names[b] = events.BlockHash(1 + b)
			}
			list := []events.Event{{Kind: events.Stored, Tier: events.Device, Blocks: names, Locals: locals}}
			if i%3 == 0 { // the first blocks of the users' prompts on the host too
				list = append(list, events.Event{Kind: events.Stored, Tier: events.Host, Blocks: names[:22], Locals: locals[:22]})
			}
			harness.PublishAs(t, ctx, ns, events.WorkerID(fmt.Sprintf("w%02d", i)), &events.Batch{Incarnation: 1, FirstID: 1,
				Model: "m", BlockSize: harness.BlockSize, Events: list})
		}
	}
	tree := func(node, name string) (tree api.PrefixTree, err error) {
		err = harness.HTTPDo(node, "POST", "/v1/prefixes", api.PrefixesRequest{Model: "m", Node: name}, &tree)
		return tree, err
	}
	// the runs with their paths from the start, in an order independent of the tree
	text := func(tree *api.PrefixTree) (list []string) {
		ways := make([]string, len(tree.Runs))
		for i, r := range tree.Runs {
			if ways[i] = r.Hash; r.Parent >= 0 {
				ways[i] = ways[r.Parent] + "/" + r.Hash
			}
			slices.SortFunc(r.Workers, api.RankPlace.Compare)
			list = append(list, fmt.Sprintf("%s: %d+%d by %d %v %v", ways[i], r.Depth, r.Blocks, r.Holders, r.Tiers, r.Workers))
		}
		slices.Sort(list)
		return append(list, fmt.Sprintf("%d runs, %d blocks, %d ranks", tree.TotalRuns, tree.TotalBlocks, tree.Ranks))
	}
	var want []string
	harness.Eventually(t, "the single node has all workers", func() (bool, string) {
		tree, err := tree(one.HTTP, "one")
		want = text(&tree)
		return len(tree.Runs) == 1+4+workers && tree.Runs[0].Holders == workers, fmt.Sprint(tree, err)
	})
	same := func(what, node, name string) {
		harness.Eventually(t, what, func() (bool, string) {
			tree, err := tree(node, name)
			got := text(&tree)
			return err == nil && tree.Complete && tree.Node == name && slices.Equal(got, want),
				fmt.Sprintf("%v\n%q\nwant\n%q", err, got, want)
		})
	}
	for _, node := range nodes {
		same("the same of all nodes", node, "")
	}
	same("the same of several indexes", sharded.HTTP, "sharded")
	same("the same of several indexes, as of all nodes", sharded.HTTP, "")
	ranks := 0
	for i := range three {
		part, err := tree(nodes[1], fmt.Sprint("n", i))
		if err != nil && !strings.Contains(err.Error(), string(api.CodeUnknownModel)) || part.Ranks == workers {
			t.Errorf("n%d: %+v, %v", i, part, err)
		}
		ranks += part.Ranks
	}
	if ranks != workers {
		t.Errorf("the nodes have %d ranks", ranks)
	}
	if err := harness.HTTPDo(nodes[2], "POST", "/v1/prefixes", api.PrefixesRequest{Model: "none"}, nil); err == nil ||
		!strings.Contains(err.Error(), string(api.CodeUnknownModel)) {
		t.Errorf("a model without workers: %v", err)
	}
}
