package integration

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// inside marks the run of the test binary in a separate user namespace, with the permission to mount.
const inside = "KVATLAS_TEST_MAY_MOUNT"

// smallDisk mounts a disk of the given size, in memory, on a folder of the test. A mount needs root or a user
// namespace, in which smallDisk runs the test again. ok is false in the outer run, which then has nothing to do.
func smallDisk(t *testing.T, size string) (dir string, ok bool) {
	t.Helper()
	dir = t.TempDir()
	err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size)
	switch {
	case err == nil:
		t.Cleanup(func() {
			if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
		return dir, true
	case !errors.Is(err, syscall.EPERM) || os.Getenv(inside) != "":
		t.Fatalf("a small disk cannot be mounted: %v", err)
	}
	again := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	again.Env = append(os.Environ(), inside+"=1")
	again.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	said, err := again.CombinedOutput()
	if err != nil {
		t.Fatalf(
			"the test mounts a small disk: run as root, permit user namespaces, or use -short: %v\n%s", err, said)
	}
	t.Logf("run in a user namespace:\n%s", said)
	return "", false
}

// fillDisk fills the disk with a file, and returns a function that removes the file.
func fillDisk(t *testing.T, dir string) (makeRoom func()) {
	t.Helper()
	path := filepath.Join(dir, "somebody-elses-file")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := 1 << 20; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDiskFull fills the disk under a running deployment, and frees space again. Meanwhile events wait, status and
// metrics have the reason, and queries are answered from the index. Afterwards the deployment continues without a
// restart, and no acknowledged event is lost. The shim repeats no event, and the index has the engine's blocks, also in
// a process that starts from the disk.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("left out under -short: mounts a small disk, which needs root or user namespaces")
	}
	var subtests testkit.Group
	defer subtests.Wait()
	for _, c := range []struct {
		name               string
		embedded, restarts bool
	}{{"server in the indexer", true, false}, {"server started on the full disk", true, true}, {"server of its own",
		false, false}} {
		subtests.Run(t, c.name, func(t *testing.T) {
			if disk, ok := smallDisk(t, "24m"); ok {
				diskFull(t, disk, c.embedded, c.restarts)
			}
		})
	}
}

