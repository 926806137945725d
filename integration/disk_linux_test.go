package integration

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// inside says to the test binary that it runs in a user namespace of its own, where it may mount.
const inside = "KVATLAS_TEST_MAY_MOUNT"

// smallDisk is a disk of so many bytes, in memory, on a folder of the test's. Mounting wants root or, in the same test run again by
// itself, a user namespace; smallDisk returns false in the run outside, which has nothing left to do then.
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
		t.Fatalf("this test needs a small disk; it must run as root, or where user namespaces are permitted, or be left out by -short: %v\n%s", err, said)
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
