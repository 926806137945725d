package integration

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestFlagsThatMakeNoSense checks that meaningless flags end the program with status 2 and a line with the flag and the
// reason.
func TestFlagsThatMakeNoSense(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		command string
		want    string
	}{
		{"indexer nonsense", `unknown command "nonsense"`},
		{"indexer snapshot nonsense", `unknown command "nonsense"`},
		{"indexer serve extra", "extra"},
		{"indexer serve --data x --nats nats://127.0.0.1:1", "--data and --nats exclude each other"},
		{"indexer serve --nats nats://127.0.0.1:1 --nats-listen 127.0.0.1:0",
			"--nats-listen is about a server in this process"},
		{"indexer serve --namespace Bad.Name", "--namespace"},
		{"indexer serve --nats-replicas 2", "--nats-replicas 2 is none of 1, 3, 5"},
		{"indexer serve --snapshot-interval -1s", "--snapshot-interval -1s is not positive"},
		{"indexer serve --http-listen here", `--http-listen "here" is not HOST:PORT`},
		{"indexer serve --grpc-listen 0.0.0.0:0", "--grpc-listen 0.0.0.0:0 is reachable from other hosts"},
		{"indexer serve --log-level loud", `--log-level "loud"`},
		{"indexer serve --snapshot-interval soon", "soon"},
		{"indexer query --tokens 1", "--model is missing"},
		{"indexer query --model m", "give --tokens, --tokens-file, --hashes, --engine-hashes, --prompt-file or --messages-file"},
		{"indexer query --model m --tokens 1 --hashes 1", "give one of"},
		{"indexer query --model m --tokens 1,x", `number 2 is "x", not an unsigned 32-bit number`},
		{"indexer query --model m --tokens 4294967296", "not an unsigned 32-bit number"},
		{"indexer query --model m --tokens-file /nonexistent/file", "/nonexistent/file"},
		{"indexer query --model m --tokens 1 --timeout 0s", "--timeout"},
		{"indexer serve --store-bytes -1", "--store-bytes -1 is negative"},
		{"indexer serve --nats nats://127.0.0.1:1 --store-bytes 1", "--store-bytes is about a server in this process"},
		{"indexer resync", "give --partition or --worker"},
		{"indexer resync --partition 1 --worker w", "give --partition or --worker"},
		{"indexer models remove", "accepts 1 arg(s)"},
		{"indexer workers clear w1 --rank x", "--rank"},
		{"indexer import --block-size 16", "--model is missing"},
		{"indexer import --model m", "--block-size 0 is not from 1"},
		{"indexer snapshot list --namespace Bad.Name", "--namespace"},
		{"indexer bench cluster --workers 0", "--workers 0 is not from 1"},
		{"indexer demo --block-size 7", "--block-size"},
		{"indexer demo --engines 0", "--engines 0 is not from 1"},
		{"indexer demo --l3-python x", "--l3-python and --l3-limit need --l3"},
		{"indexer serve --zone rack/7", `--zone: zone "rack/7" is not 1 to 63 letters, digits`},
		{"indexer serve --max-requests 0", "--max-requests 0 is not from 1 to 1048576"},
		{"indexer serve --max-requests 1048577", "--max-requests 1048577 is not from 1 to 1048576"},
		{"indexer serve --l3-hit-life 0s", "--l3-hit-life 0s is not positive"},
		{"indexer auth create", "--keys is missing"},
		{"indexer auth create --keys x --namespace Bad.Name", "--namespace"},
		{"indexer auth create --keys x --partitions 0", "--partitions 0 is not from 1"},
		{"indexer probe", "accepts 1 arg(s)"},
		{"indexer probe localhost", `"localhost" is not an http:// or https:// URL`},
		{"indexer lameduck --monitor localhost", `--monitor "localhost" is not an http:// or https:// URL`},
		{"indexer lameduck --pid 0", "--pid 0 is not a process"},
		{"indexer lameduck --wait -1s", "--wait -1s is negative"},
		{"worker-shim run --engine tcp://127.0.0.1:1 --worker w --model m --block-size 16 " +
			"--serving-endpoint http://fd00::2:8000", "write [ADDRESS]:PORT, as in http://[fd00::2]:8000"},
		{"worker-shim simulate --rate 0", "--rate 0 is not above 0"},
		{"worker-shim simulate --block-size 7", "--block-size"},
		{"worker-shim simulate --endpoint nowhere", "--endpoint"},
		{"worker-shim run", "--engine is missing"},
		{"worker-shim run --engine tcp://127.0.0.1:1 --worker w --model m", "--block-size 0 is not"},
		{"worker-shim run --engine tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --worker w --model m --block-size 16 --ranks 2", "tcp://127.0.0.1:5558 is both rank 0's replay endpoint and rank 1's event endpoint"},
		{"worker-shim run --engine tcp://127.0.0.1:65535 --worker w --model m --block-size 16 --ranks 2",
			"port 65535 + 1 is out of range"},
		{"worker-shim run --engine ipc:///x --worker w --model m --block-size 16 --ranks 2",
			"several ranks need tcp:// endpoints"},
		{"worker-shim run --engine tcp://127.0.0.1:1 --worker w --model m --block-size 16 --ranks 0",
			"--ranks 0 is not from 1"},
		{"worker-shim run --source ndjson --engine tcp://127.0.0.1:1 --model m --block-size 16",
			"neither - nor ipc://PATH"},
		{"worker-shim run --source dynamo-nats --engine subject --replay tcp://127.0.0.1:1 --model m --block-size 16",
			"--replay is not for --source dynamo-nats"},
		{"worker-shim run --engine tcp://127.0.0.1:1 --worker w --model m --block-size 16 --engine-nats tls://127.0.0.1:1", "the flags --engine-nats... are for --source dynamo-nats"},
		{"worker-shim run --source dynamo-nats --engine subject --model m --block-size 16 --etcd-user x",
			"the flags --etcd-... are for --source dynamo-zmq"},
		{"worker-shim run --source dynamo-zmq --engine https://etcd:1,https://etcd:1/x --model m --block-size 16 --etcd-cert x",
			"--etcd-cert and --etcd-key go together"},
		{"worker-shim run --source dynamo-zmq --engine https://etcd:1,https://etcd:1/x --model m --block-size 16",
			"is not http://HOST:PORT or https://HOST:PORT"},
		{"worker-shim run --source dynamo-nats --engine subject --model m --block-size 16 --engine-nats-user x",
			"have no effect without --engine-nats itself"},
		{"worker-shim run --engine nowhere --worker w --model m --block-size 16", "--engine"},
		{"worker-shim run --engine tcp://127.0.0.1:1 --worker w --model m --block-size 16 --source trt", "--source"},
		{"worker-shim run --engine tcp://127.0.0.1:1 --worker w --model m --block-size 16 --nats-cert x",
			"--nats-cert and --nats-key go together"},
		{"worker-shim run --engine tcp://127.0.0.1:1 --worker w --model m --block-size 16 --nats http://127.0.0.1:4222", `scheme "http" is none of nats, tls, ws, wss`},
		{"indexer serve --log-age 1m --snapshot-interval 40s",
			"--log-age 1m0s is less than twice --snapshot-interval 40s"},
		{"indexer serve --nats one::", `--nats: address "nats://one::" has no host`},
	} {
		words := strings.Fields(c.command)
		r := harness.Run(t, words[0], words[1:]...)
		if r.Code != 2 || !strings.Contains(r.Stderr, c.want) || r.Stdout != "" || strings.Count(r.Stderr, "\n") != 1 {
			t.Errorf("%s: ended with %d, printed %q and %q; want 2 and %q", c.command, r.Code, r.Stdout, r.Stderr,
				c.want)
		}
	}
}

