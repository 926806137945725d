package pyenv

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"
)

// driver is a running script of integration/python that takes commands, a line of JSON each, and answers each with
// another.
type driver struct {
	t      testing.TB
	script string
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader

	killOnce *sync.Once
}

// patience is how long an answer may take.
const patience = 4 * time.Minute

// startDriver starts a script that lives until the test ends. It says something at first, which the caller reads.
func startDriver(t testing.TB, python, script string, options any) driver {
	t.Helper()
	arg, err := json.Marshal(options)
	if err != nil {
		t.Fatal(err)
	}
	d := driver{t: t, script: script, cmd: exec.Command(python, Script(t, script), string(arg)),
		killOnce: new(sync.Once)}
	d.cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	d.cmd.Stderr = os.Stderr
	if d.in, err = d.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := d.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	d.out = bufio.NewReader(out)
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)
	return d
}

// answer waits for one line and fails the test if it tells of an error.
func (d *driver) answer(into any) {
	d.t.Helper()
	guard := time.AfterFunc(patience, d.Kill)
	defer guard.Stop()
	line, err := d.out.ReadBytes('\n')
	if err != nil {
		d.t.Fatalf("%s says nothing: %v", d.script, err)
	}
	var verdict struct {
		OK    bool
		Error string
	}
	if err := json.Unmarshal(line, &verdict); err != nil || !verdict.OK {
		d.t.Fatalf("%s: %s%v", d.script, line, err)
	}
	if into != nil {
		if err := json.Unmarshal(line, into); err != nil {
			d.t.Fatalf("%s: %s%v", d.script, line, err)
		}
	}
}

// Do gives any command and decodes its answer into into, unless that is nil.
func (d *driver) Do(command, into any) {
	d.t.Helper()
	b, err := json.Marshal(command)
	if err == nil {
		_, err = d.in.Write(append(b, '\n'))
	}
	if err != nil {
		d.t.Fatalf("%s does not listen: %v", d.script, err)
	}
	d.answer(into)
}

// Kill ends the script as a crash would. Its ports are free afterwards; another may be started there.
func (d *driver) Kill() {
	d.killOnce.Do(func() {
		// A process that has ended by itself cannot be killed, and Wait says how it ended, which is no news here.
		_ = d.cmd.Process.Kill()
		_ = d.cmd.Wait()
	})
}
