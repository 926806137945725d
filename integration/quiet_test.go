package integration

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/client"
)

// TestQuietSources: an engine that is connected and a source of many ranks that have published no event are reported
// once in the log, and in status and doctor until they publish one.
func TestQuietSources(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	c, err := client.HTTP([]string{"http://" + x.HTTP}, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	prompt := harness.Tokens(1, 2*harness.BlockSize)
	conn := connectNATS(t, "nats://"+x.NATS)
	engine := harness.StartSimEngine(t)
	socket := filepath.Join(t.TempDir(), "lines")
	for name, s := range map[string]struct {
		args    []string
		log     string
		warning string
		speak   func()
	}{
		"an engine": {[]string{"--engine", engine.Endpoint(), "--replay", engine.Replay(), "--worker", "quiet"},
			"connected, and the engine has said nothing", "quiet/0",
			func() {
				if _, err := engine.Serve(prompt, nil); err != nil {
					t.Error(err)
				}
			}},
		"Dynamo's event plane": {[]string{"--source", "dynamo-nats", "--engine", dynamoSubject},
			"the source has published no event since the start", dynamoSubject,
			func() { publishDynamo(t, conn, dynamoEnvelope(t, 7, prompt)) }},
		"lines": {[]string{"--source", "ndjson", "--engine", "ipc://" + socket},
			"the source has published no event since the start", "--source ndjson",
			func() {
				to, err := net.Dial("unix", socket)
				if err != nil {
					t.Fatal(err)
				}
				defer to.Close()
				fmt.Fprintf(to, "%s\n", routerLine(t, "8", 0, 1, prompt, 0))
			}},
	} {
		p := harness.Start(t, "worker-shim", append([]string{"run", "--model", "m", "--block-size", "16",
			"--nats", x.NATS, "--silence", "100ms"}, s.args...)...)
		p.WaitFor(s.log)
		warned := func() (bool, string) {
			status, err := c.Status(ctx)
			if err != nil {
				return false, err.Error()
			}
			if len(status.Problems) > 0 {
				t.Errorf("%s: problems %q", name, status.Problems)
			}
			all := strings.Join(status.Warnings, "\n")
			return strings.Contains(all, s.warning), all
		}
		harness.Eventually(t, name+" is in the status", warned)
		r := harness.Run(t, "indexer", "doctor", "--nats", x.NATS)
		if said := r.Stdout + r.Stderr; !strings.Contains(said, s.warning) {
			t.Errorf("%s: doctor says nothing of it:\n%s", name, said)
		}
		s.speak()
		p.WaitFor("has published its first event")
		harness.Eventually(t, name+" is not in the status any more", func() (bool, string) {
			still, all := warned()
			return !still, all
		})
		if n := strings.Count(p.Said(), s.log); n != 1 {
			t.Errorf("%s: the log has it %d times", name, n)
		}
		p.Stop()
	}
}