func diskFull(t *testing.T, disk string, embedded, restarts bool) {
	e := followEngine(t, enginesim.Config{})
	var x *harness.Indexer
	var server *harness.Process
	data, conf, addr := filepath.Join(disk, "data"), filepath.Join(t.TempDir(), "nats.conf"), loopback.Reserve(t)
	startServer := func() {
		server = harness.Start(t, "nats-server", "-c", conf)
		server.WaitFor("Server is ready")
	}
	begin := func() {
		if embedded {
			x = harness.StartIndexer(t, data, addr, "--snapshot-interval", "2s")
			return
		}
		x = &harness.Indexer{NATS: addr}
		x.Process = harness.Start(t, "indexer", "serve", "--nats", "nats://"+addr, "--http-listen", "127.0.0.1:0",
			"--partitions", "4", "--snapshot-interval", "2s", "--log-bytes", "1048576")
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
	}
	if !embedded {
		text := fmt.Sprintf("listen: %q\njetstream { store_dir: %q, sync_interval: always }\n", addr, data)
		if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		startServer()
	}
	begin()
	shim := harness.StartSimShim(t, e.Engine, x.NATS, "w1", "--log-repeat", "1s")
	e.serve(t, 60)
	e.await(t, x.HTTP)
	if r := harness.Run(t, "indexer", "snapshot", "now", "--nats", x.NATS); r.Code != 0 {
		t.Fatalf("snapshot now: %+v", r)
	}
	before := harness.IndexerJSON[api.WorkerList](t, x.NATS, "workers").Workers
	e.serve(t, 20)
	e.await(t, x.HTTP)

	makeRoom := fillDisk(t, disk)
	e.serve(t, 100)
	shim.WaitFor(`the log does not accept events; the events wait`)
	x.WaitFor(`the log of partition \d takes nothing more.*no space left on device`)
	var s api.Status
	status := func() string {
		if err := harness.HTTPDo(x.HTTP, "GET", "/v1/status", nil, &s); err != nil {
			t.Fatal(err)
		}
		return strings.Join(s.Problems, "\n")
	}
	harness.Eventually(t, "status and metrics report the full disk", func() (bool, string) {
		e.serve(t, 1) // uses up any space
		var metrics string
		if err := harness.HTTPDo(x.HTTP, "GET", "/metrics", nil, &metrics); err != nil {
			t.Fatal(err)
		}
		said := status()
		return strings.Contains(said, "no space left on device") &&
			(!embedded || strings.Contains(said, "the storage of the NATS server is 100 % full")) && s.Ready &&
			strings.Contains(metrics, `kvatlas_log_writable{partition="1"} 0`) &&
			!strings.Contains(metrics, "kvatlas_problems 0"), said + "\n" + metrics
	})
	if err := harness.HTTPDo(x.HTTP, "POST", "/v1/find", api.Query{Model: "m", Hashes: api.Hashes{1}},
		&api.Answer{}); err != nil {
		t.Errorf("queries are not answered: %v", err)
	}
	var answer api.Answer
	harness.Eventually(t, "answers, /readyz and the shim report the refusing log", func() (bool, string) {
		e.serve(t, 1)
		var ready string
		answer = api.Answer{}
		if err := errors.Join(harness.HTTPDo(x.HTTP, "POST", "/v1/find", api.Query{Model: "m", Hashes: api.Hashes{1}},
			&answer),
			harness.HTTPDo(x.HTTP, "GET", "/readyz", nil, &ready)); err != nil {
			t.Fatal(err)
		}
		said := status()
		return len(answer.Partitions) == 1 && answer.Partitions[0].StaleMS > 0 &&
				strings.Contains(ready, "the state is") &&
				strings.Contains(said, "1 of 1 shims wait, w1/0 since ") &&
				strings.Contains(said, "have room on their disks") &&
				// every problem is listed once
				!strings.Contains(said, "from the shims of") && !strings.Contains(said, "server: not available"),
			fmt.Sprintf("%+v\n%s\n%s", answer, ready, said)
	})
	shim.WaitFor(`the log does not accept events; the events wait.*what_to_do=".*have room on their disks`)
	// A server on a full disk stays connected.
	for _, p := range []*harness.Process{x.Process, shim} {
		for line := range strings.Lines(p.Said()) {
			// a paused process loses its connection on any disk
			if strings.Contains(line, "NATS connection lost") && !strings.Contains(line, "stale connection") {
				t.Errorf("the server went away: %s", line)
			}
		}
	}
	if restarts { // a new server process is in the same state
		x.Kill()
		begin()
		e.serve(t, 20)
		x.WaitFor(`takes nothing more`)
	}

	makeRoom()
	e.serve(t, 20)
	switch {
	case restarts: // a server without space since its start has never tried to write
		x.WaitFor(
			`the NATS server in this process has recovered|the disk has more room; the NATS server may take more of it`)
	case embedded:
		x.WaitFor(`the NATS server in this process has recovered`)
	default:
		server.Stop()
		startServer()
	}
	e.await(t, x.HTTP)
	shim.WaitFor(`the log accepts events again`)
	harness.Eventually(t, "the status is in order", func() (bool, string) {
		said := status()
		return said == "" && s.Snapshots.Written > 0, said
	})
	if s.Events["gaps"] != 0 || s.Resyncs.Asked != 0 {
		t.Errorf("events were lost: %v, %+v", s.Events, s.Resyncs)
	}
	after := harness.IndexerJSON[api.WorkerList](t, x.NATS, "workers").Workers
	if len(after) != 1 || after[0].Incarnation != before[0].Incarnation || after[0].LastEvent <= before[0].LastEvent {
		t.Errorf("the worker was %+v and is %+v", before, after)
	}
	if said := shim.Said(); strings.Count(said, "a new incarnation") != 1 ||
		strings.Contains(said, "could not be replayed") {
		t.Errorf("the shim began a new incarnation:\n%s", said)
	}
	// a snapshot may be replaced during the verification
	harness.Eventually(t, "all snapshots are valid", func() (bool, string) {
		r := harness.Run(t, "indexer", "snapshot", "verify", "--nats", x.NATS)
		return r.Code == 0, fmt.Sprintf("%+v", r)
	})
	x.Kill()
	begin()
	if err := e.judge(x.HTTP, "w1", false); err != nil {
		t.Errorf("from the disk: %v", err)
	}
}
