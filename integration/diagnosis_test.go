package integration

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestShimSaysWhatItSawAndWhatToDo runs the shim against servers other than engines, and against a silent engine.
func TestShimSaysWhatItSawAndWhatToDo(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	web := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(web.Close)
	tls := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(tls.Close)
	nobody := loopback.Reserve(t)
	// sends HTTP first, as a proxy without a backend does
	greeter, err := net.Listen("tcp", "127.0.0.1:0")
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
	engine := harness.StartSimEngine(t)
	var subtests testkit.Group
	defer subtests.Wait()
	for i, c := range []struct {
		name, endpoint string
		args           []string
		saw, do        string
	}{
		{"NATS", "tcp://" + strings.TrimPrefix(x.NATS, "nats://"), nil, "the peer speaks NATS",
			"this port belongs to a NATS server"},
		{"HTTP proxy", "tcp://" + greeter.Addr().String(), nil, "the peer speaks HTTP",
			"this port belongs to an HTTP server"},
		{"HTTP server", strings.Replace(web.URL, "http", "tcp", 1), nil, "cannot connect to the engine",
			"--engine is the endpoint in the engine's --kv-events-config"},
		{"TLS server", strings.Replace(tls.URL, "https", "tcp", 1), nil, "cannot connect to the engine",
			"--engine is the endpoint in the engine's --kv-events-config"},
		{"nobody", "tcp://" + nobody, nil, "connection refused", "nothing listens there"},
		{"replay endpoint", engine.Replay(), nil, `ROUTER\" socket, a SUB needs`, "--engine and --replay exchanged"},
		{"no replay", engine.Endpoint(), nil, "no replay endpoint", "set replay_endpoint"},
		{"events disabled", engine.Endpoint(), nil, "connected, and the engine has published nothing",
			"enable_kv_cache_events"},
		{"topic", engine.Endpoint(), []string{"--topic", "elsewhere"}, "connected, and the engine has published " +
			"nothing", "no message's topic begins with --topic elsewhere"},
		{"SGLang", engine.Endpoint(), []string{"--source", "sglang"}, "connected, and the engine has published nothing",
			"--disable-radix-cache"},
		{"replay at an HTTP server", engine.Endpoint(),
			[]string{"--replay", strings.Replace(web.URL, "http", "tcp", 1)}, "replay failed",
			"sends nothing, as HTTP and TLS servers do; --replay is the replay_endpoint"},
		{"replay at NATS", engine.Endpoint(), []string{"--replay", "tcp://" + strings.TrimPrefix(x.NATS, "nats://")},
			"replay failed", "this port belongs to a NATS server; --replay is the replay_endpoint"},
		{"replay at nobody", engine.Endpoint(), []string{"--replay", "tcp://" + nobody}, "replay failed",
			"nothing listens there: check that the engine runs and has a replay_endpoint"},
		{"replay at another rank's events", engine.Endpoint(),
			[]string{"--replay", harness.StartSimEngine(t).Endpoint()}, `PUB\" socket, a DEALER needs`,
			"this port belongs to the engine's event publisher, perhaps"},
	} {
		subtests.Run(t, c.name, func(t *testing.T) {
			p := harness.Start(t, "worker-shim",
				append([]string{"run", "--engine", c.endpoint, "--worker", fmt.Sprintf("w%d", i), "--model", "m",
					"--block-size", "16",
					"--nats", x.NATS, "--silence", "100ms"}, c.args...)...)
			p.WaitFor(regexp.QuoteMeta(c.do))
			if said := p.Said(); !strings.Contains(said, c.saw) {
				t.Errorf("said\n%s\nwithout %q", said, c.saw)
			}
		})
	}
}

// TestRanks runs the shims of all ranks of a worker in a single process.
func TestRanks(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
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
				BlockSize: harness.BlockSize, Capacity: 100, Rank: events.Rank(rank),
				Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", base+rank), Replay: fmt.Sprintf("tcp://127.0.0.1:%d",
					base+2+rank),
			})
			if err != nil {
				break // the port is in use
			}
			engines = append(engines, e)
		}
	}
	for _, e := range engines {
		t.Cleanup(e.Crash)
	}
	p := harness.Start(t, "worker-shim", "run", "--engine", engines[0].Endpoint(), "--replay", engines[0].Replay(),
		"--ranks", "2",
		"--worker", "w", "--model", "m", "--block-size", "16", "--nats", x.NATS)
	prompt := harness.Tokens(1, 4*harness.BlockSize)
	harness.ServePrompt(t, engines[0], prompt)
	harness.ServePrompt(t, engines[1], prompt[:2*harness.BlockSize])
	words := strings.Trim(strings.ReplaceAll(fmt.Sprint(prompt), " ", ","), "[]")
	depth := map[events.Rank]uint32{}
	harness.Eventually(t, "the ranks hold 4 and 2 blocks", func() (bool, string) {
		a, _ := x.Query(t, "--model", "m", "--tokens", words)
		for _, w := range a.Workers {
			depth[w.Rank] = w.Device
		}
		return depth[0] == 4 && depth[1] == 2, fmt.Sprintf("%v\n%s", depth, p.Said())
	})
}
