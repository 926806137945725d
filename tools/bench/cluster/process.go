package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// process is a running program with its output.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}

	mu   sync.Mutex
	said bytes.Buffer
}

// Write stores output of the program.
func (p *process) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.said.Write(text)
}

func (p *process) saying() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.said.String()
}

// start starts the indexer with arguments, without the indexer's environment variables.
func (b *bed) start(args ...string) (*process, error) {
	p := &process{cmd: exec.Command(b.o.Program, args...), done: make(chan struct{})}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "NATS_") && !strings.HasPrefix(v, "KVATLAS_") {
			p.cmd.Env = append(p.cmd.Env, v)
		}
	}
	return p, p.run()
}

// run starts a program.
func (p *process) run() error {
	p.cmd.Stdout, p.cmd.Stderr = p, p
	if err := p.cmd.Start(); err != nil {
		return err
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // wait reports the end to its caller
	}()
	return nil
}

// wait waits until the output matches pattern, and returns the match.
func (p *process) wait(ctx context.Context, pattern string) ([]string, error) {
	re := regexp.MustCompile(pattern)
	for begun := time.Now(); ; {
		if m := re.FindStringSubmatch(p.saying()); m != nil {
			return m, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-p.done:
			return nil, fmt.Errorf("%s has ended with the output %s", p.cmd, p.saying())
		case <-time.After(10 * time.Millisecond):
		}
		if time.Since(begun) > patience {
			return nil, fmt.Errorf("%s has not printed %q within %v, but %s", p.cmd, pattern, patience, p.saying())
		}
	}
}

// stop ends the program gracefully, or kills the program after a delay.
func (p *process) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // an ended process ignores the signal
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
		p.kill()
	}
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill() // an ended process ignores the signal
	<-p.done
}

// spent returns the processor time of all threads of the processes in nanoseconds (/proc/PID/task/TID/schedstat, see
// Documentation/scheduler/sched-stats.rst of Linux). The time of an ended thread is lost, but Go's threads do not end.
func spent(list []*process) (sum time.Duration, err error) {
	var pids []int
	for _, p := range list {
		pids = append(pids, p.cmd.Process.Pid)
	}
	return spentBy(pids...)
}

// spentBy is [spent] of process identifiers.
func spentBy(pids ...int) (sum time.Duration, err error) {
	for _, pid := range pids {
		all := fmt.Sprintf("/proc/%d/task/*/schedstat", pid)
		threads, err := filepath.Glob(all)
		if err != nil || len(threads) == 0 {
			return 0, fmt.Errorf("processor time: there is no %s", all)
		}
		for _, path := range threads {
			text, err := os.ReadFile(path)
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
				continue // the thread has just ended
			}
			if err != nil {
				return 0, fmt.Errorf("processor time: %w", err)
			}
			first, _, _ := strings.Cut(string(text), " ")
			took, err := strconv.ParseInt(first, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("processor time: %s contains %q", path, text)
			}
			sum += time.Duration(took)
		}
	}
	return sum, nil
}

var (
	takes    = regexp.MustCompile(`(?m)^time=(\S+) .*msg="this node keeps (?:other )?partitions"`)
	restores = regexp.MustCompile(`(?m)^time=(\S+) .*msg=restored .*holdings=(\d+)`)
)

// restored reads the nodes' log lines after a time. It returns the number of restored partitions, their holdings, and
// the begin of the restore. The restore lasts from the first assignment of partitions to the last restored partition.
func restored(after time.Time, nodes ...*process) (r Restored, began time.Time, partitions int, err error) {
	var last time.Time
	at := func(text string) (t time.Time, in bool, err error) {
		t, err = time.Parse(time.RFC3339Nano, text)
		return t, !t.Before(after.Truncate(time.Millisecond)), err
	}
	for _, n := range nodes {
		said := n.saying()
		said = said[:strings.LastIndexByte(said, '\n')+1] // whole lines
		for _, m := range takes.FindAllStringSubmatch(said, -1) {
			t, in, err := at(m[1])
			if err != nil {
				return r, began, 0, err
			}
			if in && (began.IsZero() || t.Before(began)) {
				began = t
			}
		}
		for _, m := range restores.FindAllStringSubmatch(said, -1) {
			t, in, err := at(m[1])
			if err != nil {
				return r, began, 0, err
			}
			if !in {
				continue
			}
			holdings, err := strconv.ParseUint(m[2], 10, 64)
			if err != nil {
				return r, began, 0, err
			}
			partitions++
			r.Holdings += holdings
			if t.After(last) {
				last = t
			}
		}
	}
	if partitions > 0 && began.IsZero() {
		return r, began, 0, errors.New("the nodes' logs have no line about the assignment of partitions")
	}
	r.Seconds = max(last.Sub(began), time.Millisecond).Seconds()
	r.Rate = float64(r.Holdings) / r.Seconds
	return r, began, partitions, nil
}
