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
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// inside says to the test binary that it runs in a user namespace of its own, where it may mount.
const inside = "KVATLAS_TEST_MAY_MOUNT"

// smallDisk is a disk of so many bytes, in memory, on a folder of the test's. Mounting wants root or, in the same test
// run again by itself, a user namespace; smallDisk returns false in the run outside, which has nothing left to do then.
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
			"this test needs a small disk; it must run as root, or where user namespaces are permitted, or be left out by -short: %v\n%s", err, said)
	}
	t.Logf("run in a user namespace:\n%s", said)
	return "", false
}

// fillDisk leaves no byte free, with a file that others own, and returns what removes it.
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

// TestDiskFull fills the disk under a running deployment, and makes room again. Meanwhile events wait, status and
// metrics say why, and queries are answered from what is known. Afterwards all goes on with no process of ours started
// again, and nothing is lost that was acknowledged: the shim says nothing twice, and the index is what the engine says,
// also in a process that begins from the disk.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("left out under -short: mounts a small disk, which needs root or user namespaces")
	}
	for _, c := range []struct {
		name               string
		embedded, restarts bool
	}{{"server in the indexer", true, false}, {"server started on the full disk", true, true}, {"server of its own",
		false, false}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
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
	shim.WaitFor(`the log does not take events; they wait`)
	x.WaitFor(`the log of partition \d takes nothing more.*no space left on device`)
	var s api.Status
	status := func() string {
		if err := harness.HTTPDo(x.HTTP, "GET", "/v1/status", nil, &s); err != nil {
			t.Fatal(err)
		}
		return strings.Join(s.Problems, "\n")
	}
	harness.Eventually(t, "status and metrics say that the disk is full", func() (bool, string) {
		e.serve(t, 1) // whatever makes room, it is taken
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
	harness.Eventually(t, "answers, /readyz and the shim say that the log takes nothing", func() (bool, string) {
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
				strings.Contains(ready, "what is known of it is") &&
				strings.Contains(said, "1 of 1 shims wait, w1/0 since ") &&
				strings.Contains(said, "have room on their disks") &&
				// each is said once
				!strings.Contains(said, "from the shims of") && !strings.Contains(said, "server: not available"),
			fmt.Sprintf("%+v\n%s\n%s", answer, ready, said)
	})
	shim.WaitFor(`the log does not take events; they wait.*what_to_do=".*have room on their disks`)
	// A server on a full disk is left alone: nobody was parted from it.
	for _, p := range []*harness.Process{x.Process, shim} {
		for line := range strings.Lines(p.Said()) {
			// who stands still is left, on any disk
			if strings.Contains(line, "NATS connection lost") && !strings.Contains(line, "stale connection") {
				t.Errorf("the server went away: %s", line)
			}
		}
	}
	if restarts { // whoever starts it now is no worse off
		x.Kill()
		begin()
		e.serve(t, 20)
		x.WaitFor(`takes nothing more`)
	}

	makeRoom()
	e.serve(t, 20)
	switch {
	case restarts: // one that took nothing from its start on never tried to write
		x.WaitFor(
			`the NATS server in this process has recovered|the disk has more room; the NATS server may take more of it`)
	case embedded:
		x.WaitFor(`the NATS server in this process has recovered`)
	default:
		server.Stop()
		startServer()
	}
	e.await(t, x.HTTP)
	shim.WaitFor(`the log takes events again`)
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
		t.Errorf("the shim began anew:\n%s", said)
	}
	// one may be replaced while it is read
	harness.Eventually(t, "all snapshots are what was written", func() (bool, string) {
		r := harness.Run(t, "indexer", "snapshot", "verify", "--nats", x.NATS)
		return r.Code == 0, fmt.Sprintf("%+v", r)
	})
	x.Kill()
	begin()
	if err := e.judge(x.HTTP, "w1", false); err != nil {
		t.Errorf("from the disk: %v", err)
	}
}
