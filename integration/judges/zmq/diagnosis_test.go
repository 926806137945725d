//go:build judges

package zmq

import (
	"bufio"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/pyenv"
	"github.com/vmihailenco/msgpack/v5"
)

// TestShimIsRefusedBySecurity runs the shim with libzmq publishers that require CURVE and PLAIN.
func TestShimIsRefusedBySecurity(t *testing.T) {
	x := harness.StartIndexer(t, t.TempDir(), "")
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
			p := harness.Start(t, "worker-shim", "run", "--engine", strings.TrimSpace(endpoint), "--worker",
				mechanism, "--model", "m", "--block-size", "16", "--nats", x.NATS)
			p.WaitFor("start the engine's event sockets without CURVE or PLAIN")
			if said := p.Said(); !strings.Contains(said, "the peer demands the security mechanism") ||
				!strings.Contains(said, mechanism) {
				t.Errorf("said\n%s", said)
			}
		})
	}
}

// TestShimSaysWhatIsWrongWithBlocks runs the shim beside engines with another block size than --block-size. The blocks
// are smaller, as with SGLang's pages of a token, larger, or have no size. Fewer tokens than a block may be the end of
// a prompt.
func TestShimSaysWhatIsWrongWithBlocks(t *testing.T) {
	x := harness.StartIndexer(t, t.TempDir(), "")
	for i, c := range []struct {
		name    string
		size    any
		hash    any
		saw, do string
	}{
		{"SGLang's pages of 1", 1, int64(-5), "SGLang announces blocks of 1 tokens, and blocks of 16 are expected",
			"start the engine with --page-size 16 or expect 1"},
		{"smaller", 8, uint64(1<<63 + 5), "vLLM announces blocks of 8 tokens",
			"start the engine with --block-size 16 or expect 8"},
		{"larger", 32, uint64(1<<63 + 5), "vLLM announces blocks of 32 tokens",
			"start the engine with --block-size 16 or expect 32"},
		{"0", 0, uint64(1<<63 + 5), "vLLM announces blocks with tokens and a block_size that is 0 or missing",
			"have its publisher announce the size"},
		{"not said", nil, uint64(1<<63 + 5), "a block_size that is 0 or missing", "have its publisher announce the size"},
	} {
		t.Run(c.name, func(t *testing.T) {
			engine := pyenv.StartPublisher(t, pyenv.PublisherOptions{})
			n, hashes := harness.BlockSize, []any{c.hash}
			if size, _ := c.size.(int); size > 0 {
				n = max(n, size)
				for i := 1; i < n/size; i++ {
					switch first := c.hash.(type) {
					case int64:
						hashes = append(hashes, first-int64(i))
					case uint64:
						hashes = append(hashes, first+uint64(i))
					}
				}
			}
			payload, err := msgpack.Marshal([]any{1.0,
				[]any{[]any{"BlockStored", hashes, nil, harness.Tokens(1, n), c.size, nil, "GPU"}}, 0})
			if err != nil {
				t.Fatal(err)
			}
			engine.Raw(payload)
			p := startShim(t, x, engine, fmt.Sprintf("b%d", i))
			p.WaitFor(regexp.QuoteMeta(c.do))
			if said := p.Said(); !strings.Contains(said, c.saw) ||
				!strings.Contains(said, "the engine's blocks are not of --block-size") {
				t.Errorf("said\n%s\nwithout %q", said, c.saw)
			}
		})
	}
}
