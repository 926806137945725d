package integration

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// execStart returns the program of a unit in deploy/systemd with its arguments.
func execStart(t *testing.T, unit string) (program string, args []string) {
	t.Helper()
	m := regexp.MustCompile(`(?m)^ExecStart=/usr/local/bin/(\S+) (.*)$`).FindStringSubmatch(
		readFile(t, filepath.Join("../deploy/systemd", unit)))
	if m == nil {
		t.Fatalf("%s starts no program of /usr/local/bin", unit)
	}
	return m[1], strings.Fields(m[2])
}

// TestUnitSettings checks that the units' flags and the settings in their files, including comments, exist in the
// programs.
func TestUnitSettings(t *testing.T) {
	t.Parallel()
	assigned := regexp.MustCompile(`(?m)(?:^#?|=| )((?:KVATLAS|NATS)_[A-Z0-9_]+)=`)
	for unit, files := range map[string][]string{
		"kvatlas-indexer.service":      {"indexer.env", "secrets.conf"},
		"kvatlas-worker-shim@.service": {"worker-shim.env"},
	} {
		name, args := execStart(t, unit)
		r := harness.Run(t, name, append(slices.Clone(args), "--help")...)
		if r.Code != 0 {
			t.Fatalf("%s: %+v", unit, r)
		}
		has := func(flag string) bool { return strings.Contains(r.Stdout, " --"+flag+" ") }
		for _, arg := range args[1:] {
			if flag, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "="); !has(flag) {
				t.Errorf("%s has %s, an unknown flag of %s", unit, arg, name)
			}
		}
		seen := 0
		for _, file := range files {
			for _, m := range assigned.FindAllStringSubmatch(readFile(t, filepath.Join("../deploy/systemd", file)), -1) {
				flag := strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(m[1], "KVATLAS_"), "_", "-"))
				for natural, variable := range cli.KnownNames {
					if variable == m[1] {
						flag = natural
					}
				}
				if seen++; !has(flag) {
					t.Errorf("%s sets %s, and %s has no --%s", file, m[1], name, flag)
				}
			}
		}
		if seen < 8 {
			t.Errorf("only %d settings were found in %q: the pattern has become too narrow", seen, files)
		}
	}
}

// TestUnitCredentials starts the indexer with the settings of secrets.conf, including comments except for the key for
// NATS servers, and with the files that systemd would put into a private folder. HTTP then needs the token and the
// certificate.
func TestUnitCredentials(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	credentials := filepath.Join(dir, "credentials")
	if err := os.Mkdir(credentials, 0o700); err != nil {
		t.Fatal(err)
	}
	certFile, keyFile := writeCertificate(t, dir)
	cert, key := readFile(t, certFile), readFile(t, keyFile)
	loaded := map[string]string{"http-token": "0123456789abcdef0123\n", "http.crt": cert, "http.key": key, "node.nk": ""}
	text := strings.ReplaceAll(readFile(t, "../deploy/systemd/secrets.conf"), "\n#", "\n")
	for name, content := range loaded {
		if !strings.Contains(text, "\nLoadCredential="+name+":/etc/kvatlas/"+name+"\n") {
			t.Errorf("secrets.conf does not load %s", name)
		}
		if err := os.WriteFile(filepath.Join(credentials, name), []byte(content), 0o400); err != nil {
			t.Fatal(err)
		}
	}
	env := map[string]string{"CREDENTIALS_DIRECTORY": credentials, "KVATLAS_HTTP_LISTEN": "127.0.0.1:0",
		"KVATLAS_NATS_LISTEN": "127.0.0.1:0"}
	for _, m := range regexp.MustCompile(`(?:^|[= ])([A-Z_]+)=%d/(\S+)`).FindAllStringSubmatch(text, -1) {
		if _, ok := loaded[m[2]]; !ok {
			t.Errorf("%s names the file %s, which is not loaded", m[1], m[2])
		}
		if m[2] != "node.nk" {
			env[m[1]] = filepath.Join(credentials, m[2])
		}
	}
	name, args := execStart(t, "kvatlas-indexer.service")
	program, err := exec.LookPath("env")
	if err != nil {
		t.Fatal(err)
	}
	words := []string{"-C", dir}
	for name, value := range env {
		words = append(words, name+"="+value)
	}
	x := harness.Start(t, program, append(append(words, harness.Program(t, name)), args...)...)
	at := x.WaitFor(`HTTPS? is served" listen=(\S+)`)[1]
	x.WaitFor("msg=ready")
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(cert))
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	for token, want := range map[string]int{"": http.StatusUnauthorized, "0123456789abcdef0123": http.StatusOK} {
		r, err := http.NewRequest("GET", "https://"+at+"/v1/workers", nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		res, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		if res.Body.Close(); res.StatusCode != want {
			t.Errorf("with the token %q: %s", token, res.Status)
		}
	}
}

// TestUnitsRun starts the programs with the units' arguments and files of settings, apart from addresses. The indexer
// notifies its readiness, as Type=notify requires, and stores its data in its working directory.
func TestUnitsRun(t *testing.T) {
	t.Parallel()
	env, err := exec.LookPath("env")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "unit") // a short path: a socket's path has at most 104 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	start := func(unit, file string, settings ...string) *harness.Process {
		name, args := execStart(t, unit)
		words := []string{"-C", dir}
		words = append(words, commands(readFile(t, filepath.Join("../deploy/systemd", file)), "")...)
		words = append(words, settings...)
		return harness.Start(t, env, append(append(words, harness.Program(t, name)), args...)...)
	}
	socket := filepath.Join(dir, "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	x := start("kvatlas-indexer.service", "indexer.env", "NOTIFY_SOCKET="+socket, "KVATLAS_NATS_LISTEN=127.0.0.1:0",
		"KVATLAS_HTTP_LISTEN=127.0.0.1:0")
	nats, http_ := x.WaitFor(`in this process" listen=(\S+)`)[1], x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
	if err := manager.SetReadDeadline(time.Now().Add(harness.Patience)); err != nil {
		t.Fatal(err)
	}
	said := make([]byte, 100)
	if n, err := manager.Read(said); err != nil || string(said[:n]) != "READY=1" {
		t.Fatalf("the service manager receives %q, %v", said[:n], err)
	}
	res, err := http.Get("http://" + http_ + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	if res.Body.Close(); res.StatusCode != http.StatusOK {
		t.Errorf("the indexer has notified its readiness, but /readyz replies %s", res.Status)
	}
	if _, err := os.Stat(filepath.Join(dir, "kvatlas-data")); err != nil {
		t.Error(err)
	}

	engine, replay := "tcp://"+loopback.Reserve(t), "tcp://"+loopback.Reserve(t)
	harness.Start(t, "worker-shim", "simulate", "--endpoint", engine, "--replay", replay).WaitFor(`endpoint=`)
	shim := start("kvatlas-worker-shim@.service", "worker-shim.env", "KVATLAS_ENGINE="+engine,
		"KVATLAS_REPLAY="+replay, "NATS_URL="+nats)
	harness.Eventually(t, "the shim's worker holds something", func() (bool, string) {
		r := harness.Run(t, "indexer", "workers", "--json", "--nats", nats)
		return r.Code == 0 && strings.Contains(r.Stdout, `"worker-1"`), r.Stdout + r.Stderr
	})
	shim.Stop()
	x.Stop()
}
