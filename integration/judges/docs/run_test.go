//go:build judges

package docs

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/child"
)

// reader is the reader of a page: a shell in namespaces of its own, in a fresh folder.
type reader struct {
	t         *testing.T
	dir       string // for files of this program
	in        io.Writer
	replies   chan string // exit statuses; closed at the end of the shell
	terminals map[string]*terminal
	count     int // of scripts
}

// terminal has a command that serves until it is stopped.
type terminal struct{ pid, log string }

// setup gives a reader the network: all addresses and names of the pages are this host.
const setup = `ip link set lo up &&
ip addr add 10.0.0.1/32 dev lo && hostname host-1 &&
mount --bind "$1/hosts" /etc/hosts && cd "$2"`

// hosts are the names in the pages. The NATS servers of a cluster have addresses of their own.
const hosts = `127.0.0.1 localhost nats indexer w1 llama-1 collector
127.0.0.11 nats-1 a
127.0.0.12 nats-2 b
127.0.0.13 nats-3 c
`

// startReader starts a reader with programs on PATH, in a folder that is empty or a clone.
func startReader(t *testing.T, programs string, clone bool) *reader {
	r := &reader{t: t, dir: t.TempDir(), replies: make(chan string), terminals: map[string]*terminal{}}
	folder := filepath.Join(r.dir, "folder")
	if err := os.MkdirAll(filepath.Join(r.dir, "home"), 0o755); err != nil {
		t.Fatal(err)
	}
	if clone {
		copyClone(t, folder)
	} else if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(r.dir, "hosts"), hosts)
	shell := exec.Command("unshare", "--user", "--map-root-user", "--net", "--mount", "--uts", "--pid", "--fork",
		"--kill-child", "--mount-proc", "bash", "-s", r.dir, folder)
	home := filepath.Join(r.dir, "home")
	shell.Env = append(harness.Environment(nil), "HOME="+home, "PATH="+programs+":"+home+"/go/bin:"+os.Getenv("PATH"),
		"GOCACHE="+goEnv(t, "GOCACHE"), "GOMODCACHE="+goEnv(t, "GOMODCACHE"),
		"GOFLAGS=-trimpath", "GOPATH=") // -trimpath: every clone has the same build cache
	shell.SysProcAttr = child.DiesWithUs()
	shell.Stderr = os.Stderr
	var err error
	if r.in, err = shell.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := shell.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := shell.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		shell.Process.Kill()
		for range r.replies {
		}
		shell.Wait()
	})
	go func() {
		defer close(r.replies)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			r.replies <- lines.Text()
		}
	}()
	if _, errors, status := r.run(setup); status != "0" {
		t.Fatalf("namespaces of a page: %s", errors)
	}
	return r
}

