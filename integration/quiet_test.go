package integration

import (
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/operate/doctor"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// quietCase is a silent source.
type quietCase struct {
	args    []string
	log     string       // a line of the shim's log
	shown   string       // is in the status and in the doctor's findings
	finding doctor.Fault // the name
	problem bool         // a problem, not a warning
	source  bool         // the status lists the source
	speak   func()       // ends the state
	after   string       // the log line after the state
}

// TestQuietSources checks that a silent or unreachable engine, source of many ranks, or master of a shared store is
// reported once in the log, and in status and doctor until its first event.
func TestQuietSources(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	ctx := harness.Context(t)
	prompt := harness.Tokens(1, 2*harness.BlockSize)
	conn := connectNATS(t, "nats://"+x.NATS)
	engine := harness.StartSimEngine(t)
	socket := filepath.Join(t.TempDir(), "lines")
	silent, absent := startMaster(t), startMaster(t)
	endpoint, err := silent.Publish(ctx, "tcp://"+loopback.Reserve(t))
	if err != nil {
		t.Fatal(err)
	}
	later, laterNATS, fanIn := "tcp://"+loopback.Reserve(t), loopback.Reserve(t), "tcp://"+loopback.Reserve(t)
	ofRanks := []string{"--model", "m", "--block-size", "16"}
	for name, c := range map[string]quietCase{
		"an engine": {
			args: append([]string{"--engine", engine.Endpoint(), "--replay", engine.Replay(), "--worker", "quiet"}, ofRanks...),
			log:  "connected, and the engine has published nothing", shown: "quiet/0", finding: "engine_quiet",
			speak: func() {
				if _, err := engine.Serve(prompt, nil); err != nil {
					t.Error(err)
				}
			}},
		"Dynamo's event plane": {
			args:  append([]string{"--source", "dynamo-nats", "--engine", dynamoSubject}, ofRanks...),
			shown: dynamoSubject, finding: "source_silent", source: true,
			speak: func() { publishDynamo(t, conn, dynamoEnvelope(t, 7, prompt)) }},
		"Dynamo's NATS server": {
			args: append([]string{"--source", "dynamo-nats", "--engine", "namespace.far.component.c.kv-events",
				"--engine-nats", laterNATS}, ofRanks...),
			log: "the source is not reached", shown: "namespace.far", finding: "source_unreachable", source: true, problem: true,
			speak: func() {
				_, port, _ := net.SplitHostPort(laterNATS)
				harness.Start(t, "nats-server", "-a", "127.0.0.1", "-p", port).WaitFor(`Server is ready`)
				to := connectNATS(t, "nats://"+laterNATS)
				harness.Eventually(t, "the shim has subscribed", func() (bool, string) {
					if err := to.Publish("namespace.far.component.c.kv-events", dynamoEnvelope(t, 9, prompt)); err != nil {
						t.Fatal(err)
					}
					status := harness.Status(t, x.NATS)
					return len(status.QuietSources) == 0, fmt.Sprint(status.QuietSources)
				})
			}, after: "the source is reached again"},
		"lines": {
			args:  append([]string{"--source", "ndjson", "--engine", "ipc://" + socket}, ofRanks...),
			shown: "--source ndjson", finding: "source_silent", source: true,
			speak: func() {
				to, err := net.Dial("unix", socket)
				if err != nil {
					t.Fatal(err)
				}
				defer to.Close()
				fmt.Fprintf(to, "%s\n", routerLine(t, "8", 0, 1, prompt, 0))
			}},
		"engines that dial in": {
			args: []string{"--listen", "--engine", fanIn}, shown: fanIn, finding: "source_silent", source: true,
			speak: func() {
				stored := []any{"BlockStored", []int{1}, nil, harness.Tokens(1, 16), 16, nil, "GPU"}
				payload := msgpackOf(t, []any{1.0, []any{stored}, 0})
				if err := dialIn(t, fanIn).Send([]byte("kv@10.0.0.1@m"), number(0), payload); err != nil {
					t.Fatal(err)
				}
			}},
		"a Mooncake master": {
			args:  []string{"--source", "mooncake", "--engine", endpoint, "--master", silent.Addr()},
			shown: "for store " + silent.Addr(), finding: "source_silent", source: true,
			speak: func() {
				if err := silent.WaitSubscribers(ctx, 1); err != nil {
					t.Fatal(err)
				}
				silent.Put("something")
			}},
		"a Mooncake master without events": {
			args: []string{"--source", "mooncake", "--engine", later, "--master", absent.Addr()},
			log:  "the source is not reached", shown: "for store " + absent.Addr(), finding: "source_unreachable", source: true,
			speak: func() {
				if _, err := absent.Publish(ctx, later); err != nil {
					t.Fatal(err)
				}
				if err := absent.WaitSubscribers(ctx, 1); err != nil {
					t.Fatal(err)
				}
				absent.Put("something")
			}, after: "the source is reached again"},
	} {
		if c.log == "" {
			c.log = "the source has published no event since the start"
		}
		if c.after == "" {
			c.after = "has published its first event"
		}
		c.play(t, name, x.NATS)
	}
}

// play starts the shim of a source, waits for the report in all places, ends the state, and waits for the end of the
// report.
func (c *quietCase) play(t *testing.T, name, nats string) {
	p := harness.Start(t, "worker-shim", append([]string{"run", "--nats", nats, "--silence", "100ms"}, c.args...)...)
	p.WaitFor(c.log)
	reported := func() (bool, string) {
		status := harness.Status(t, nats)
		lines, others := status.Warnings, status.Problems
		if c.problem {
			lines, others = others, lines
		}
		has := func(line string) bool { return strings.Contains(line, c.shown) }
		listed := slices.ContainsFunc(status.QuietSources, func(q api.QuietSource) bool { return has(q.String()) })
		// On a busy machine a source is silent for a moment before the first connection fails.
		return slices.ContainsFunc(lines, has) && !slices.ContainsFunc(others, has) && listed == c.source,
			fmt.Sprintf("problems %q, warnings %q", status.Problems, status.Warnings)
	}
	harness.Eventually(t, name+" is in the status", reported)
	if r := harness.Run(t, "indexer", "status", "--nats", nats); !strings.Contains(r.Stdout, c.shown) {
		t.Errorf("%s: the status lacks the source:\n%s", name, r.Stdout)
	}
	finding := func() *doctor.Finding {
		_, report := examine(t, "--nats", nats)
		for _, f := range append(report.Findings(doctor.Error), report.Findings(doctor.Warning)...) {
			if f.ID == c.finding && strings.Contains(f.Where, c.shown) {
				return &f
			}
		}
		return nil
	}
	if f := finding(); f == nil || f.Evidence == "" || f.Remedy == "" {
		t.Errorf("%s: the doctor finds %+v", name, f)
	}
	c.speak()
	p.WaitFor(c.after)
	harness.Eventually(t, name+" is not in the status any more", func() (bool, string) {
		still, all := reported()
		return !still, all
	})
	if f := finding(); f != nil {
		t.Errorf("%s: the doctor still finds %+v", name, f)
	}
	if n := strings.Count(p.Said(), c.log); n != 1 {
		t.Errorf("%s: the log has %d lines", name, n)
	}
	p.Stop()
}

func startMaster(t *testing.T) *mastersim.Master {
	t.Helper()
	master, err := mastersim.Start(loopback.Reserve(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(master.Stop)
	return master
}
