package integration

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/enginesim"
	"github.com/kvatlas/kvatlas/internal/loopback"
	"github.com/kvatlas/kvatlas/internal/pyenv"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/vmihailenco/msgpack/v5"
)

// TestShimSaysWhatItSawAndWhatToDo runs the shim against what is no engine, or one that says nothing.
func TestShimSaysWhatItSawAndWhatToDo(t *testing.T) {
	x := startIndexer(t, t.TempDir(), "")
	web := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(web.Close)
	tls := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(tls.Close)
	nobody := loopback.Reserve(t)
	greeter, err := net.Listen("tcp", "127.0.0.1:0") // speaks HTTP before it is spoken to, as a proxy in front of nothing does
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { greeter.Close() })
	go func() {
		for {
			c, err := greeter.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, "HTTP/1.1 503 Service Unavailable\r\n\r\n")
			c.Close()
		}
	}()
	engine := simEngine(t)
	for i, c := range []struct {
		name, endpoint string
		args           []string
		saw, do        string
	}{
		{"NATS", "tcp://" + strings.TrimPrefix(x.nats, "nats://"), nil, "does not speak ZMTP", "this port belongs to a NATS server"},
		{"HTTP proxy", "tcp://" + greeter.Addr().String(), nil, "does not speak ZMTP", "this port belongs to an HTTP server"},
		{"HTTP server", strings.Replace(web.URL, "http", "tcp", 1), nil, "cannot connect to the engine", "--engine is the endpoint in the engine's --kv-events-config"},
		{"TLS server", strings.Replace(tls.URL, "https", "tcp", 1), nil, "cannot connect to the engine", "--engine is the endpoint in the engine's --kv-events-config"},
		{"nobody", "tcp://" + nobody, nil, "connection refused", "nothing listens there"},
		{"replay endpoint", engine.Replay(), nil, `ROUTER\" socket, a SUB needs`, "--engine and --replay exchanged"},
		{"no replay", engine.Endpoint(), nil, "no replay endpoint", "set replay_endpoint"},
		{"events disabled", engine.Endpoint(), nil, "connected, and the engine has said nothing", "enable_kv_cache_events"},
		{"topic", engine.Endpoint(), []string{"--topic", "elsewhere"}, "connected, and the engine has said nothing", "no message's topic begins with --topic elsewhere"},
		{"SGLang", engine.Endpoint(), []string{"--source", "sglang"}, "connected, and the engine has said nothing", "--disable-radix-cache"},
		{"replay at an HTTP server", engine.Endpoint(), []string{"--replay", strings.Replace(web.URL, "http", "tcp", 1)}, "replay failed", "says nothing, as HTTP and TLS servers do; --replay is the replay_endpoint"},
		{"replay at NATS", engine.Endpoint(), []string{"--replay", "tcp://" + strings.TrimPrefix(x.nats, "nats://")}, "replay failed", "this port belongs to a NATS server; --replay is the replay_endpoint"},
		{"replay at nobody", engine.Endpoint(), []string{"--replay", "tcp://" + nobody}, "replay failed", "nothing listens there: see that the engine runs and has a replay_endpoint"},
		{"replay at another rank's events", engine.Endpoint(), []string{"--replay", simEngine(t).Endpoint()}, `PUB\" socket, a DEALER needs`, "this port belongs to the engine's event publisher, perhaps"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := start(t, "worker-shim", append([]string{"run", "--engine", c.endpoint, "--instance", fmt.Sprintf("w%d", i), "--model", "m", "--block-size", "16",
				"--nats", x.nats, "--silence", "100ms"}, c.args...)...)
			p.waitFor(regexp.QuoteMeta(c.do))
			if said := p.saying(); !strings.Contains(said, c.saw) {
				t.Errorf("said\n%s\nwithout %q", said, c.saw)
			}
		})
	}
}

// TestShimIsRefusedBySecurity runs the shim against libzmq publishers that demand CURVE and PLAIN.
func TestShimIsRefusedBySecurity(t *testing.T) {
	x := startIndexer(t, t.TempDir(), "")
	const script = `import sys, zmq
s = zmq.Context().socket(zmq.XPUB)
if sys.argv[1] == "PLAIN":
    s.plain_server = True
else:
    s.curve_publickey, s.curve_secretkey = zmq.curve_keypair()
    s.curve_server = True
s.bind("tcp://127.0.0.1:*")
print(s.last_endpoint.rstrip(b"\0").decode(), flush=True)
sys.stdin.read()`
	for _, mechanism := range []string{"CURVE", "PLAIN"} {
		t.Run(mechanism, func(t *testing.T) {
			cmd := exec.Command(pyenv.Python(t), "-c", script, mechanism)
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { in.Close(); cmd.Wait() })
			endpoint, err := bufio.NewReader(out).ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			p := start(t, "worker-shim", "run", "--engine", strings.TrimSpace(endpoint), "--instance", mechanism, "--model", "m", "--block-size", "16", "--nats", x.nats)
			p.waitFor("start the engine's event sockets without CURVE or PLAIN")
			if said := p.saying(); !strings.Contains(said, "the peer demands the security mechanism") || !strings.Contains(said, mechanism) {
				t.Errorf("said\n%s", said)
			}
		})
	}
}

