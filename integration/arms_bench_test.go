package integration

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// arm is a process in a comparison.
type arm struct {
	name string
	pid  int
	send func(requests int) // sends requests to the process, and waits for the answers

	// allocations returns the number of allocations of the process since its start; nil: not compared.
	allocations func() float64

	used  []float64 // processor time of a request in every round, in microseconds
	speed []float64 // requests per second
}

// compare sends requests to all arms in turn, in five rounds. It reports the median processor time of a request on each
// arm, and the ratios of the other arms to the first one: medians of the ratios of processor time and of speed, and the
// ratio of the instructions of all rounds. It also reports the allocations of a request beyond those of the first arm.
func compare(b *testing.B, arms []*arm, requests int) {
	b.Helper()
	instructions, allocations := make([]func() float64, len(arms)), make([]float64, len(arms))
	for i, a := range arms {
		a.send(requests)
		if a.allocations != nil {
			allocations[i] = a.allocations()
		}
	}
	for i, a := range arms {
		instructions[i] = startCounting(b, a.pid)
	}
	const rounds, turns = 5, 8 // the arms alternate within a round, which spreads other work of the machine
	for b.Loop() {
		for range rounds {
			used, took := make([]time.Duration, len(arms)), make([]time.Duration, len(arms))
			for turn := range turns {
				for i := range arms {
					i = (i + turn) % len(arms)
					cpu, begun := processorTime(b, arms[i].pid), time.Now()
					arms[i].send(requests / turns)
					took[i] += time.Since(begun)
					used[i] += processorTime(b, arms[i].pid) - cpu
				}
			}
			for i, a := range arms {
				n := float64(requests / turns * turns)
				a.used = append(a.used, float64(used[i].Nanoseconds())/1000/n)
				a.speed = append(a.speed, n/took[i].Seconds())
			}
		}
	}
	counted := make([]float64, len(arms))
	for i, a := range arms {
		sent := float64(len(a.used) * requests)
		counted[i] = instructions[i]()
		if counted[i] > 0 {
			b.Logf("%s: %.0f instructions a request", a.name, counted[i]/sent)
		}
		b.Logf("%s: µs of processor a request %.1f, requests a second %.0f", a.name, a.used, a.speed)
		b.ReportMetric(median(a.used), "µs-cpu/"+a.name)
		if a.allocations != nil {
			allocations[i] = (a.allocations() - allocations[i]) / sent
			b.Logf("%s: %.1f allocations a request", a.name, allocations[i])
		}
		if i == 0 {
			continue
		}
		var used, speed []float64
		for round := range a.used {
			used, speed = append(used, a.used[round]/arms[0].used[round]), append(speed, a.speed[round]/arms[0].speed[round])
		}
		b.ReportMetric(median(used), "cpu-ratio/"+a.name)
		if counted[0] > 0 {
			b.ReportMetric(counted[i]/counted[0], "instructions-ratio/"+a.name)
		}
		b.ReportMetric(median(speed), "speed-ratio/"+a.name)
		if a.allocations != nil {
			b.ReportMetric(allocations[i]-allocations[0], "more-allocs/"+a.name)
		}
	}
}

func median(list []float64) float64 { return slices.Sorted(slices.Values(list))[len(list)/2] }

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
