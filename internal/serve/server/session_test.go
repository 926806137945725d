package server

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/datafolder"
)

// TestSessionIn checks that processes of a data folder recognise each other's sessions, and that a link in place of the
// name file is not followed.
func TestSessionIn(t *testing.T) {
	dir := t.TempDir()
	first, _, err := sessionIn(dir)
	if err != nil {
		t.Fatal(err)
	}
	second, dead, err := sessionIn(dir)
	if err != nil || !dead(first) || dead(second) || dead("another"+first) {
		t.Errorf("%v: dead: %s %t, %s %t", err, first, dead(first), second, dead(second))
	}
	name, victim := filepath.Join(dir, lifeFile), filepath.Join(t.TempDir(), "victim")
	text, err := os.ReadFile(name)
	if folder, _, _ := strings.Cut(first, "."); err != nil || string(text) != folder+"\n" {
		t.Errorf("the folder's name is %q, %v", text, err)
	}
	if err := errors.Join(os.Remove(name), os.Symlink(victim, name)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := sessionIn(dir); !errors.Is(err, datafolder.ErrUnsafe) {
		t.Errorf("with a link: %v", err)
	}
	if _, err := os.Lstat(victim); err == nil {
		t.Error("a file was made through the link")
	}
}
