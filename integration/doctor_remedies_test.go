package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/operate/doctor"
)

// remedy is the advice of findings, as an action of the test.
type remedy struct {
	ids   []doctor.Fault
	where string // is in the place of the findings
	do    func()
}

// mend follows the advice of findings, and waits until the doctor no longer lists them, neither separately nor as a
// consequence. args are the doctor's flags in the advice.
func (s *staged) mend(t *testing.T, args []string, remedies ...remedy) {
	t.Helper()
	for _, m := range remedies {
		m.do()
	}
	harness.Eventually(t, "the advice has ended the findings", func() (bool, string) {
		r, report := examine(t, args...)
		var left []string
		for _, f := range slices.Concat(report.Findings(doctor.Error), report.Findings(doctor.Warning)) {
			for _, m := range remedies {
				if strings.Contains(f.Where, m.where) && slices.ContainsFunc(m.ids, func(id doctor.Fault) bool {
					return f.ID == id || slices.Contains(f.Causes, id)
				}) {
					left = append(left, fmt.Sprintf("%s of %s", f.ID, f.Where))
				}
			}
		}
		return len(left) == 0, fmt.Sprintf("left %q\n%s%s", left, r.Stdout, r.Stderr)
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range remedies {
		for _, id := range m.ids {
			s.mended[id] = true
		}
	}
}

// confNATS is a NATS server with a configuration file.
type confNATS struct {
	*harness.Process
	t          *testing.T
	addr, file string
}

// start starts the server with a configuration, or restarts the server with another configuration.
func (c *confNATS) start(config string) {
	c.t.Helper()
	if c.file == "" {
		c.file = filepath.Join(c.t.TempDir(), "nats.conf")
	}
	if c.Process != nil {
		c.Process.Kill()
	}
	text := fmt.Sprintf("server_name: judge\nlisten: %q\n%s\n", c.addr, config)
	if err := os.WriteFile(c.file, []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
	c.Process = harness.Start(c.t, "nats-server", "-c", c.file)
	c.WaitFor(`Server is ready`)
}

// resume has a stopped process go on.
func resume(t *testing.T, p *harness.Process) {
	t.Helper()
	if err := p.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
}