// TestShimSaysWhatIsWrongWithBlocks runs the shim beside engines whose blocks are not of its --block-size: smaller (as with SGLang's pages of one token), larger, and of none at
// all.
func TestShimSaysWhatIsWrongWithBlocks(t *testing.T) {
	x := startIndexer(t, t.TempDir(), "")
	for i, c := range []struct {
		name    string
		size    any
		hash    any
		saw, do string
	}{
		{"SGLang's pages of 1", 1, int64(-5), "SGLang announces blocks of 1 tokens, and blocks of 16 are expected", "start the engine with --page-size 16 or expect 1"},
		{"smaller", 8, uint64(1<<63 + 5), "vLLM announces blocks of 8 tokens", "start the engine with --block-size 16 or expect 8"},
		{"larger", 32, uint64(1<<63 + 5), "vLLM announces blocks of 32 tokens", "start the engine with --block-size 16 or expect 32"},
		{"0", 0, uint64(1<<63 + 5), "vLLM announces blocks with tokens and a block_size that is 0 or missing", "have its publisher say the size"},
		{"not said", nil, uint64(1<<63 + 5), "a block_size that is 0 or missing", "have its publisher say the size"},
	} {
		t.Run(c.name, func(t *testing.T) {
			engine := pyenv.StartPublisher(t, pyenv.PublisherOptions{})
			n, _ := c.size.(int)
			if n == 0 {
				n = blockSize
			}
			payload, err := msgpack.Marshal([]any{1.0, []any{[]any{"BlockStored", []any{c.hash}, nil, tokens(1, n), c.size, nil, "GPU"}}, 0})
			if err != nil {
				t.Fatal(err)
			}
			engine.Raw(payload)
			p := startShim(t, x, engine, fmt.Sprintf("b%d", i))
			p.waitFor(regexp.QuoteMeta(c.do))
			if said := p.saying(); !strings.Contains(said, c.saw) || !strings.Contains(said, "the engine's blocks are not of --block-size") {
				t.Errorf("said\n%s\nwithout %q", said, c.saw)
			}
		})
	}
}

// TestRanks shims the ranks of one worker in one process.
func TestRanks(t *testing.T) {
	x := startIndexer(t, t.TempDir(), "")
	var engines []*enginesim.Engine
	base := 0
	for try := 0; len(engines) < 2; try++ {
		if try == 50 {
			t.Fatal("there are no consecutive ports")
		}
		for _, e := range engines {
			e.Crash()
		}
		engines = engines[:0]
		free, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		base = free.Addr().(*net.TCPAddr).Port
		free.Close()
		for rank := range 2 {
			e, err := enginesim.Start(t.Context(), enginesim.Config{
				BlockSize: blockSize, Capacity: 100, Rank: events.Rank(rank),
				Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", base+rank), Replay: fmt.Sprintf("tcp://127.0.0.1:%d", base+2+rank),
			})
			if err != nil {
				break // somebody has that port
			}
			engines = append(engines, e)
		}
	}
	for _, e := range engines {
		t.Cleanup(e.Crash)
	}
	p := start(t, "worker-shim", "run", "--engine", engines[0].Endpoint(), "--replay", engines[0].Replay(), "--ranks", "2",
		"--instance", "w", "--model", "m", "--block-size", "16", "--nats", x.nats)
	prompt := tokens(1, 4*blockSize)
	serve(t, engines[0], prompt)
	serve(t, engines[1], prompt[:2*blockSize])
	words := strings.Trim(strings.ReplaceAll(fmt.Sprint(prompt), " ", ","), "[]")
	depth := map[events.Rank]uint32{}
	for deadline := time.Now().Add(patience); depth[0] != 4 || depth[1] != 2; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("ranks hold %v blocks\n%s", depth, p.saying())
		}
		a, _ := x.query(t, "--model", "m", "--tokens", words)
		for _, w := range a.Workers {
			depth[w.Rank] = w.Device
		}
	}
}