// TestServeSaysWhyItCannot starts an indexer in impossible places: a folder or a port in use, a server without
// JetStream, no server.
func TestServeSaysWhyItCannot(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	plain := loopback.Reserve(t)
	harness.Start(t, "nats-server", "-a", "127.0.0.1", "-p", strings.Split(plain, ":")[1]).WaitFor("Server is ready")
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--data", x.Data, "--nats-listen", "127.0.0.1:0"}, x.Data},
		{[]string{"--data", t.TempDir(), "--nats-listen", l.Addr().String()}, l.Addr().String()},
		{[]string{"--data", t.TempDir(), "--nats-listen", "127.0.0.1:0", "--http-listen", l.Addr().String()},
			"--http-listen"},
		{[]string{"--nats", "nats://" + plain}, "JetStream"},
		{[]string{"--nats", "nats://" + loopback.Reserve(t), "--nats-wait", "1s"}, "not available"},
		{[]string{"--nats", "nats://" + x.NATS, "--partitions", "8"}, "created with 4 partitions, and 8 are configured"},
	} {
		r := harness.Run(t, "indexer", append([]string{"serve", "--http-listen", "127.0.0.1:0"}, c.args...)...)
		lines := strings.Split(strings.TrimSpace(r.Stderr), "\n")
		if last := lines[len(lines)-1]; r.Code != 1 || !strings.HasPrefix(last, "indexer serve: ") ||
			!strings.Contains(last, c.want) {
			t.Errorf("%v: ended with %d and %q; want 1 and %q", c.args, r.Code, r.Stderr, c.want)
		}
	}
	for _, c := range []struct{ nats, want string }{
		{loopback.Reserve(t), "no NATS server answers"},
		{x.NATS + " --namespace other", `no indexer of namespace "other" answers`},
	} {
		r := harness.Run(t, "indexer", strings.Fields("query --model m --tokens 1 --nats "+c.nats)...)
		if r.Code != 1 || !strings.Contains(r.Stderr, c.want) {
			t.Errorf("%s: %+v, want %q", c.nats, r, c.want)
		}
	}
	for _, command := range []string{"query --model m --tokens 1",
		"serve --nats-wait 100ms --http-listen 127.0.0.1:0"} {
		r := harness.Run(t, "indexer", append(strings.Fields(command), "--nats", "nats://user:secret@"+
			loopback.Reserve(t))...)
		if r.Code != 1 || !strings.Contains(r.Stderr, "nats://user:xxxxx@127.0.0.1:") ||
			strings.Contains(r.Stderr, "secret") {
			t.Errorf("%s, with a password in the address: %+v", command, r)
		}
	}
}

