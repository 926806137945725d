package sharedstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// Folder is a [hicache.Store] in a folder with a file for each object, such as SGLang's "file" storage backend. The
// folder must be mounted on this host. A key is the name of the file without ".bin". Folder is safe for concurrent use.
//
// SGLang names the file of a page {hash}_{model}[_{tp rank}_{tp size}][_{pp size}_{pp rank}].bin. Only attention other
// than MLA has the first pair of ranks; only several pipeline ranks have the second pair. Slashes in the model's name
// become dashes (HiCacheFile in python/sglang/srt/mem_cache/hicache_storage.py of sgl-project/sglang).
// [hicache.SGLang.FileKeys] returns the keys.
type Folder struct{ root string }

// NewFolder returns the store of a folder. The folder may be created later.
func NewFolder(path string) *Folder { return &Folder{filepath.Clean(path)} }

func (f *Folder) Exists(ctx context.Context, keys []string) (present, known hicache.Bitmap, err error) {
	present, known = hicache.NewBitmap(len(keys)), hicache.NewBitmap(len(keys))
	for i, key := range keys {
		if i%64 == 0 && ctx.Err() != nil {
			return present, known, errors.Join(err, ctx.Err())
		}
		if key == "" || strings.ContainsAny(key, "/\\\x00") {
			if err == nil {
				err = fmt.Errorf("folder: %w: %.80q is not a file name", ErrKey, key)
			}
			continue
		}
		info, failed := os.Stat(filepath.Join(f.root, key+".bin"))
		switch {
		case failed == nil:
			known.Set(i)
			if info.Mode().IsRegular() {
				present.Set(i)
			}
		case errors.Is(failed, fs.ErrNotExist):
			known.Set(i)
		case err == nil:
			err = fmt.Errorf("folder: %w", failed)
		}
	}
	return present, known, err
}
