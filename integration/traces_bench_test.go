package integration

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var (
	tracesBefore  = flag.String("traces.before", "", "an indexer to compare with in BenchmarkTraces, without traces")
	tracesQueries = flag.Int("traces.queries", 4000, "queries of each arm in each round of BenchmarkTraces")
)

// processorTime returns the processor time of all threads of a process, as counted by the kernel.
func processorTime(b *testing.B, pid int) (sum time.Duration) {
	b.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(tasks) == 0 {
		b.Fatalf("%d has no threads: %v", pid, err)
	}
	for _, path := range tasks {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		used, _, _ := strings.Cut(string(text), " ")
		ns, err := strconv.ParseInt(used, 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		sum += time.Duration(ns)
	}
	return sum
}

// startCounting counts the instructions of a process with perf, if available, until the returned function is called; 0
// means unknown.
func startCounting(b *testing.B, pid int) (end func() float64) {
	b.Helper()
	var said bytes.Buffer
	cmd := exec.Command("perf", "stat", "-x,", "-e", "instructions:u", "-p", strconv.Itoa(pid))
	cmd.Stderr = &said
	if cmd.Start() != nil {
		return func() float64 { return 0 }
	}
	return func() float64 {
		_ = cmd.Process.Signal(os.Interrupt) // the exit status does not matter, only the output
		_ = cmd.Wait()
		n, _, _ := strings.Cut(said.String(), ",")
		count, err := strconv.ParseFloat(strings.TrimSpace(n), 64)
		if err != nil {
			return 0
		}
		return count
	}
}

// BenchmarkTraces measures the cost of a query on an indexer without traces, with traces of a hundredth of the queries,
// and with traces of all queries. The three arms alternate in five rounds. The results are medians of the ratio to the
// arm without traces, of the processor time per query and of the queries per second, and the ratio of instructions over
// all rounds.
func BenchmarkTraces(b *testing.B) {
	collector := harness.StartCollector(b)
	prompt := harness.Tokens(1, 64*harness.BlockSize)
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		b.Fatal(err)
	}
	type arm struct {
		name  string
		pid   int
		ask   *client.Client
		used  []float64 // processor time of a query in every round, in microseconds
		speed []float64 // queries per second
	}
	var arms []*arm
	for _, name := range []string{"off", "before", "1%", "100%"} {
		args := []string{"serve", "--data", b.TempDir(), "--nats-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
			"--partitions", "4"}
		program := "indexer"
		switch name {
		case "before":
			if program = *tracesBefore; program == "" {
				continue
			}
		case "1%", "100%":
			ratio := map[string]string{"1%": "0.01", "100%": "1"}[name]
			args = append(args, "--otlp-endpoint", collector.URL, "--otlp-headers-file", collector.Headers, "--trace-sample",
				ratio)
		}
		p := harness.Start(b, program, args...)
		nats := p.WaitFor(`in this process" listen=(\S+)`)[1]
		p.WaitFor(`msg=ready`)
		ns := harness.OpenNamespace(b, b.Context(), nats)
		for w := range 8 {
			e := events.Event{Kind: events.Stored, Tier: events.Device,
				Locals: hasher.Hash(nil, prompt[:(w+1)*8*harness.BlockSize])}
			for i := range e.Locals {
				e.Blocks = append(e.Blocks, events.BlockHash(i+1))
			}
			harness.PublishAs(b, b.Context(), ns, events.WorkerID(fmt.Sprint("w", w)), &events.Batch{Incarnation: 1, FirstID: 1,
				Model: "m", BlockSize: harness.BlockSize, Events: []events.Event{e}})
		}
		ask, err := client.NATS(connectNATS(b, "nats://"+nats), "default", client.Options{})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(ask.Close)
		arms = append(arms, &arm{name: name, pid: p.Cmd.Process.Pid, ask: ask})
	}
	query := &client.Query{Model: "m", Tokens: prompt}
	run := func(a *arm, queries int) {
		var all sync.WaitGroup
		const clients = 8
		for range clients {
			all.Go(func() {
				for range queries / clients {
					if answer, err := a.ask.Find(b.Context(), query); err != nil || len(answer.Workers) != 8 {
						b.Errorf("%s: %+v, %v", a.name, answer, err)
						return
					}
				}
			})
		}
		all.Wait()
	}
	for _, a := range arms {
		harness.Eventually(b, "all workers are registered", func() (bool, string) {
			answer, err := a.ask.Find(b.Context(), query)
			return err == nil && len(answer.Workers) == 8, fmt.Sprint(answer, err)
		})
		run(a, *tracesQueries)
	}
	count := make([]func() float64, len(arms))
	for i, a := range arms {
		count[i] = startCounting(b, a.pid)
	}
	const rounds, turns = 5, 8 // the arms alternate within a round, which spreads other work of the machine
	for b.Loop() {
		for range rounds {
			used, took := make([]time.Duration, len(arms)), make([]time.Duration, len(arms))
			for turn := range turns {
				for i := range arms {
					i = (i + turn) % len(arms)
					cpu, begun := processorTime(b, arms[i].pid), time.Now()
					run(arms[i], *tracesQueries/turns)
					took[i] += time.Since(begun)
					used[i] += processorTime(b, arms[i].pid) - cpu
				}
			}
			for i, a := range arms {
				n := float64(*tracesQueries)
				a.used = append(a.used, float64(used[i].Nanoseconds())/1000/n)
				a.speed = append(a.speed, n/took[i].Seconds())
			}
		}
	}
	median := func(list []float64) float64 { return slices.Sorted(slices.Values(list))[len(list)/2] }
	off, instructions := arms[0], make([]float64, len(arms))
	for i, a := range arms {
		instructions[i] = count[i]()
		b.Logf("%s: %.0f instructions a query", a.name, instructions[i]/float64(len(a.used)**tracesQueries))
		b.Logf("%s: µs of processor a query %.1f, queries a second %.0f", a.name, a.used, a.speed)
		b.ReportMetric(median(a.used), "µs-cpu/"+a.name)
		if a == off {
			continue
		}
		var used, speed []float64
		for i := range a.used {
			used, speed = append(used, a.used[i]/off.used[i]), append(speed, a.speed[i]/off.speed[i])
		}
		b.ReportMetric(median(used), "cpu-ratio/"+a.name)
		b.ReportMetric(instructions[i]/instructions[0], "instructions-ratio/"+a.name)
		b.ReportMetric(median(speed), "speed-ratio/"+a.name)
	}
}
