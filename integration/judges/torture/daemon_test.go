//go:build judges

package torture

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// daemon is a program that runs all the time, with kills and restarts. A single file has the whole output.
type daemon struct {
	t       testing.TB
	name    string
	program string
	args    []string
	said    string // the file
	running *running
	begun   atomic.Int64                     // offset of the last life's output in the file
	excused func(code int, last string) bool // whether an end without a stop is no failure

	mu     sync.Mutex
	addr   string // of the HTTP port, in the life with output from addrOf
	addrOf int64
}

// running is a life of a daemon.
type running struct {
	cmd  *exec.Cmd
	done chan struct{}
	from int64 // offset of the output in the file
}

func (d *daemon) start() {
	d.t.Helper()
	f, err := os.OpenFile(d.said, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		d.t.Fatal(err)
	}
	defer f.Close()
	r := &running{cmd: exec.Command(d.program, d.args...), done: make(chan struct{})}
	r.from, _ = f.Seek(0, io.SeekEnd)
	d.begun.Store(r.from)
	r.cmd.Stdout, r.cmd.Stderr, r.cmd.Env = f, f, harness.Environment(d.args)
	if err := r.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	go func() {
		r.cmd.Wait()
		close(r.done)
	}()
	d.running = r
}

// alive reports whether the daemon runs. An unexpected end without an excuse fails the test.
func (d *daemon) alive() bool {
	if d.running == nil {
		return false
	}
	select {
	case <-d.running.done:
	default:
		return true
	}
	code := d.running.cmd.ProcessState.ExitCode()
	last := strings.TrimSpace(d.words(d.running.from))
	last = last[strings.LastIndexByte(last, '\n')+1:]
	d.running = nil
	if d.excused == nil || !d.excused(code, last) {
		d.t.Fatalf("%s ended by itself with %d: %s", d.name, code, last)
	}
	return false
}

func (d *daemon) signal(s syscall.Signal) {
	if d.running != nil {
		d.running.cmd.Process.Signal(s)
	}
}

func (d *daemon) kill() {
	if d.alive() {
		d.signal(syscall.SIGKILL)
		<-d.running.done
		d.running = nil
	}
}

// stop ends the daemon gracefully.
func (d *daemon) stop() {
	d.t.Helper()
	if !d.alive() {
		return
	}
	d.signal(syscall.SIGTERM)
	d.signal(syscall.SIGCONT) // the process may be paused
	select {
	case <-d.running.done:
	case <-time.After(harness.Patience):
		d.signal(syscall.SIGQUIT) // writes the goroutines to the output
		<-d.running.done
		d.t.Fatalf("%s does not stop", d.name)
	}
	said := d.words(d.running.from)
	code := d.running.cmd.ProcessState.ExitCode()
	unprepared := code == -1 && said == "" // the process ended before the signal handler was installed
	if code != 0 && !unprepared && (d.excused == nil || !d.excused(code, said)) {
		d.t.Fatalf("%s ended with %d after the stop signal", d.name, code)
	}
	d.running = nil
}

// words returns the output from an offset on.
func (d *daemon) words(from int64) string {
	b, err := os.ReadFile(d.said)
	if err != nil || int64(len(b)) < from {
		return ""
	}
	return string(b[from:])
}

func (d *daemon) spoken() int64 {
	info, err := os.Stat(d.said)
	if err != nil {
		return 0
	}
	return info.Size()
}

// tail returns the end of the output.
func (d *daemon) tail(lines int) string {
	all := strings.Split(strings.TrimSpace(d.words(0)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// served returns the address of the HTTP port in an indexer's last life. It is safe for concurrent use.
func (d *daemon) served() (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if begun := d.begun.Load(); d.addr == "" || d.addrOf != begun {
		found := servedAt.FindStringSubmatch(d.words(begun))
		if found == nil {
			return "", fmt.Errorf("%s serves no HTTP yet", d.name)
		}
		d.addr, d.addrOf = found[1], begun
	}
	return d.addr, nil
}

var servedAt = regexp.MustCompile(`HTTP is served" listen=(\S+)`)

var badWords = regexp.MustCompile(`(?m)^(panic:|fatal error:|WARNING: DATA RACE).*|goroutine \d+ \[running\]`)
