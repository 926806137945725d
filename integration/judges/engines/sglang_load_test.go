//go:build judges

package engines

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"reflect"
	"strconv"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// TestSGLangLoadSocket reads random loads from SGLang's own publisher, of each of two ranks.
func TestSGLangLoadSocket(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	rng := rand.New(rand.NewPCG(*judgeFirst, 39))
	for rank := range 2 {
		at := loopback.Reserve(t)
		_, text, _ := net.SplitHostPort(at)
		port, _ := strconv.Atoi(text)
		in := startLoads(t, fmt.Sprint("tcp://*:", port-rank), rank)
		sub, err := zmtp.DialSub(ctx, "tcp://"+at, []string{"load"}, zmtp.Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer sub.Stop()
		// next returns the next load of the socket, if any comes within the time.
		next := func(within time.Duration) (enginehttp.Load, bool) {
			receiving, done := context.WithTimeout(ctx, within)
			defer done()
			for {
				m, err := sub.Recv(receiving)
				if err != nil {
					return enginehttp.Load{}, false
				}
				if m.Kind != zmtp.Data {
					continue
				}
				l, err := enginehttp.LoadStat(m.Frames, 16)
				if err != nil {
					t.Fatalf("%x: %v", m.Frames, err)
				}
				return l, true
			}
		}
		published := func(within time.Duration, numbers []uint64) (enginehttp.Load, bool) {
			snapshot := map[string]uint64{"num_total_tokens": 0, "max_running_requests": 9,
				"total_prefill_uncached_tokens": 0, "total_prefill_busy_us": rng.Uint64() >> 1}
			for i, name := range []string{"num_running_reqs", "num_waiting_reqs", "num_used_tokens",
				"max_total_num_tokens", "num_waiting_uncached_tokens"} {
				snapshot[name] = numbers[i]
			}
			if err := json.NewEncoder(in).Encode(snapshot); err != nil {
				t.Fatal(err)
			}
			return next(within)
		}
		for i := range 300 {
			numbers := make([]uint64, 5)
			for i := range numbers {
				numbers[i] = rng.Uint64() >> (1 + rng.IntN(63))
			}
			numbers[0] = uint64(i + 1)
			want := enginehttp.Load{Running: numbers[0], Waiting: numbers[1], WaitingTokens: &numbers[4],
				Source: enginehttp.LoadStatSource}
			if numbers[3] > 0 {
				want.UsedBlocks, want.TotalBlocks = (numbers[2]+15)/16, numbers[3]/16
			}
			// A message is lost before the subscription and with a connection, so the load is sent again.
			got, some := published(time.Second, numbers)
			for got.Running != numbers[0] && ctx.Err() == nil {
				if some {
					got, some = next(time.Second) // of an earlier load
				} else {
					got, some = published(time.Second, numbers)
				}
			}
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("rank %d, load %d: %+v, want %+v", rank, i, got, want)
			}
		}
	}
}

// startLoads starts SGLang's load publisher for a rank of two.
func startLoads(t *testing.T, endpoint string, rank int) (in io.Writer) {
	c := exec.Command(pyenv.PythonWith(t, "engines.txt"), pyenv.Script(t, "sglang_load.py"),
		pyenv.Wheel(t, "sglang==0.5.23"), endpoint, "2", strconv.Itoa(rank))
	c.Env, c.Stderr = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1"), os.Stderr
	stdin, err := c.StdinPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	return stdin
}
