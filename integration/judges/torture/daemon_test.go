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

// daemon is a program that is to run for ever: killed in between, and started again. All that it ever said is in one
// file.
type daemon struct {
	t       testing.TB
	name    string
	program string
	args    []string
	said    string // the file
	running *running
	begun   atomic.Int64                     // where in the file the words of its last life begin
	excused func(code int, last string) bool // an end of its own accord that is no fault of it

	mu     sync.Mutex
	addr   string // of its HTTP port, in the life whose words begin at addrOf
	addrOf int64
}

// running is one life of a daemon.
type running struct {
	cmd  *exec.Cmd
	done chan struct{}
	from int64 // where in the file its words begin
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

// alive reports whether it runs. If it has ended by itself without an excuse the test fails.
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

// stop ends it in good order.
func (d *daemon) stop() {
	d.t.Helper()
	if !d.alive() {
		return
	}
	d.signal(syscall.SIGTERM)
	d.signal(syscall.SIGCONT) // it may be held
	select {
	case <-d.running.done:
	case <-time.After(harness.Patience):
		d.signal(syscall.SIGQUIT) // its goroutines, in its file
		<-d.running.done
		d.t.Fatalf("%s does not stop", d.name)
	}
	said := d.words(d.running.from)
	code := d.running.cmd.ProcessState.ExitCode()
	unprepared := code == -1 && said == "" // it had not come so far as to ask for signals
	if code != 0 && !unprepared && (d.excused == nil || !d.excused(code, said)) {
		d.t.Fatalf("%s was told to stop and ended with %d", d.name, code)
	}
	d.running = nil
}

// words is what it has said from a place in its file on.
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

// tail is the end of what it has said.
func (d *daemon) tail(lines int) string {
	all := strings.Split(strings.TrimSpace(d.words(0)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// served finds out where an indexer's last life serves HTTP. Any goroutine may call it.
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
