package sharedstore

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/hicache"
)

func TestFolder(t *testing.T) {
	dir := t.TempDir()
	s := &hicache.SGLang{Backend: "file", PageSize: 4, TPSize: 2, PPSize: 2, ModelName: "org/m", Directory: dir}
	pages := s.PageHashes(nil, []uint32{1, 2, 3, 4, 5, 6, 7, 8}, hicache.Space{})
	keys := s.FileKeys(pages)
	if want := pages[0].String() + "_org-m_1_2_2_0"; keys.PerPage != 4 || keys.Keys[1] != want {
		t.Fatalf("%q, want %q", keys.Keys[1], want)
	}
	for _, key := range keys.Keys[:5] {
		if err := os.WriteFile(filepath.Join(dir, key+".bin"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	present, known, err := NewFolder(dir).Exists(soon(t), append(keys.Keys, "../x"))
	if !errors.Is(err, ErrKey) || present.Count() != 5 || known.Count() != 8 {
		t.Errorf("%d present, %d answered, %v", present.Count(), known.Count(), err)
	}
	if _, known, err := NewFolder(filepath.Join(dir, "none")).Exists(soon(t), keys.Keys); err != nil ||
		known.Count() != 8 {
		t.Errorf("a missing folder: %d answered, %v", known.Count(), err)
	}
	over, cancel := context.WithCancel(context.Background())
	cancel()
	if _, known, err := NewFolder(dir).Exists(over, keys.Keys); !errors.Is(err, context.Canceled) || known.Count() > 0 {
		t.Errorf("too late: %d answered, %v", known.Count(), err)
	}
}
