//go:build judges

package observe

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// world is a cluster of three nodes with a shared store, two simulated engines and their shims, under load until the
// end of the test.
type world struct {
	nodes, shims []string // addresses of the HTTP ports
}

// limitedNATS starts a server with a limited account, because the limit is a metric too.
func limitedNATS(t *testing.T) (address string) {
	t.Helper()
	address, dir := loopback.Reserve(t), t.TempDir()
	config := write(t, filepath.Join(dir, "nats.conf"), fmt.Sprintf(`
listen: %q
jetstream { store_dir: %q, max_file_store: 1TB }
accounts { A { jetstream { max_file: 8G, max_mem: 1G }, users: [{user: a, password: a}] } }
no_auth_user: a
`, address, filepath.Join(dir, "data")))
	harness.Start(t, "nats-server", "-c", config).WaitFor(`Server is ready`)
	return address
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{}
	nats := limitedNATS(t)
	stores := harness.WriteStores(t, map[string]hicache.Config{"m": {SGLang: &hicache.SGLang{Backend: "file",
		PageSize: harness.BlockSize, TPSize: 1, PPSize: 1, ModelName: "org/m", Directory: t.TempDir()}}})
	var nodes []*harness.Process
	for _, id := range []string{"node-a", "node-b", "node-c"} {
		nodes = append(nodes, harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", id,
			"--partition-replicas", "2",
			"--partitions", "4", "--http-listen", "127.0.0.1:0", "--l3-config", stores))
	}
	for _, n := range nodes {
		w.nodes = append(w.nodes, n.WaitFor(`HTTP is served" listen=(\S+)`)[1])
		n.WaitFor(`msg=ready`)
	}
	prompt := harness.Tokens(1, 20*harness.BlockSize)
	for i := range 2 {
		e := harness.StartSimEngine(t)
		shim := harness.StartSimShim(t, e, nats, fmt.Sprintf("gpu-%d", i+1), "--http-listen", "127.0.0.1:0")
		w.shims = append(w.shims, shim.WaitFor(`HTTP is served" listen=(\S+)`)[1])
		harness.ServePrompt(t, e, prompt[:(4+8*i)*harness.BlockSize])
	}
	for _, node := range w.nodes {
		harness.Eventually(t, "every node chooses the best worker", func() (bool, string) {
			var chosen struct{ Worker string }
			err := harness.HTTPOnce(node, "POST", "/v1/select", map[string]any{"model": "m", "tokens": prompt}, &chosen)
			return err == nil && chosen.Worker == "gpu-2", fmt.Sprint(chosen, err)
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for i := 0; ctx.Err() == nil; i++ {
			node, id := w.nodes[i%len(w.nodes)], fmt.Sprint("r", i)
			// A late reply does not matter here: the other replies are checked below.
			_ = harness.HTTPOnce(node, "POST", "/v1/find", map[string]any{"model": "m", "tokens": prompt}, new(string))
			_ = harness.HTTPOnce(node, "POST", "/v1/select", map[string]any{"model": "m", "tokens": prompt,
				"request_id": id, "book": true}, new(string))
			_ = harness.HTTPOnce(node, "POST", "/v1/report", map[string]any{"request_id": id, "cached_tokens": 160},
				new(string))
			_ = harness.HTTPOnce(node, "POST", "/v1/free", map[string]any{"model": "m", "request_id": id}, new(string))
			_ = harness.HTTPOnce(node, "POST", "/v1/snapshot", map[string]any{}, new(string))
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return w
}

// scraped returns the names of all metrics and samples of all nodes and shims.
func (w *world) scraped(t *testing.T) map[string]bool {
	names := map[string]bool{}
	for _, at := range append(w.nodes, w.shims...) {
		var text string
		if err := harness.HTTPDo(at, "GET", "/metrics", nil, &text); err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^(?:# TYPE )?(\w+)[{ ]`).FindAllStringSubmatch(text, -1) {
			names[m[1]] = true
		}
	}
	return names
}

// expressions returns the queries of the dashboard with values for the variables.
func expressions(t *testing.T) (list []string) {
	var board struct {
		Panels []struct{ Targets []struct{ Expr string } }
	}
	if err := json.Unmarshal([]byte(read(t, deploy+"grafana/kvatlas.json")), &board); err != nil {
		t.Fatal(err)
	}
	for _, p := range board.Panels {
		for _, target := range p.Targets {
			list = append(list, strings.NewReplacer("$model", ".*", "$__rate_interval", "10m").Replace(target.Expr))
		}
	}
	if len(list) < 30 {
		t.Fatalf("the dashboard has only %d queries", len(list))
	}
	return list
}

// prometheus runs a server with the rules that scrapes the world every second.
func (w *world) prometheus(t *testing.T) (address string) {
	dir := t.TempDir()
	rules, err := filepath.Abs(deploy + "prometheus/rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	list := func(addresses []string) string { return `["` + strings.Join(addresses, `","`) + `"]` }
	config := write(t, filepath.Join(dir, "prometheus.yml"), fmt.Sprintf(`
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%q]
scrape_configs:
  - {job_name: kvatlas, static_configs: [{targets: %s}]}
  - {job_name: kvatlas-shim, static_configs: [{targets: %s}]}
`, rules, list(w.nodes), list(w.shims)))
	server, _ := pyenv.Prometheus(t)
	p := harness.Start(t, server, "--config.file", config, "--storage.tsdb.path", filepath.Join(dir, "data"),
		"--web.listen-address", "127.0.0.1:0")
	return p.WaitFor(`msg="Listening on" address=(127\S+)`)[1]
}

// TestQueries checks that a busy cluster serves every metric in the rules and the dashboard, that Prometheus has an
// answer for every query of the dashboard, and that no rule fails.
func TestQueries(t *testing.T) {
	w, list := newWorld(t), expressions(t)
	rules := read(t, deploy+"prometheus/rules.yml")
	harness.Eventually(t, "every named metric is served", func() (bool, string) {
		names := w.scraped(t)
		for _, name := range regexp.MustCompile(`[\w:]+`).FindAllString(rules+strings.Join(list, "\n"), -1) {
			recorded := strings.Contains(name, ":kvatlas_") && strings.Contains(rules, "- record: "+name+"\n")
			if strings.Contains(name, "kvatlas_") && !names[name] && !recorded {
				return false, name + " is not"
			}
		}
		return true, ""
	})
	server := w.prometheus(t)
	for _, expr := range list {
		harness.Eventually(t, "there is a result of "+expr, func() (bool, string) {
			var answer struct {
				Data struct{ Result []any }
			}
			err := harness.HTTPDo(server, "GET", "/api/v1/query?query="+url.QueryEscape(expr), nil, &answer)
			return err == nil && len(answer.Data.Result) > 0, fmt.Sprint(err)
		})
	}
	harness.Eventually(t, "all rules are evaluated", func() (bool, string) {
		var answer struct {
			Data struct {
				Groups []struct {
					Rules []struct{ Name, Health, LastError string }
				}
			}
		}
		if err := harness.HTTPDo(server, "GET", "/api/v1/rules", nil, &answer); err != nil {
			return false, err.Error()
		}
		n := 0
		for _, g := range answer.Data.Groups {
			for _, r := range g.Rules {
				if n++; r.Health != "ok" {
					return false, fmt.Sprintf("%+v", r)
				}
			}
		}
		return n >= 25, fmt.Sprint(n, " rules")
	})
}
