package pyenv

import (
	"context"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/tools/child"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// FetchEtcd unpacks Debian's etcd without an installation, unless present.
func FetchEtcd(progress io.Writer) error {
	cache, err := cacheDir()
	if err != nil {
		return err
	}
	return unpack(progress, etcdFolder(cache), []string{"etcd-server"})
}

func etcdFolder(cache string) string { return filepath.Join(cache, "etcd") }

// Etcd is a real etcd with a separate data folder. It ends with the test.
type Etcd struct {
	URL string

	t    testing.TB
	args []string
	cmd  *exec.Cmd
}

// StartEtcd starts an etcd and waits for a reply. client is the HTTP client for requests. With cert and key, etcd uses
// TLS.
func StartEtcd(t testing.TB, client *http.Client, cert, key string) *Etcd {
	t.Helper()
	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(etcdFolder(cache), "usr/bin/etcd")
	if !exists(program) {
		t.Fatalf("%s is missing; run: %s", program, fetchCommand)
	}
	e := &Etcd{URL: "http://" + loopback.Reserve(t), t: t}
	if cert != "" {
		e.URL = "https" + e.URL[len("http"):]
	}
	peer := "http://" + loopback.Reserve(t)
	e.args = []string{program, "--data-dir", t.TempDir(), "--listen-client-urls", e.URL, "--advertise-client-urls", e.URL,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer}
	if cert != "" {
		e.args = append(e.args, "--cert-file", cert, "--key-file", key)
	}
	e.Start(client)
	t.Cleanup(e.Kill)
	return e
}

// Start restarts the etcd with the same data.
func (e *Etcd) Start(client *http.Client) {
	e.t.Helper()
	e.cmd = exec.Command(e.args[0], e.args[1:]...)
	e.cmd.SysProcAttr = child.DiesWithUs()
	e.cmd.Stderr = os.Stderr
	if !testing.Verbose() {
		e.cmd.Stderr = nil
	}
	if err := e.cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, e.URL+"/health", nil)
		if err != nil {
			e.t.Fatal(err)
		}
		answer, err := client.Do(r)
		if err == nil {
			answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				return
			}
		}
		if ctx.Err() != nil {
			e.t.Fatalf("etcd does not answer: %v", err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// Kill kills the etcd, if running.
func (e *Etcd) Kill() {
	if e.cmd != nil {
		_ = e.cmd.Process.Kill() // the process may have ended
		_ = e.cmd.Wait()         // the process was killed
		e.cmd = nil
	}
}
