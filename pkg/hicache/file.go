package hicache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Folder is the folder of SGLang's "file" storage backend, or of anything else that keeps one file for each object,
// mounted where we run. It implements [Store]: a key is the file's name without ".bin". Any number of goroutines may
// use it.
//
// SGLang names a page's file {hash}_{model}[_{tp rank}_{tp size}][_{pp size}_{pp rank}].bin, the ranks only where
// attention is not MLA, the second pair only with more than one pipeline rank; slashes in the model's name become
// dashes (HiCacheFile in python/sglang/srt/mem_cache/hicache_storage.py of sgl-project/sglang). [SGLang.FileKeys] makes
// these keys.
type Folder struct{ root string }

// NewFolder returns the store of a folder. It need not be there yet.
func NewFolder(path string) *Folder { return &Folder{filepath.Clean(path)} }

func (f *Folder) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	present, known = NewBitmap(len(keys)), NewBitmap(len(keys))
	for i, key := range keys {
		if i%64 == 0 && ctx.Err() != nil {
			return present, known, errors.Join(err, ctx.Err())
		}
		if key == "" || strings.ContainsAny(key, "/\\\x00") {
			if err == nil {
				err = fmt.Errorf("folder: %w: %.80q is no file's name", ErrKey, key)
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

// FileKeys names the files of pages in the file backend's folder. s must have passed Check.
func (s *SGLang) FileKeys(pages []PageHash) PageKeys {
	model := strings.ReplaceAll(s.ModelName, "/", "-")
	var ends []string
	for pp := range s.PPSize {
		pipeline := ""
		if s.PPSize > 1 {
			pipeline = fmt.Sprintf("_%d_%d", s.PPSize, pp)
		}
		if s.IsMLA {
			ends = append(ends, "_"+model+pipeline)
			continue
		}
		for tp := range s.TPSize {
			ends = append(ends, fmt.Sprintf("_%s_%d_%d%s", model, tp, s.TPSize, pipeline))
		}
	}
	return pageKeys("", pages, ends)
}
