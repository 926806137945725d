package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/operate/doctor"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// examine runs indexer doctor, and returns the exit status and the report.
func examine(t *testing.T, args ...string) (harness.Result, doctor.Report) {
	t.Helper()
	r := harness.Run(t, "indexer", append([]string{"doctor", "--json", "--timeout", "1m"}, args...)...)
	report := harness.Decode[doctor.Report](r)
	checks := documentedChecks(t)
	if len(report.Checks) != len(checks) {
		t.Fatalf("%d checks: %+v", len(report.Checks), r)
	}
	for _, name := range checks {
		if !regexp.MustCompile(`(?m)^` + name + ` +\S`).MatchString(r.Stderr) {
			t.Errorf("no line of progress of %s: %s", name, r.Stderr)
		}
	}
	return r, report
}

// documentedChecks returns the names of the checks in docs/doctor.md. A test of package doctor compares the page with
// the code.
func documentedChecks(t *testing.T) (names []string) {
	t.Helper()
	page := readFile(t, "../docs/doctor.md")
	for _, m := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\|").FindAllStringSubmatch(page, -1) {
		names = append(names, m[1])
	}
	if len(names) == 0 {
		t.Fatal("docs/doctor.md lists no checks")
	}
	return names
}

// found returns the finding of a report that contains a text.
func found(r doctor.Report, severity doctor.Severity, check, what string) *doctor.Finding {
	for _, c := range r.Checks {
		for _, f := range c.Findings {
			if c.Check == check && f.Severity == severity && strings.Contains(f.Where+" "+f.What+" "+f.Evidence, what) {
				return &f
			}
		}
	}
	return nil
}

// TestDoctorOfAHealthyDeployment checks that the doctor has no finding and no warning for a healthy deployment.
func TestDoctorOfAHealthyDeployment(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	engine := harness.StartSimEngine(t)
	harness.StartSimShim(t, engine, x.NATS, "w1")
	harness.ServePrompt(t, engine, harness.Tokens(1, 8*harness.BlockSize))
	x.WaitDepth(t, "m", harness.Tokens(1, 8*harness.BlockSize), "w1", 8)
	harness.Eventually(t, "nothing is found", func() (bool, string) {
		r, report := examine(t, "--nats", x.NATS)
		return r.Code == 0 && len(report.Findings(doctor.Error)) == 0 && len(report.Findings(doctor.Warning)) == 0 &&
			len(report.Unable()) == 0, r.Stdout + r.Stderr
	})
	harness.Eventually(t, "the report for people has no finding", func() (bool, string) {
		r := harness.Run(t, "indexer", "doctor", "--nats", x.NATS)
		return r.Code == 0 && strings.Contains(r.Stdout, "nothing found"), r.Stdout + r.Stderr
	})
}

// TestDoctorWithoutNATS checks the findings without NATS, and the list of unchecked parts.
func TestDoctorWithoutNATS(t *testing.T) {
	t.Parallel()
	nobody := loopback.Reserve(t)
	r := harness.Run(t, "indexer", "doctor", "--nats", nobody)
	if r.Code != 1 || !strings.Contains(r.Stdout, "1. ") || !strings.Contains(r.Stdout, "what to do: ") ||
		strings.Contains(r.Stdout, "\n2. ") {
		t.Errorf("for people: %+v", r)
	}
	_, report := examine(t, "--nats", nobody)
	for _, c := range report.Checks[1:] {
		if c.NeedsOf != "nats" || c.Unable || c.Skipped != "NATS is unreachable" {
			t.Errorf("without NATS: %+v", c)
		}
	}
}

// natsWith runs a NATS server with a configuration until the test ends.
func natsWith(t *testing.T, config string) string {
	t.Helper()
	addr := loopback.Reserve(t)
	file := filepath.Join(t.TempDir(), "nats.conf")
	text := fmt.Sprintf("server_name: judge\nlisten: %q\n%s\n", addr, config)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	harness.Start(t, "nats-server", "-c", file).WaitFor(`Server is ready`)
	return addr
}

// TestDoctorMayNotAsk checks that a missing permission is reported as not checked, not as a fault.
func TestDoctorMayNotAsk(t *testing.T) {
	t.Parallel()
	at := natsWith(t, fmt.Sprintf("jetstream { store_dir: %q, max_file_store: 1TB }\n", t.TempDir())+`
	authorization { users: [ { user: node, password: b },
		{ user: reader, password: b, permissions: { publish: { allow: ["kv.v1.default.q.>"] }, subscribe: "_INBOX.>" } } ] }`)
	x := harness.Start(t, "indexer", "serve", "--nats", at, "--nats-user", "node", "--nats-password", "b",
		"--http-listen", "", "--partitions", "2", "--log-bytes", "10000000")
	x.WaitFor(`msg=ready`)
	harness.Eventually(t, "forbidden parts are not checked", func() (bool, string) {
		r, report := examine(t, "--nats", at, "--nats-user", "reader", "--nats-password", "b")
		because := map[string]string{}
		for _, c := range report.Checks {
			because[c.Check] = c.NeedsOf
		}
		return r.Code == 3 && fmt.Sprint(report.Unable()) == "[jetstream namespace]" &&
			len(report.Findings(doctor.Error)) == 0 && because["streams"] == "namespace" && because["nodes"] == "" &&
			because["workers"] == "", r.Stdout + r.Stderr
	})
}
