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

// driver is a running script of integration/python. A command is a line of JSON, and the reply is another line.
type driver struct {
	t      testing.TB
	script string
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader

	killOnce *sync.Once
}

// patience is the longest wait for a reply.
const patience = 4 * time.Minute

// startDriver starts a script that runs until the end of the test. The caller reads the first line of output.
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

// answer waits for a line, and fails the test on an error reply.
func (d *driver) answer(into any) {
	d.t.Helper()
	guard := time.AfterFunc(patience, d.Kill)
	defer guard.Stop()
	line, err := d.out.ReadBytes('\n')
	if err != nil {
		d.t.Fatalf("no reply from %s: %v", d.script, err)
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

// Do sends a command and decodes the reply into into. A nil into ignores the reply.
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

// Kill ends the script as a crash does. Afterwards another script can use the same ports.
func (d *driver) Kill() {
	d.killOnce.Do(func() {
		// An ended process needs no kill. The exit status does not matter.
		_ = d.cmd.Process.Kill()
		_ = d.cmd.Wait()
	})
}
