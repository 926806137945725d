package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestMigrationToAccounts moves the users of a running cluster (three NATS servers, three nodes, three shims) from a
// single account, as in version 0.4, to separate accounts. Programs keep running with their keys. No query fails and no
// event is lost.
func TestMigrationToAccounts(t *testing.T) {
	t.Parallel()
	keys := t.TempDir()
	template, err := os.ReadFile("testdata/accounts-v0.4.0.conf.tmpl")
	if err != nil {
		t.Fatal(err)
	}
	old := regexp.MustCompile(`\{\{(\S+)\}\}`).ReplaceAllStringFunc(string(template), func(user string) string {
		seed, public := newUserKey(t)
		if err := os.WriteFile(filepath.Join(keys, "a-"+strings.Trim(user, "{}")+".nk"), seed, 0o600); err != nil {
			t.Fatal(err)
		}
		return public
	})
	accounts := filepath.Join(t.TempDir(), "accounts.conf")
	if err := os.WriteFile(accounts, []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	addrs, servers := natsCluster(t, accounts)
	urls := strings.Join(addrs, ",")
	as := func(user string) []string {
		return []string{"--nats", urls, "--namespace", "a", "--nats-nkey", filepath.Join(keys, "a-"+user+".nk"),
			"--nats-inbox-prefix", "_INBOX_" + user}
	}
	for _, id := range []string{"n0", "n1", "n2"} {
		harness.Start(t, "indexer", append(as("node"), "serve", "--node-id", id, "--nats-replicas", "3", "--partitions", "4",
			"--http-listen", "")...).WaitFor(`msg=ready`)
	}
	const workers = 3
	prompt := func(w, n int) []uint32 { return harness.Tokens(w<<24, n*harness.BlockSize) }
	serve, shims := make([]func(n int), workers), make([]*harness.Process, workers)
	for w := range workers {
		engine, name := harness.StartSimEngine(t), fmt.Sprint("w", w)
		shims[w] = harness.Start(t, "worker-shim", append(as("shim-"+name), "run", "--engine", engine.Endpoint(), "--replay",
			engine.Replay(), "--worker", name, "--model", "m", "--block-size", "16")...)
		shims[w].WaitFor(`msg=registered`)
		serve[w] = func(n int) { harness.ServePrompt(t, engine, prompt(w, n)) }
		serve[w](1)
	}
	conn, err := jetstream.Connect(t.Context(), jetstream.ConnOptions{URLs: addresses(addrs), Core: true,
		NkeyFile: filepath.Join(keys, "a-reader.nk"), InboxPrefix: "_INBOX_reader"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	reader := harness.Client(t, conn, "a", client.Options{})
	depth := func(ctx context.Context, w, n int) (uint32, error) {
		a, err := reader.Find(ctx, &api.Query{Model: "m", Tokens: prompt(w, n)})
		if err != nil {
			return 0, err
		}
		if !a.Complete {
			return 0, fmt.Errorf("incomplete: %+v", a.Missing)
		}
		held, err := harness.OnDevice(a)
		return held[events.WorkerID(fmt.Sprint("w", w))], err
	}
	awaitDepth := func(w, n int) {
		t.Helper()
		harness.Eventually(t, fmt.Sprintf("worker %d is credited with %d blocks", w, n), func() (bool, string) {
			got, err := depth(t.Context(), w, n)
			return err == nil && int(got) == n, fmt.Sprint(got, err)
		})
	}
	for w := range workers {
		awaitDepth(w, 1)
	}
	before := incarnations(t, as("reader"))

	// From here on there are always queries and always events.
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	asked, failed := make([]int, 4), make([]error, 4)
	for i := range asked {
		all.Go(func() {
			harness.Load(ctx, func(int) {
				within, cancel := context.WithTimeout(t.Context(), harness.Patience)
				if _, err := depth(within, i%workers, 1); err != nil {
					failed[i] = err
				}
				cancel()
				asked[i]++
			})
		})
	}
	blocks := make([]atomic.Int64, workers)
	for w := range workers {
		all.Go(func() {
			for n := 2; ctx.Err() == nil && n < 900; n++ {
				serve[w](n)
				blocks[w].Store(int64(n))
				select { // the engine's cache is to last for the whole test
				case <-ctx.Done():
				case <-time.After(300 * time.Millisecond):
				}
			}
		})
	}

	example := harness.Run(t, "indexer", "auth", "create", "--namespace", "a", "--partitions", "4", "--shim", "w0",
		"--shim", "w1", "--shim", "w2", "--keep-keys", "--keys", keys)
	if example.Code != 0 {
		t.Fatal(example.Stderr)
	}
	transition := harness.Run(t, "indexer", "auth", "print", "--transition", "--keys", keys)
	if transition.Code != 0 {
		t.Fatal(transition.Stderr)
	}
	// Shims claim their models once the permissions allow claims. Nodes require claims with the second configuration.
	admin, err := jetstream.Connect(t.Context(), jetstream.ConnOptions{URLs: addresses(addrs),
		NkeyFile: filepath.Join(keys, "a-node.nk"), InboxPrefix: "_INBOX_node"})
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	ns, err := jetstream.OpenNamespace(t.Context(), admin, "a")
	if err != nil {
		t.Fatal(err)
	}
	awaitClaims := func() {
		t.Helper()
		for w := range workers {
			key, err := jetstream.ClaimKey(events.WorkerID(fmt.Sprint("w", w)), "m")
			if err != nil {
				t.Fatal(err)
			}
			harness.Eventually(t, fmt.Sprintf("worker %d has claimed the model", w), func() (bool, string) {
				_, err := ns.OpenWorkers().Latest(t.Context(), key)
				return err == nil, fmt.Sprint(err)
			})
		}
	}
	reloads := 0
	for _, step := range []struct {
		config string
		times  int
	}{{transition.Stdout, 2}, {example.Stdout, 1}} {
		if err := os.WriteFile(accounts, []byte(step.config), 0o600); err != nil {
			t.Fatal(err)
		}
		for range step.times {
			reloads++
			for _, s := range servers {
				if err := s.Cmd.Process.Signal(syscall.SIGHUP); err != nil {
					t.Fatal(err)
				}
				s.WaitFor(fmt.Sprintf(`(?s)(Reloaded server configuration.*){%d}`, reloads))
				for w := range workers { // events go on before the next
					awaitDepth(w, int(blocks[w].Load())+1)
				}
			}
		}
		awaitClaims()
	}
	stop()
	all.Wait()
	for i, err := range failed {
		if err != nil {
			t.Errorf("asking %d: %v", i, err)
		}
	}
	for w := range workers {
		awaitDepth(w, int(blocks[w].Load()))
	}
	if after := incarnations(t, as("reader")); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("ranks began anew: %v, then %v", before, after)
	}
	// Nodes reach shims in the shims' accounts.
	r := harness.Run(t, "indexer", append(as("node"), "resync", "--worker", "w1")...)
	if r.Code != 0 || !strings.Contains(r.Stdout, "w1") {
		t.Errorf("resync: %+v", r)
	}
	awaitDepth(1, int(blocks[1].Load()))
	t.Logf("%v queries, %d blocks announced meanwhile", asked, blocks[0].Load()+blocks[1].Load()+blocks[2].Load())
}

// incarnations returns the incarnations of all ranks.
func incarnations(t *testing.T, as []string) map[string]uint64 {
	t.Helper()
	r := harness.Run(t, "indexer", append(as, "workers", "--json")...)
	var list api.WorkerList
	if err := json.Unmarshal([]byte(r.Stdout), &list); err != nil {
		t.Fatal(err, r)
	}
	found := map[string]uint64{}
	for _, w := range list.Workers {
		found[string(w.Instance)] = uint64(w.Incarnation)
	}
	return found
}

func addresses(addrs []string) (urls []string) {
	for _, a := range addrs {
		urls = append(urls, "nats://"+a)
	}
	return urls
}
