package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// natsCluster starts a cluster of three NATS servers with JetStream. A non-empty include is a configuration file for
// all servers.
func natsCluster(t *testing.T, include string) (addrs []string, servers []*harness.Process) {
	t.Helper()
	var routes, monitors []string
	for range 3 {
		addrs, routes, monitors = append(addrs, loopback.Reserve(t)), append(routes,
			loopback.Reserve(t)), append(monitors, loopback.Reserve(t))
	}
	for i := range addrs {
		config := filepath.Join(t.TempDir(), "nats.conf")
		text := fmt.Sprintf(
			"server_name: n%d\nlisten: %q\nhttp: %q\njetstream { store_dir: %q, max_file_store: 1TB }\ncluster { name: c, listen: %q, routes: [%q, %q, %q] }\n",
			i, addrs[i], monitors[i], t.TempDir(), routes[i], "nats://"+routes[0], "nats://"+routes[1], "nats://"+
				routes[2])
		if include != "" {
			// The path is relative to the configuration's folder.
			path, err := filepath.Rel(filepath.Dir(config), include)
			if err != nil {
				t.Fatal(err)
			}
			text += fmt.Sprintf("include %q\n", path)
		}
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		servers = append(servers, harness.Start(t, "nats-server", "-c", config))
	}
	for _, addr := range monitors {
		harness.Eventually(t, "the NATS cluster has a leader", func() (bool, string) {
			status, said, err := harness.Request(addr, "GET", "/healthz", "")
			return err == nil && status == 200, fmt.Sprint(said, err)
		})
	}
	return addrs, servers
}

// TestAskingWithoutQuorum kills two of three NATS servers. Queries over NATS are answered as before, and operations
// that need JetStream return an error with the missing part.
func TestAskingWithoutQuorum(t *testing.T) {
	t.Parallel()
	addrs, servers := natsCluster(t, "")
	urls := strings.Join(addrs, ",")
	prompt := filepath.Join(t.TempDir(), "prompt.json")
	engine := harness.Start(t, "worker-shim", "simulate", "--endpoint", "tcp://127.0.0.1:0", "--replay",
		"tcp://127.0.0.1:0", "--rate", "20", "--print-prompt", prompt)
	at := engine.WaitFor(`endpoint=(\S+) replay=(\S+)`)
	serve := func(name string) *harness.Process {
		p := harness.Start(t, "indexer", "serve", "--nats", urls, "--node-id", name, "--nats-replicas", "3", "--partitions",
			"2", "--http-listen", "")
		p.WaitFor(`msg=ready`)
		return p
	}
	a := serve("a")
	serve("b").WaitFor(`msg="a node is there" node=a`)
	a.WaitFor(`msg="a node is there" node=b`)
	harness.Start(t, "worker-shim", "run", "--nats", urls, "--engine", at[1], "--replay", at[2], "--worker", "w1",
		"--model", "m", "--block-size", "16")
	engine.WaitFor(`the last prompt is written`)
	ask := func(args ...string) harness.Result { return harness.Run(t, "indexer", append(args, "--nats", urls)...) }
	query := func() (bool, string) {
		var a api.Answer
		r := ask("query", "--model", "m", "--tokens-file", prompt, "--json")
		return r.Code == 0 && json.Unmarshal([]byte(r.Stdout), &a) == nil && a.Complete && len(a.Workers) == 1 &&
			a.Workers[0].Device > 0, r.Stdout + r.Stderr
	}
	harness.Eventually(t, "both nodes credit the worker", func() (bool, string) {
		for range 10 { // any node answers
			if ok, said := query(); !ok {
				return false, said
			}
		}
		return true, "" // it stays so: all made-up prompts begin alike
	})
	for _, s := range servers[1:] {
		s.Kill()
	}
	harness.Eventually(t, "a query without a quorum is answered", query)
	if r := ask("workers"); r.Code != 0 || !strings.Contains(r.Stdout, "w1 ") {
		t.Errorf("workers: %+v", r)
	}
	if r := ask("cluster"); r.Code != 0 || !strings.Contains(r.Stdout, "\na ") || !strings.Contains(r.Stdout, "\nb ") {
		t.Errorf("cluster: %+v", r)
	}
	if r := ask("status"); !strings.Contains(r.Stdout, "\na  ") || !strings.Contains(r.Stdout, "\nb  ") {
		t.Errorf("status: %+v", r)
	}
	// a leader without the other servers continues for a while
	harness.Eventually(t, "JetStream is seen to be away", func() (bool, string) {
		r := ask("snapshot", "list", "--timeout", "15s")
		return r.Code == 1 && strings.Contains(r.Stderr, "no meta leader") &&
			!strings.Contains(r.Stderr, "no NATS server answers"), r.Stdout + r.Stderr
	})
	late := harness.Start(t, "worker-shim", "run", "--nats", urls, "--engine", at[1], "--replay", at[2], "--worker",
		"w2", "--model", "m", "--block-size", "16")
	late.WaitFor(`waiting for JetStream; NATS answers, but its JetStream does not.*what_to_do=.*more than half`)
}

// TestAskingWithoutJetStream queries from an account without JetStream, with the indexer's service imported from an
// account with JetStream.
func TestAskingWithoutJetStream(t *testing.T) {
	t.Parallel()
	addr, config := loopback.Reserve(t), filepath.Join(t.TempDir(), "nats.conf")
	text := fmt.Sprintf(`listen: %q
jetstream { store_dir: %q, max_file_store: 1TB }
accounts {
  KV { jetstream: enabled, users: [{user: node, password: n}], exports: [{service: "kv.v1.default.q.>"}] }
  APP { users: [{user: router, password: r}], imports: [{service: {account: KV, subject: "kv.v1.default.q.>"}}] }
}
`, addr, t.TempDir())
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	harness.Start(t, "nats-server", "-c", config).WaitFor("Server is ready")
	harness.Start(t, "indexer", "serve", "--nats", "nats://node:n@"+addr, "--partitions", "2", "--http-listen",
		"").WaitFor(`msg=ready`)
	ask := func(args ...string) harness.Result {
		return harness.Run(t, "indexer", append(args, "--nats", "nats://router:r@"+addr)...)
	}
	if r := ask("query", "--model", "m", "--tokens", "1"); r.Code != 1 ||
		!strings.Contains(r.Stderr, `no worker has announced the model "m"`) {
		t.Errorf("query: %+v", r)
	}
	for _, command := range []string{"workers", "status", "cluster"} {
		harness.Eventually(t, command+" is answered", func() (bool, string) { // at first no ready node is visible
			r := ask(command)
			return r.Code == 0 && r.Stdout != "", r.Stdout + r.Stderr
		})
	}
	if r := ask("snapshot", "list"); r.Code != 1 || !strings.Contains(r.Stderr, "JetStream is not enabled") {
		t.Errorf("snapshot list: %+v", r)
	}
}
