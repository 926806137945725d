//go:build judges

package envoy

import (
	"flag"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
)

var latencyRequests = flag.Int("latency.requests", 50, "requests through each way in TestLatency")

// TestLatency measures the time of a request through Envoy with the indexer, and through the same Envoy without it. The
// ways alternate. It fails only if a request fails.
func TestLatency(t *testing.T) {
	for name, edits := range bothModes {
		t.Run(name, func(t *testing.T) {
			g := start(t, edits...)
			var addresses []string
			for _, e := range g.engines {
				addresses = append(addresses, e.Addr)
			}
			plain := harness.StartEnvoy(t, root, "127.0.0.1:1", addresses, append(slices.Clone(edits),
				"- name: kvatlas\n                    typed_config",
				"- name: kvatlas\n                    disabled: true\n                    typed_config")...)
			ways := []struct {
				name, url string
				times     []time.Duration
			}{{name: "plain", url: plain.URL}, {name: "indexer", url: g.url}}
			for i := range *latencyRequests + 20 {
				body := completion(false, harness.Tokens(i%50*10_000, 2000))
				for w := range ways {
					begin := time.Now()
					reply, err := http.Post(ways[w].url+"/v1/completions", "application/json", strings.NewReader(body))
					if err != nil {
						t.Fatal(err)
					}
					text, err := io.ReadAll(reply.Body)
					reply.Body.Close()
					if err != nil || reply.StatusCode != 200 {
						t.Fatalf("%s: %d, %v, %.300s", ways[w].name, reply.StatusCode, err, text)
					}
					if i >= 20 { // the first requests open connections
						ways[w].times = append(ways[w].times, time.Since(begin))
					}
				}
			}
			quantile := func(times []time.Duration, q float64) time.Duration {
				slices.Sort(times)
				return times[int(q*float64(len(times)-1))].Round(time.Microsecond)
			}
			for _, q := range []float64{0.5, 0.99} {
				without, with := quantile(ways[0].times, q), quantile(ways[1].times, q)
				t.Logf("p%.0f: %v without an indexer, %v with it: %v are added, a factor of %.2f", 100*q, without, with,
					with-without, float64(with)/float64(without))
			}
		})
	}
}
