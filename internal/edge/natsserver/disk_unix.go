//go:build unix

package natsserver

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// tryLock locks an open file. The system releases the lock when the process ends. tryLock returns false if another
// process holds the lock.
func tryLock(f *os.File) (bool, error) {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

// unlock releases the lock at once. After a close alone, a child process between fork and exec would still hold the
// lock.
func unlock(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_UN) }

// freeBytes returns the number of bytes that this process may still write to the file system of a folder.
func freeBytes(dir string) (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return 0, err
	}
	return int64(fs.Bavail) * int64(fs.Bsize), nil
}