// TestExternalServer runs an indexer and the demonstration's events on a standalone NATS server.
func TestExternalServer(t *testing.T) {
	t.Parallel()
	addr := loopback.Reserve(t)
	harness.Start(t, "nats-server", "-a", "127.0.0.1", "-p", strings.Split(addr, ":")[1], "-js", "-sd",
		t.TempDir()).WaitFor("Server is ready")
	x := harness.Start(t, "indexer", "serve", "--nats", "nats://"+addr, "--http-listen", "127.0.0.1:0", "--namespace",
		"prod")
	x.WaitFor("msg=ready")
	if s := harness.Status(t, addr, "--namespace", "prod"); !s.Ready || len(s.Partitions) != 8 ||
		s.Partitions[7].State != api.PartitionServing {
		t.Fatalf("%+v", s)
	}
	x.Stop()
}

// TestDemo runs the demonstration as a user would, and checks the result.
func TestDemo(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, "indexer", "demo", "--requests", "80", "--capacity", "2000", "--json")
	var d map[string]any
	if err := json.Unmarshal([]byte(r.Stdout), &d); err != nil || r.Code != 0 {
		t.Fatalf("%+v: %v", r, err)
	}
	for name, want := range map[string]float64{"requests": 80, "answers_checked": 80, "answers_equal": 80,
		"events_lost": 0, "restarts": 1} {
		if d[name] != want {
			t.Errorf("%s is %v, want %v", name, d[name], want)
		}
	}
	if d["blocks_announced"] != d["blocks_applied"] || d["blocks_announced"].(float64) < 10_000 {
		t.Errorf("%v blocks announced, %v applied", d["blocks_announced"], d["blocks_applied"])
	}
	if d["hit_rate"].(float64) <= d["hit_rate_random"].(float64) {
		t.Errorf("hit rate %v, at random %v", d["hit_rate"], d["hit_rate_random"])
	}
	for _, name := range []string{"blocks_per_s", "query_p50_us", "query_p99_us", "snapshot_bytes", "restore_ms"} {
		if v, ok := d[name].(float64); !ok || v <= 0 {
			t.Errorf("%s is %v", name, d[name])
		}
	}
	if r := harness.Run(t, "indexer", "demo", "--requests", "4"); r.Code != 0 ||
		!strings.Contains(r.Stdout, "4 of 4 equal") {
		t.Errorf("the table: %+v", r)
	}
	if r := harness.Run(t, "indexer", "demo", "--trace", "/nonexistent"); r.Code != 2 ||
		!strings.Contains(r.Stderr, "/nonexistent") {
		t.Errorf("a missing trace: %+v", r)
	}
	fmt.Fprintln(t.Output(), r.Stdout)
}

// TestDemoShortPrompts serves traces with some or only prompts shorter than a block.
func TestDemoShortPrompts(t *testing.T) {
	t.Parallel()
	const long, short = `{"timestamp":0,"input_length":1024,"output_length":20,"hash_ids":[1,2]}`,
		`{"timestamp":0,"input_length":13,"output_length":2,"hash_ids":[3]}`
	for name, lines := range map[string][]string{"one": {long, short, long, short}, "all": {short, short}} {
		t.Run(name, func(t *testing.T) {
			trace := filepath.Join(t.TempDir(), "trace.jsonl")
			if err := os.WriteFile(trace, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			want := fmt.Sprintf("%d of %d equal", len(lines), len(lines))
			if r := harness.Run(t, "indexer", "demo", "--engines", "2", "--trace", trace); r.Code != 0 ||
				!strings.Contains(r.Stdout, want) {
				t.Errorf("%+v, want %q", r, want)
			}
		})
	}
}

// TestDemoL3 runs the demonstration with the built-in shared store.
func TestDemoL3(t *testing.T) {
	t.Parallel()
	harness.DemoWithStore(t, "built-in", nil, "--requests", "60", "--capacity", "2000")
	if r := harness.Run(t, "indexer", "demo", "--l3", "--requests", "4", "--l3-python", "/nonexistent"); r.Code != 1 ||
		!strings.Contains(r.Stderr, "/nonexistent") {
		t.Errorf("no such interpreter: %+v", r)
	}
}
