package pyenv

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/tools/loopback"
)

// debs are the Debian packages (12, bookworm) with the libraries of Mooncake's programs.
var debs = []string{"libibverbs1=44.0-2", "libnl-3-200=3.7.0-0.2+b1", "libnl-route-3-200=3.7.0-0.2+b1"}

// libraryFolder is where the libraries of debs are below the cache.
func libraryFolder(cache string) string {
	return filepath.Join(cache, "mooncake-libraries")
}

// Mooncake is a real Mooncake master and, after StartClient, a real client with memory for objects. The methods fail
// the test on errors. They are not safe for concurrent use.
type Mooncake struct {
	HTTP string // HOST:PORT of the admin server

	t      testing.TB
	python string
	env    []string
	rpc    string
	etcd   string // URL of the etcd for the election of a leader; "" for a single master
	master *exec.Cmd
	client *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
}

// MooncakePython returns an interpreter with Mooncake's package, and the required LD_LIBRARY_PATH.
func MooncakePython(t testing.TB) (python, libraryPath string) {
	t.Helper()
	python = PythonWith(t, "mooncake.txt")
	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	dir := libraryFolder(cache)
	if !exists(dir) {
		t.Fatalf("%s is missing; run: %s", dir, fetchCommand)
	}
	return python, filepath.Join(dir, "usr/lib/x86_64-linux-gnu") + ":" + filepath.Join(dir, "lib/x86_64-linux-gnu")
}

// StartMooncake starts a master that runs until the end of the test.
func StartMooncake(t testing.TB) *Mooncake {
	t.Helper()
	m := newMooncake(t, loopback.Reserve(t), loopback.Reserve(t), "")
	m.StartMaster()
	return m
}

// StartMooncakes starts masters that elect a leader in etcd. The masters have equal ports on different loopback
// addresses, as on different hosts. A client of the first master finds the leader.
func StartMooncakes(t testing.TB, etcd *Etcd, n int) (list []*Mooncake) {
	t.Helper()
	_, http, _ := net.SplitHostPort(loopback.Reserve(t))
	_, rpc, _ := net.SplitHostPort(loopback.Reserve(t))
	for i := range n {
		host := fmt.Sprint("127.0.0.", 2+i)
		m := newMooncake(t, net.JoinHostPort(host, http), net.JoinHostPort(host, rpc), etcd.URL)
		m.StartMaster()
		list = append(list, m)
	}
	return list
}

func newMooncake(t testing.TB, http, rpc, etcd string) *Mooncake {
	t.Helper()
	m := &Mooncake{t: t, HTTP: http, rpc: rpc, etcd: etcd}
	var path string
	m.python, path = MooncakePython(t)
	m.env = append(os.Environ(), "LD_LIBRARY_PATH="+path)
	t.Cleanup(func() {
		m.KillClient()
		m.KillMaster()
	})
	return m
}

// RPC is HOST:PORT of the master's RPC.
func (m *Mooncake) RPC() string { return m.rpc }

// StartMaster starts the master and waits for a reply. After KillMaster, it uses the same ports.
func (m *Mooncake) StartMaster() {
	m.t.Helper()
	host, rpc, _ := net.SplitHostPort(m.rpc)
	_, port, _ := net.SplitHostPort(m.HTTP)
	where, err := exec.Command(m.python, "-c",
		"import importlib.util as u; print(u.find_spec('mooncake').submodule_search_locations[0], end='')").Output()
	if err != nil {
		m.t.Fatal(err)
	}
	master := filepath.Join(string(where), "mooncake_master")
	m.master = exec.Command(master, "--rpc_address="+host, "--rpc_port="+rpc, "--metrics_host="+host,
		"--metrics_port="+port)
	if m.etcd != "" {
		m.master.Args = append(m.master.Args, "--enable_ha=true", "--etcd_endpoints="+m.etcd)
	}
	m.master.Env = m.env
	if err := os.Chmod(master, 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := m.master.Start(); err != nil {
		m.t.Fatal(err)
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		res, err := http.Get("http://" + m.HTTP + "/health")
		if err == nil {
			res.Body.Close()
			return
		}
		if time.Now().After(deadline) {
			m.t.Fatalf("the Mooncake master does not answer: %v", err)
		}
	}
}

// KillMaster ends the master as a crash would.
func (m *Mooncake) KillMaster() {
	if m.master != nil && m.master.Process != nil {
		_ = m.master.Process.Kill() // the process may have ended
		_ = m.master.Wait()
		m.master = nil
	}
}

// KillClient ends the client as a crash would.
func (m *Mooncake) KillClient() {
	if m.client != nil {
		_ = m.client.Process.Kill() // the process may have ended
		_ = m.client.Wait()
		m.client = nil
	}
}

// ClientMemory is how many bytes of objects a client has memory for.
const ClientMemory = 64 << 20

// StartClient starts a client that mounts memory for objects.
func (m *Mooncake) StartClient() {
	m.t.Helper()
	where := m.rpc
	if m.etcd != "" {
		where = "etcd://" + m.etcd
	}
	m.client = exec.Command(m.python, Script(m.t, "mooncake_client.py"), where, strconv.Itoa(ClientMemory))
	m.client.Env = m.env
	in, err := m.client.StdinPipe()
	if err != nil {
		m.t.Fatal(err)
	}
	out, err := m.client.StdoutPipe()
	if err != nil {
		m.t.Fatal(err)
	}
	m.in, m.out = in, bufio.NewReader(out)
	if err := m.client.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.answer()
}

func (m *Mooncake) answer() {
	m.t.Helper()
	guard := time.AfterFunc(patience, func() { _ = m.client.Process.Kill() })
	defer guard.Stop()
	for {
		line, err := m.out.ReadString('\n')
		if err != nil {
			m.t.Fatalf("no reply from mooncake_client.py: %v", err)
		}
		if line == "@ok\n" {
			return
		}
		if line[0] == '@' {
			m.t.Fatalf("mooncake_client.py: %s", line)
		}
	}
}

func (m *Mooncake) do(op string, keys []string, size int) {
	m.t.Helper()
	b, err := json.Marshal([]any{op, keys, size})
	if err == nil {
		_, err = m.in.Write(append(b, '\n'))
	}
	if err != nil {
		m.t.Fatalf("mooncake_client.py does not listen: %v", err)
	}
	m.answer()
}

// Put stores small objects.
func (m *Mooncake) Put(keys ...string) { m.t.Helper(); m.do("put", keys, 4) }

// PutLarge stores objects of a size in bytes.
func (m *Mooncake) PutLarge(size int, keys ...string) { m.t.Helper(); m.do("put", keys, size) }

// Remove removes objects.
func (m *Mooncake) Remove(keys ...string) { m.t.Helper(); m.do("remove", keys, 0) }

// CloseClient has the client leave in good order.
func (m *Mooncake) CloseClient() { m.t.Helper(); m.do("close", nil, 0) }
