package integration

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/faces/kvindexer/kvindexerpb"
	"github.com/kvatlas/kvatlas/pkg/events"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
)

// echo replies to every call with the same matches.
type echo struct {
	kvindexerpb.UnimplementedKVIndexerServer
	answer *kvindexerpb.MatchExternalKvPrefixResponse
}

func (e echo) MatchExternalKvPrefix(context.Context, *kvindexerpb.MatchExternalKvPrefixRequest) (
	*kvindexerpb.MatchExternalKvPrefixResponse, error) {
	return e.answer, nil
}

// echoed is the environment variable with the reply of [startEcho]'s process.
const echoed = "KVATLAS_TEST_ECHO"

// startEcho starts a bare gRPC server in a separate process, as an indexer is.
func startEcho(b *testing.B, answer *kvindexerpb.MatchExternalKvPrefixResponse) (address string) {
	b.Helper()
	message, err := proto.Marshal(answer)
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^$", "-test.bench=^BenchmarkEcho$")
	cmd.Env, cmd.Stderr = append(os.Environ(), echoed+"="+hex.EncodeToString(message)), os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		in.Close()
		_ = cmd.Wait()
	})
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if _, at, found := strings.Cut(lines.Text(), "echo at "); found {
			return at
		}
	}
	b.Fatal("the bare server does not start")
	return ""
}

// BenchmarkEcho is the process of startEcho. Otherwise it measures nothing.
func BenchmarkEcho(b *testing.B) {
	message, err := hex.DecodeString(os.Getenv(echoed))
	if err != nil || len(message) == 0 {
		b.SkipNow()
	}
	e := echo{answer: &kvindexerpb.MatchExternalKvPrefixResponse{}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil || proto.Unmarshal(message, e.answer) != nil {
		b.Fatal(err)
	}
	server := grpc.NewServer()
	kvindexerpb.RegisterKVIndexerServer(server, e)
	go server.Serve(l)
	fmt.Printf("\necho at %s\n", l.Addr())
	_, _ = io.Copy(io.Discard, os.Stdin) // until the end of the input
	server.Stop()
}

// BenchmarkSGLangRouter alternates between an indexer, with SGLang's calls for 512 hashes on 64 workers in device and
// host memory, and a bare gRPC server with the same reply. An operation is a call to each.
func BenchmarkSGLangRouter(b *testing.B) {
	const workers, blocks = 64, 512
	x := harness.StartIndexer(b, b.TempDir(), "", "--grpc-listen", "127.0.0.1:0")
	ctx := b.Context()
	ns := harness.OpenNamespace(b, ctx, x.NATS)
	rng := rand.New(rand.NewPCG(16, 6))
	q := &kvindexerpb.MatchExternalKvPrefixRequest{}
	var names []events.BlockHash
	var locals []events.LocalHash
	for range blocks {
		name := rng.Uint64()
		q.Hashes, names = append(q.Hashes, int64(name)), append(names, events.BlockHash(name))
		locals = append(locals, events.LocalHash(rng.Uint64()))
	}
	for i := range workers {
		e := events.Event{Kind: events.Stored, Tier: events.Device, Blocks: names, Locals: locals}
		host := e
		host.Tier = events.Host
		gone := [2]events.Event{{Kind: events.Removed, Tier: events.Device}, {Kind: events.Removed, Tier: events.Host}}
		for _, name := range names {
			k := &gone[rng.IntN(2)]
			k.Blocks = append(k.Blocks, name)
		}
		harness.PublishAs(b, ctx, ns, events.WorkerID(fmt.Sprint("w", i)), &events.Batch{Incarnation: 1, FirstID: 1,
			Model: "m", BlockSize: harness.BlockSize, Events: []events.Event{e, host, gone[0], gone[1]}})
		body := fmt.Sprintf(`{"instance":"w%d","model":"m","block_size":%d,"endpoint":"http://10.0.0.%d:30000"}`, i,
			harness.BlockSize, i)
		if code, reply, err := harness.Request(x.HTTP, "POST", "/v1/workers", body); code != 200 {
			b.Fatal(code, reply, err)
		}
	}
	dial := func(at string) kvindexerpb.KVIndexerClient {
		conn, err := grpc.NewClient(at, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { conn.Close() })
		return kvindexerpb.NewKVIndexerClient(conn)
	}
	asked := dial(x.WaitFor(`gRPC is served" listen=(\S+)`)[1])
	var a *kvindexerpb.MatchExternalKvPrefixResponse
	harness.Eventually(b, "all workers match", func() (bool, string) {
		var err error
		a, err = asked.MatchExternalKvPrefix(ctx, q)
		return err == nil && len(a.Matches) == workers && a.Matches[workers-1].MatchedPrefixBlocks == blocks,
			fmt.Sprint(a, err)
	})
	var took [2][]time.Duration
	clients := [2]kvindexerpb.KVIndexerClient{dial(startEcho(b, a)), asked}
	for b.Loop() {
		for i, c := range clients {
			begun := time.Now()
			if _, err := c.MatchExternalKvPrefix(ctx, q); err != nil {
				b.Fatal(err)
			}
			took[i] = append(took[i], time.Since(begun))
		}
	}
	for i, name := range []string{"echo", "asked"} {
		slices.Sort(took[i])
		for _, p := range []int{50, 99} {
			b.ReportMetric(float64(took[i][len(took[i])*p/100].Microseconds()), fmt.Sprintf("%s-p%d-µs", name, p))
		}
	}
	for _, p := range []int{50, 99} {
		at := len(took[0]) * p / 100
		b.ReportMetric(float64(took[1][at])/float64(took[0][at]), fmt.Sprintf("ratio-p%d", p))
	}
}
