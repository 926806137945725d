package datafolder

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// ErrUnsafe is wrapped by errors of Make and Open that say why other users could divert what is written.
var ErrUnsafe = errors.New("refused")

// owner is who may write a file or folder.
type owner struct {
	user  uint32
	links uint64 // names of a file
	mount bool   // a folder is a mount point
}

// Make makes a folder unless it is there, and checks it and the folders in it with these names, with all that they
// contain. Those need not be there.
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

// check refuses an unsafe data folder. shared says that all users may make files in it.
func check(dir string) (shared bool, err error) {
	info, err := os.Lstat(dir)
	if err != nil {
		return false, fmt.Errorf("data folder: %w", err)
	}
	who, err := ownerOf(dir, info)
	if err != nil {
		return false, fmt.Errorf("data folder: %w", err)
	}
	if err := judgeFolder(info.Mode(), who, user()); err != nil {
		return false, fmt.Errorf("data folder %s: %w: %w", dir, ErrUnsafe, err)
	}
	return info.Mode()&0o002 != 0, nil
}

// judgeFolder says why a user may not use a folder for data.
func judgeFolder(mode fs.FileMode, who owner, user uint32) error {
	switch {
	case mode&fs.ModeSymlink != 0:
		return errors.New("it is a symbolic link; give the path of the folder that it points to")
	case !mode.IsDir():
		return errors.New("it is not a folder")
	case who.user != user && who.user != 0:
		return fmt.Errorf("it belongs to user %d and this process is user %d; use a folder of your own, "+
			"run as that user, or change its owner (chown -R)", who.user, user)
	case mode&0o002 != 0 && mode&fs.ModeSticky == 0 && !(who.mount && who.user == 0):
		return errors.New("all users may write it, so that they can replace its files; use a folder of your own, or " +
			"remove that permission (chmod o-w)")
	}
	return nil
}

// judgeEntry says why a user may not write a file or folder in a data folder. shared says that all users may make files
// there.
func judgeEntry(mode fs.FileMode, who owner, user uint32, shared bool) error {
	switch {
	case mode&fs.ModeSymlink != 0:
		return errors.New("it is a symbolic link; see who made it, and remove it")
	case !mode.IsDir() && !mode.IsRegular():
		return errors.New("it is neither a file nor a folder; see who made it, and remove it")
	case !shared:
		return nil
	case who.user != user && who.user != 0:
		return fmt.Errorf("it belongs to user %d and this process is user %d; use a data folder of your own", who.user,
			user)
	case mode.IsRegular() && who.links > 1:
		return errors.New("the file has several names; use a data folder of your own")
	}
	return nil
}

func checkEntry(path string, info fs.FileInfo, shared bool) error {
	who, err := ownerOf(path, info)
	if err == nil {
		err = judgeEntry(info.Mode(), who, user(), shared)
	}
	if err != nil {
		return fmt.Errorf("%s in the data folder: %w: %w", path, ErrUnsafe, err)
	}
	return nil
}

// checkTree checks a folder, unless it is not there, and all that it contains.
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

// Open opens a file in a data folder that Make has checked, to be read and written, and makes it, for this user alone,
// if it is not there.
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
