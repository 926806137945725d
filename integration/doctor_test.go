package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/doctor"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// examine runs indexer doctor, and returns how it ended and what it found.
func examine(t *testing.T, args ...string) (harness.Result, doctor.Report) {
	t.Helper()
	r := harness.Run(t, "indexer", append([]string{"doctor", "--json", "--timeout", "1m"}, args...)...)
	report := harness.Decode[doctor.Report](r)
	if len(report.Checks) != len(doctor.Names()) {
		t.Fatalf("%d checks: %+v", len(report.Checks), r)
	}
	for _, name := range doctor.Names() {
		if !regexp.MustCompile(`(?m)^` + name + ` +\S`).MatchString(r.Stderr) {
			t.Errorf("no line of progress of %s: %s", name, r.Stderr)
		}
	}
	return r, report
}

// found is what of a report has a text in any of its words.
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

// awaitFinding examines until something is found, with a remedy that has a text.
func awaitFinding(t *testing.T, severity doctor.Severity, check, what, remedy string, args ...string) {
	t.Helper()
	harness.Eventually(t, check+" finds: "+what, func() (bool, string) {
		r, report := examine(t, args...)
		f := found(report, severity, check, what)
		return f != nil && strings.Contains(f.Remedy, remedy) && f.Evidence != "" &&
			(severity != doctor.Error || r.Code == 1), r.Stdout + r.Stderr
	})
}

// TestDoctorOfAHealthyDeployment finds nothing in what is well: not one warning.
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
	if r := harness.Run(t, "indexer", "doctor", "--nats", x.NATS); r.Code != 0 || !strings.Contains(r.Stdout,
		"nothing found") {
		t.Errorf("for people: %+v", r)
	}
}

// TestDoctorWithoutNATS finds that nobody answers, and what else it cannot look at then.
func TestDoctorWithoutNATS(t *testing.T) {
	t.Parallel()
	nobody := loopback.Reserve(t)
	awaitFinding(t, doctor.Error, "nats", "NATS is not reached", "indexer serve", "--nats", nobody)
	r := harness.Run(t, "indexer", "doctor", "--nats", nobody)
	if r.Code != 1 || !strings.Contains(r.Stdout, "1. ") || !strings.Contains(r.Stdout, "what to do: ") {
		t.Errorf("for people: %+v", r)
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

// TestDoctorOfNATS finds servers that are not as kvatlas needs them.
func TestDoctorOfNATS(t *testing.T) {
	t.Parallel()
	store := func(t *testing.T) string { return fmt.Sprintf("jetstream { store_dir: %q }\n", t.TempDir()) }
	t.Run("no JetStream", func(t *testing.T) {
		t.Parallel()
		awaitFinding(t, doctor.Error, "jetstream", "no JetStream for this account", "jetstream: enabled", "--nats",
			natsWith(t, ""))
	})
	t.Run("small messages", func(t *testing.T) {
		t.Parallel()
		awaitFinding(t, doctor.Error, "nats", "max_payload is 65536 bytes", "max_payload: ", "--nats",
			natsWith(t, "max_payload: 65536\n"+store(t)))
	})
	t.Run("refused", func(t *testing.T) {
		t.Parallel()
		awaitFinding(t, doctor.Error, "nats", "refuses this user", "--nats-creds", "--nats",
			natsWith(t, "authorization { user: a, password: b }\n"+store(t)))
	})
	t.Run("no namespace, no node", func(t *testing.T) {
		t.Parallel()
		at := natsWith(t, store(t))
		awaitFinding(t, doctor.Error, "namespace", "no indexer has made the namespace",
			"indexer serve --namespace default", "--nats", at)
		awaitFinding(t, doctor.Error, "nodes", "no indexer node answers", "indexer serve", "--nats", at)
	})
	t.Run("limits", func(t *testing.T) {
		t.Parallel()
		at := natsWith(t, store(t)+
			`accounts { A { jetstream: { max_streams: 10, max_file: 2G }, users: [ { user: a, password: b } ] } }`)
		x := harness.Start(t, "indexer", "serve", "--nats", at, "--nats-user", "a", "--nats-password", "b",
			"--http-listen", "", "--partitions", "8", "--log-bytes", "16777216")
		x.WaitFor(`max|limit`)
		awaitFinding(t, doctor.Error, "namespace", "max_streams is 10", "max_streams: 12", "--nats", at, "--nats-user", "a",
			"--nats-password", "b")
	})
	t.Run("permissions", func(t *testing.T) {
		t.Parallel()
		at := natsWith(t, store(t)+`authorization { users: [ { user: node, password: b },
			{ user: reader, password: b, permissions: { publish: { allow: ["kv.v1.default.q.>"] }, subscribe: "_INBOX.>" } } ] }`)
		x := harness.Start(t, "indexer", "serve", "--nats", at, "--nats-user", "node", "--nats-password", "b",
			"--http-listen", "")
		x.WaitFor(`msg=ready`)
		harness.Eventually(t, "what may not be asked is not checked", func() (bool, string) {
			r, report := examine(t, "--nats", at, "--nats-user", "reader", "--nats-password", "b")
			return r.Code == 3 && strings.Contains(fmt.Sprint(report.Unable()), "jetstream") &&
				len(report.Findings(doctor.Error)) == 0, r.Stdout + r.Stderr
		})
	})
}
