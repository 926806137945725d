//go:build unix

package datafolder

import (
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

func user() uint32 { return uint32(os.Geteuid()) }

func ownerOf(path string, info fs.FileInfo) (owner, error) {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return owner{}, &fs.PathError{Op: "stat", Path: path, Err: syscall.ENOSYS}
	}
	who := owner{user: stat.Uid, links: uint64(stat.Nlink)}
	if !info.IsDir() {
		return who, nil
	}
	above, err := os.Stat(filepath.Join(path, ".."))
	if err != nil {
		return owner{}, err
	}
	parent, ok := above.Sys().(*syscall.Stat_t)
	who.mount = ok && (parent.Dev != stat.Dev || parent.Ino == stat.Ino)
	return who, nil
}

// openFile opens a file without following a link, and without waiting for the other end of a pipe.
func openFile(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
}
