package integration

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// dialSites are the files that may connect without [dial.Dialer], with the reason that the address does not come from a
// client, a lease or a registration.
var dialSites = map[string]string{
	"internal/base/dial/dialer.go":            "the dialer itself",
	"internal/serve/cli/notify.go":            "the service manager's socket, of the environment",
	"internal/ingest/zmtp/endpoint.go":        "stale tests the socket before this process listens",
	"internal/ingest/kube/client.go":          "the API server of a flag, or of the pod's own cluster",
	"internal/edge/tracing/otlp.go":           "the collector of a flag",
	"internal/ingest/etcd/etcd.go":            "etcd of a flag; Config.Dial has the rule for registrations",
	"pkg/client/http.go":                      "the indexer, of a program that uses the client",
	"internal/ingest/sharedstore/mooncake.go": "MooncakeConfig.Dial makes the connections",
	"pkg/jetstream/conn.go":                   "NATS, of a flag",
	"pkg/jetstream/dialer.go":                 "the same",
	"internal/serve/remote/http.go":           "the indexer itself, of a flag",
	"internal/operate/upkeep/probe.go":        "the indexer itself, of a flag",
	"internal/operate/upkeep/lameduck.go":     "the NATS server of the same container, of a flag",
}

// zmtpSites are the files that may open ZeroMQ connections, with a rule, or with the endpoint of a flag.
var zmtpSites = map[string]string{
	"internal/ingest/shim/run.go":             "Config.Sockets has the rule",
	"internal/ingest/shim/replay.go":          "the same",
	"internal/ingest/shim/watch.go":           "the same",
	"internal/ingest/shim/host/learn.go":      "the engine of --engine-http",
	"internal/ingest/shim/host/remote.go":     "the same",
	"internal/ingest/shim/host/loadsocket.go": "the same",
	"internal/ingest/source/zeromq.go":        "the rule of --dial-allow",
	"internal/ingest/source/store.go":         "the master of --engine",
}

// TestDialSites finds all places of the programs that connect. A new place must use [dial.Dialer] or [dial.Client] with
// the rule of --dial-allow, or have a reason in this file.
func TestDialSites(t *testing.T) {
	t.Parallel()
	connects := map[string]map[string]bool{
		"net": {"Dial": true, "DialTimeout": true, "DialTCP": true, "DialUDP": true, "DialUnix": true, "DialIP": true,
			"Dialer": true},
		"tls": {"Dial": true, "DialWithDialer": true, "Dialer": true},
		"http": {"Client": true, "DefaultClient": true, "Transport": true, "DefaultTransport": true, "Get": true,
			"Head": true, "Post": true, "PostForm": true},
		"grpc": {"NewClient": true, "Dial": true, "DialContext": true},
		"nats": {"Connect": true},
		"zmtp": {"DialSub": true, "DialDealer": true, "Probe": true},
	}
	used := map[string]bool{}
	for _, root := range []string{"../internal", "../pkg", "../cmd"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			name := strings.TrimPrefix(filepath.ToSlash(path), "../")
			ast.Inspect(file, func(n ast.Node) bool {
				if pointer, is := n.(*ast.StarExpr); is { // a type of an existing connection
					of, is := pointer.X.(*ast.SelectorExpr)
					return !is || of.Sel.Name != "Client" && of.Sel.Name != "Transport" && of.Sel.Name != "Dialer"
				}
				of, is := n.(*ast.SelectorExpr)
				if !is {
					return true
				}
				pkg, is := of.X.(*ast.Ident)
				if !is || !connects[pkg.Name][of.Sel.Name] {
					return true
				}
				sites := dialSites
				if pkg.Name == "zmtp" {
					sites = zmtpSites
				}
				if sites[name] == "" {
					t.Errorf("%s uses %s.%s: internal/base/dial connects to addresses from clients with the rule of "+
						"--dial-allow; if this address is the operator's, add the file and the reason to this test", name,
						pkg.Name, of.Sel.Name)
				}
				used[name] = true
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, sites := range []map[string]string{dialSites, zmtpSites} {
		for name := range sites {
			if !used[name] {
				t.Errorf("%s no longer connects: remove the file from this test", name)
			}
		}
	}
}
