package datafolder

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// TestLinksAreNotFollowed plants a link, a pipe or a folder at every written path. The target of the
// link stays unchanged, or missing.
func TestLinksAreNotFollowed(t *testing.T) {
	for name, plant := range map[string]func(data, victim string) error{
		"a link to a file":  func(data, victim string) error { return os.Symlink(victim, filepath.Join(data, "f")) },
		"a link to nothing": func(data, victim string) error { return os.Symlink(victim+"2", filepath.Join(data, "f")) },
		"a link within":     func(data, _ string) error { return os.Symlink("g", filepath.Join(data, "f")) },
		"a pipe":            func(data, _ string) error { return syscall.Mkfifo(filepath.Join(data, "f"), 0o600) },
		"a folder":          func(data, _ string) error { return os.Mkdir(filepath.Join(data, "f"), 0o700) },
		"a link for the folder": func(data, _ string) error {
			return errors.Join(os.Rename(data, data+"2"), os.Symlink(data+"2", data))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			data, victim := filepath.Join(dir, "data"), filepath.Join(dir, "victim")
			must(t, Make(data), os.WriteFile(victim, []byte("precious"), 0o600), plant(data, victim))
			if f, err := Open(data, "f"); !errors.Is(err, ErrUnsafe) && !errors.Is(err, syscall.EISDIR) {
				f.Close()
				t.Errorf("opened: %v", err)
			}
			if text, err := os.ReadFile(victim); err != nil || string(text) != "precious" {
				t.Errorf("the target is %q, %v", text, err)
			}
			if _, err := os.Stat(victim + "2"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a file was created through the link: %v", err)
			}
		})
	}
}

// TestTree: Make rejects links at any depth of a given subfolder, and no others.
func TestTree(t *testing.T) {
	for path, unsafe := range map[string]bool{"tree": true, "tree/a": true, "tree/a/b/c": true, "other": false,
		"other/a": false} {
		data := filepath.Join(t.TempDir(), "data")
		link := filepath.Join(data, path)
		must(t, Make(data, "tree"), os.MkdirAll(filepath.Dir(link), 0o700), os.Symlink("/nonexistent", link))
		if err := Make(data, "tree"); errors.Is(err, ErrUnsafe) != unsafe || err != nil != unsafe {
			t.Errorf("a link at %s: %v", path, err)
		}
	}
}

func TestOpen(t *testing.T) {
	data := filepath.Join(t.TempDir(), "a", "data")
	must(t, Make(data, "tree"))
	f, err := Open(data, "f")
	must(t, err)
	_, err = f.WriteString("text")
	must(t, err, f.Close())
	if f, err = Open(data, "f"); err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	text := make([]byte, 10)
	if n, _ := f.Read(text); string(text[:n]) != "text" {
		t.Errorf("read %q", text[:n])
	}
	for path, want := range map[string]fs.FileMode{data: 0o750, filepath.Join(data, "f"): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm()&^want != 0 {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
}

// TestShared: in a folder with the sticky bit that all users may write, a file with several names is rejected. Without
// the sticky bit, the folder is rejected.
func TestShared(t *testing.T) {
	dir := t.TempDir()
	data, victim := filepath.Join(dir, "data"), filepath.Join(dir, "victim")
	must(t, os.Mkdir(data, 0o700), os.Chmod(data, 0o777|fs.ModeSticky), os.WriteFile(victim, nil, 0o600),
		os.Link(victim, filepath.Join(data, "f")), Make(data, "tree"))
	if _, err := Open(data, "f"); !errors.Is(err, ErrUnsafe) {
		t.Errorf("a file with two names: %v", err)
	}
	must(t, os.Chmod(data, 0o750))
	if f, err := Open(data, "f"); err != nil {
		t.Errorf("a file with two names in a folder of our own: %v", err)
	} else {
		f.Close()
	}
	must(t, os.Chmod(data, 0o777))
	if err := Make(data, "tree"); !errors.Is(err, ErrUnsafe) {
		t.Errorf("a folder that all users may write: %v", err)
	}
}

// TestOwners checks the folders of packages and clusters, and prepared folders of other users.
func TestOwners(t *testing.T) {
	const me, other = 65532, 1000
	for _, c := range []struct {
		name string
		mode fs.FileMode
		own  owner
		user uint32
		safe bool
	}{
		{"own", 0o750, owner{user: me}, me, true},
		{"own, umask 002", 0o775, owner{user: me}, me, true},
		{"root's for root", 0o755, owner{}, 0, true},
		{"root's that fsGroup may write", 0o775 | fs.ModeSetgid, owner{mount: true}, me, true},
		{"an emptyDir", 0o777, owner{mount: true}, me, true},
		{"an emptyDir with fsGroup", 0o777 | fs.ModeSetgid, owner{mount: true}, me, true},
		{"/tmp", 0o777 | fs.ModeSticky, owner{}, me, true},
		{"root's that all may write", 0o777, owner{}, me, false},
		{"own that all may write", 0o777, owner{user: me, mount: true}, me, false},
		{"another user's", 0o755, owner{user: other}, me, false},
		{"another user's for root", 0o755, owner{user: other}, 0, false},
		{"another user's with our group", 0o770, owner{user: other}, me, false},
		{"another user's mount", 0o777, owner{user: other, mount: true}, me, false},
	} {
		if err := judgeFolder(c.mode|fs.ModeDir, c.own, c.user); (err == nil) != c.safe {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	for _, c := range []struct {
		name   string
		own    owner
		shared bool
		safe   bool
	}{
		{"own", owner{user: me, links: 1}, true, true},
		{"root's", owner{links: 1}, true, true},
		{"another user's where all may write", owner{user: other, links: 1}, true, false},
		{"of an earlier user of the volume", owner{user: other, links: 1}, false, true},
	} {
		if err := judgeEntry(0o640, c.own, me, c.shared); (err == nil) != c.safe {
			t.Errorf("a file: %s: %v", c.name, err)
		}
	}
}