// goEnv is a setting of the go command.
func goEnv(t *testing.T, name string) string {
	out, err := exec.Command("go", "env", name).Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// copyClone copies the files of this repository, without its history.
func copyClone(t *testing.T, folder string) {
	script := `mkdir "$2" && cd "$1" && git ls-files -z --cached --others --exclude-standard |
		xargs -0 sh -c 'for f; do [ ! -e "$f" ] || printf "%s\0" "$f"; done' - | tar -c --null -T - | tar -x -C "$2"`
	if out, err := exec.Command("sh", "-c", script, "-", root, folder).CombinedOutput(); err != nil {
		t.Fatalf("copy the clone: %v: %s", err, out)
	}
}

func write(t *testing.T, file, text string) {
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, file string) string {
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// script writes a script and returns its path.
func (r *reader) script(text string) string {
	r.count++
	file := filepath.Join(r.dir, fmt.Sprintf("script-%d", r.count))
	write(r.t, file, text+"\n")
	return file
}

// send sends a line to the shell and returns the line that it prints.
func (r *reader) send(line string) string {
	fmt.Fprintln(r.in, line)
	select {
	case reply, ok := <-r.replies:
		if !ok {
			r.t.Fatalf("the shell of the page has ended at %s", line)
		}
		return reply
	case <-time.After(*patience):
		r.t.Fatalf("no end of %s", line)
		return ""
	}
}

// run runs a script in the reader's shell.
func (r *reader) run(text string) (stdout, stderr, status string) {
	file := r.script(text)
	status = r.send(fmt.Sprintf(". %s >%[1]s.out 2>%[1]s.err </dev/null; echo $?", file))
	return read(r.t, file+".out"), read(r.t, file+".err"), status
}

// ready are the commands that serve until they are stopped, with the log line after which they serve.
var ready = []struct{ command, line *regexp.Regexp }{
	{regexp.MustCompile(`^indexer serve`), regexp.MustCompile(`msg=ready`)},
	{regexp.MustCompile(`(?s)^worker-shim simulate.*--once`), regexp.MustCompile(`stays idle`)},
	{regexp.MustCompile(`(?s)^worker-shim simulate.*--print-prompt`), regexp.MustCompile(`last prompt is written`)},
	{regexp.MustCompile(`^worker-shim simulate`), regexp.MustCompile(`simulated engine runs`)},
	{regexp.MustCompile(`(?s)^worker-shim run.*--listen`), regexp.MustCompile(`may dial in|msg=starting`)},
	// the shim waits silently for the adapter
	{regexp.MustCompile(`(?s)^worker-shim run.*--engine ipc:`), regexp.MustCompile(``)},
	{regexp.MustCompile(`^worker-shim run`), regexp.MustCompile(`msg="?(caught up|registered)`)},
	{regexp.MustCompile(`^my-adapter \|`), regexp.MustCompile(`msg="?(caught up|registered)`)},
	{regexp.MustCompile(`^vllm serve`), regexp.MustCompile(`ready`)},
	{regexp.MustCompile(`^envoy`), regexp.MustCompile(`starting main dispatch loop`)},
	{regexp.MustCompile(`^curl -N`), regexp.MustCompile(`data:`)},
}

// background finds a command that runs other commands in the background.
var background = regexp.MustCompile(`&( |\n|$)`)

// place finds the parts of a command that only one running program can have.
var place = regexp.MustCompile(`^\S+( (serve|run|simulate))?|--(node-id|endpoint) indexer-[23]`)

// serve runs a command in a terminal until it is ready, after the end of an earlier one in the same place.
func (r *reader) serve(text string, until *regexp.Regexp) {
	at := strings.Join(place.FindAllString(text, -1), " ")
	if old := r.terminals[at]; old != nil {
		r.close(old)
	}
	if !strings.Contains(text, " | ") {
		text = "exec " + text
	}
	file := r.script(text)
	x := &terminal{log: file + ".log"}
	write(r.t, x.log, "")
	x.pid = r.send(fmt.Sprintf(". %s >%s 2>&1 </dev/null & echo $!", file, x.log))
	r.terminals[at] = x
	r.eventually("ready: "+text, func() (bool, string) {
		ended := r.send("kill -0 "+x.pid+" 2>/dev/null; echo $?") != "0"
		log := read(r.t, x.log)
		if ended && !until.MatchString(log) {
			r.t.Fatalf("%s has ended:\n%s", text, log)
		}
		return until.MatchString(log), log
	})
}

// patience is the longest wait for a program or an output.
var patience = flag.Duration("docs.patience", harness.Patience, "longest wait; shorter for work on a page")

// eventually waits until something is so.
func (r *reader) eventually(what string, is func() (bool, string)) {
	r.t.Helper()
	for deadline := time.Now().Add(*patience); ; time.Sleep(50 * time.Millisecond) {
		ok, seen := is()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("timeout: %s; last seen:\n%s", what, seen)
		}
	}
}

// close stops the program of a terminal, as Ctrl-C does.
func (r *reader) close(x *terminal) {
	r.send(fmt.Sprintf("kill -INT %s 2>/dev/null; kill %[1]s 2>/dev/null; wait %[1]s 2>/dev/null; echo", x.pid))
}

// closeAll stops all terminals.
func (r *reader) closeAll() {
	for at, x := range r.terminals {
		r.close(x)
		delete(r.terminals, at)
	}
}

// execute runs a command of the page, or starts it in a terminal, and returns its output.
func (r *reader) execute(text, status string) string {
	r.t.Helper()
	for _, k := range ready {
		if k.command.MatchString(text) && !background.MatchString(text) {
			r.serve(text, k.line)
			return ""
		}
	}
	stdout, stderr, got := r.run(text)
	if got != status {
		r.t.Errorf("exit status %s:\n%s\n%s%s\n%s", got, text, stdout, stderr, r.logs())
	}
	return stdout
}

// logs are the last lines of all terminals.
func (r *reader) logs() (all string) {
	for at, x := range r.terminals {
		lines := strings.Split(read(r.t, x.log), "\n")
		all += "--- " + at + "\n" + strings.Join(lines[max(0, len(lines)-6):], "\n")
	}
	return all
}

// comparison is how output is compared with the page.
type comparison int

const (
	// The default: durations, times of day and versions may differ.
	_ comparison = iota

	// numbers: all numbers, sizes and bars may differ, and rows that differ in nothing else may have another order and
	// number. Words and columns are equal.
	numbers
)

var (
	spaces  = regexp.MustCompile(`\s+`)
	version = regexp.MustCompile(`\bv\d+\.\d+\.\d+(-\w+)?\b`)
	moment  = regexp.MustCompile(`\d{4}-\d\d-\d\dT[\d:.]+Z|\b\d\d:\d\d:\d\d\b`)
	lasting = regexp.MustCompile(`\b\d+(\.\d+)? ?(ns|µs|ms|s|m|h)\b|\b(\d+(\.\d+)?(ms|h|m|s))+\b`)
	number  = regexp.MustCompile(`\d+(\.\d+)?k?([-,]\d+)*`)
	size    = regexp.MustCompile(`N (B|KiB|MiB|GiB)\b`)
	bar     = regexp.MustCompile(`#+`)
)

// line rewrites a line for the comparison.
func (c comparison) line(text string) string {
	text = moment.ReplaceAllString(version.ReplaceAllString(text, "VERSION"), "MOMENT")
	text = lasting.ReplaceAllString(text, "TIME")
	if c == numbers {
		text = size.ReplaceAllString(number.ReplaceAllString(bar.ReplaceAllString(text, ""), "N"), "N B")
	}
	return strings.TrimSpace(spaces.ReplaceAllString(text, " "))
}

// lines rewrites lines, without empty lines. JSON on several lines is one line.
func (c comparison) lines(list []string) (all []string) {
	if strings.HasPrefix(list[0], "{") {
		list = []string{strings.ReplaceAll(strings.Join(list, ""), `, "`, `,"`)}
	}
	for _, text := range list {
		if text = c.line(text); text != "" {
			all = append(all, text)
		}
	}
	if c == numbers {
		slices.Sort(all)
		all = slices.Compact(all)
	}
	return all
}

// same reports whether output is as the page shows it.
func same(shown, got []string, c comparison) bool {
	const more = "..."
	want, have := c.lines(shown), c.lines(got)
	if c == numbers && slices.Contains(want, more) {
		return !slices.ContainsFunc(want, func(l string) bool { return l != more && !slices.Contains(have, l) })
	}
	pattern := "^"
	for _, text := range want {
		if text == more {
			pattern += `(?:.*\n)*?`
		} else {
			pattern += regexp.QuoteMeta(text) + `\n`
		}
	}
	return regexp.MustCompile(pattern + "$").MatchString(strings.Join(append(have, ""), "\n"))
}
