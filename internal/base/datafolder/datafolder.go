package datafolder

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// ErrUnsafe means that other users could divert writes. Errors of Make and Open wrap ErrUnsafe with the reason.
var ErrUnsafe = errors.New("refused")

// owner has the owner and the links of a file or folder.
type owner struct {
	user  uint32
	links uint64 // number of names of a file
	mount bool   // the folder is a mount point
}

// Make creates a missing folder and checks the folder. Make also checks the given subfolders with all content. A
// subfolder may be missing.
func Make(dir string, trees ...string) error {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return fmt.Errorf("data folder: %w", err)
	}
	shared, err := check(dir)
	if err != nil {
		return err
	}
	for _, name := range trees {
		if err := checkTree(filepath.Join(dir, name), shared); err != nil {
			return err
		}
	}
	return nil
}

// check returns an error for an unsafe data folder. shared reports that all users may create files there.
func check(dir string) (shared bool, err error) {
	info, err := os.Lstat(dir)
	if err != nil {
		return false, fmt.Errorf("data folder: %w", err)
	}
	own, err := ownerOf(dir, info)
	if err != nil {
		return false, fmt.Errorf("data folder: %w", err)
	}
	if err := judgeFolder(info.Mode(), own, user()); err != nil {
		return false, fmt.Errorf("data folder %s: %w: %w", dir, ErrUnsafe, err)
	}
	return info.Mode()&0o002 != 0, nil
}

// judgeFolder returns an error if a user may not use a folder for data.
func judgeFolder(mode fs.FileMode, own owner, user uint32) error {
	switch {
	case mode&fs.ModeSymlink != 0:
		return errors.New("a symbolic link is not permitted; use the path of the target")
	case !mode.IsDir():
		return errors.New("not a folder")
	case own.user != user && own.user != 0:
		return fmt.Errorf("the owner is user %d and this process is user %d; use a folder of your own, "+
			"run as that user, or change the owner (chown -R)", own.user, user)
	case mode&0o002 != 0 && mode&fs.ModeSticky == 0 && !(own.mount && own.user == 0):
		return errors.New("all users may write the folder and replace files; use a folder of your own, or " +
			"remove the permission (chmod o-w)")
	}
	return nil
}

// judgeEntry returns an error if a user may not write a file or folder in a data folder. shared reports that all users
// may create files there.
func judgeEntry(mode fs.FileMode, own owner, user uint32, shared bool) error {
	switch {
	case mode&fs.ModeSymlink != 0:
		return errors.New("a symbolic link is not permitted; find the creator, and remove the link")
	case !mode.IsDir() && !mode.IsRegular():
		return errors.New("neither a file nor a folder; find the creator, and remove the entry")
	case !shared:
		return nil
	case own.user != user && own.user != 0:
		return fmt.Errorf("the owner is user %d and this process is user %d; use a data folder of your own", own.user,
			user)
	case mode.IsRegular() && own.links > 1:
		return errors.New("the file has several names; use a data folder of your own")
	}
	return nil
}

func checkEntry(path string, info fs.FileInfo, shared bool) error {
	own, err := ownerOf(path, info)
	if err == nil {
		err = judgeEntry(info.Mode(), own, user(), shared)
	}
	if err != nil {
		return fmt.Errorf("%s in the data folder: %w: %w", path, ErrUnsafe, err)
	}
	return nil
}

// checkTree checks a folder with all its content. A missing folder is valid.
func checkTree(dir string, shared bool) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		} else if err != nil {
			return fmt.Errorf("data folder: %w", err)
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		} else if err != nil {
			return fmt.Errorf("data folder: %w", err)
		}
		return checkEntry(path, info, shared)
	})
}

// Open opens a file in a data folder for reading and writing. Make must have checked the folder. Open creates a missing
// file for this user only.
func Open(dir, name string) (*os.File, error) {
	shared, err := check(dir)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, name)
	f, err := openFile(path)
	if err != nil {
		if info, failed := os.Lstat(path); failed == nil {
			err = errors.Join(checkEntry(path, info, shared), err)
		}
		return nil, fmt.Errorf("data folder: %w", err)
	}
	info, err := f.Stat()
	if err == nil {
		err = checkEntry(path, info, shared)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
