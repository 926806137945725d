//go:build judges

package engines

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/ingest/sharedstore"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// sglangFolder is a folder of SGLang's own file backend, with a backend object for every rank.
type sglangFolder struct {
	*storeCode
	config hicache.SGLang
	store  *sharedstore.Folder
}

func startSGLangFolder(t *testing.T, wheel string, config hicache.SGLang, room int) *sglangFolder {
	config.Backend, config.Directory, config.PageSize = "file", t.TempDir(), 4
	if err := (&hicache.Config{SGLang: &config}).Check(); err != nil {
		t.Fatal(err)
	}
	options := map[string]any{"folder": config.Directory, "model": config.ModelName, "tp": config.TPSize,
		"pp": config.PPSize, "mla": config.IsMLA, "room": nil}
	if room > 0 {
		options["room"] = room
	}
	return &sglangFolder{startStoreScript(t, "hicache_file.py", wheel, options), config,
		sharedstore.NewFolder(config.Directory)}
}

func names(pages []hicache.PageHash) []string {
	out := make([]string, len(pages))
	for i := range pages {
		out[i] = pages[i].String()
	}
	return out
}

// set has a rank's backend write pages.
func (f *sglangFolder) set(rank int, pages []hicache.PageHash) {
	f.t.Helper()
	var ok bool
	if f.ask([]any{"set", rank, names(pages)}, &ok); !ok {
		f.t.Fatalf("SGLang's backend did not write")
	}
}

// leading is how many leading pages all ranks of the worker have, by SGLang's own search: the ranks agree on the least
// of theirs.
func (f *sglangFolder) leading(pages []hicache.PageHash) int {
	f.t.Helper()
	least := len(pages)
	for rank := range f.config.TPSize * f.config.PPSize {
		var n int
		f.ask([]any{"exists", rank, names(pages)}, &n)
		least = min(least, n)
	}
	return least
}

// pages returns the pages in kvatlas's view of the store: a page needs all of its files.
func (f *sglangFolder) pages(pages []hicache.PageHash) []bool {
	f.t.Helper()
	keys := f.config.FileKeys(pages)
	present, known, err := f.store.Exists(context.Background(), keys.Keys)
	if err != nil || known.Count() != len(keys.Keys) {
		f.t.Fatalf("%v, %d of %d known", err, known.Count(), len(keys.Keys))
	}
	out := slices.Repeat([]bool{true}, len(pages))
	for i := range keys.Keys {
		out[i/keys.PerPage] = out[i/keys.PerPage] && present.Get(i)
	}
	return out
}

// TestFolderThatSGLangWrote writes a folder with SGLang's own file backend, rank by rank, with some pages from only a
// part of the ranks. kvatlas must find the written pages, and the prefix must be equal to the prefix in SGLang's
// backend.
func TestFolderThatSGLangWrote(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"0.5.12", "0.5.23"} {
		for _, layout := range []hicache.SGLang{
			{TPSize: 1, PPSize: 1, ModelName: "org/model-7B"},
			{TPSize: 2, PPSize: 2, ModelName: "org/a/model_x.1"},
			{TPSize: 2, PPSize: 2, IsMLA: true, ModelName: "org/model"},
			{TPSize: 4, PPSize: 1, ModelName: "m"},
		} {
			name := fmt.Sprintf("%s/tp%d-pp%d-mla=%v", version, layout.TPSize, layout.PPSize, layout.IsMLA)
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				f := startSGLangFolder(t, "sglang=="+version, layout, 0)
				rng := rand.New(rand.NewPCG(6, uint64(layout.TPSize)))
				for prompt := range 6 {
					pages := f.config.PageHashes(nil, harness.Tokens(10_000*prompt, 4*24), hicache.Space{})
					missing := make([]bool, len(pages)) // from some rank
					for rank := range layout.TPSize * layout.PPSize {
						if layout.IsMLA && rank%layout.TPSize > 0 { // rank 0 writes the pages, because all ranks have the same bytes
							continue
						}
						var writes []hicache.PageHash
						for i := range pages {
							if prompt > 0 && rng.IntN(30) == 0 {
								missing[i] = true
							} else {
								writes = append(writes, pages[i])
							}
						}
						f.set(rank, writes)
					}
					run, broken := 0, false
					for i, there := range f.pages(pages) {
						if there == missing[i] {
							t.Fatalf("prompt %d, page %d: kvatlas has %v, not written by all: %v", prompt, i, there,
								missing[i])
						}
						if broken = broken || !there; !broken {
							run++
						}
					}
					if theirs := f.leading(pages); theirs != run {
						t.Fatalf("prompt %d: SGLang finds %d leading pages, we %d", prompt, theirs, run)
					}
				}
				for i, there := range f.pages(f.config.PageHashes(nil, harness.Tokens(77, 40), hicache.Space{})) {
					if there {
						t.Fatalf("page %d of an unwritten prompt is present", i)
					}
				}
			})
		}
	}
}

// TestFolderThatSGLangEvicted checks that kvatlas does not find pages evicted by SGLang's backend (0.5.23 has a size
// limit), and finds all kept pages.
func TestFolderThatSGLangEvicted(t *testing.T) {
	t.Parallel()
	f := startSGLangFolder(t, "sglang==0.5.23", hicache.SGLang{TPSize: 1, PPSize: 1, ModelName: "m"}, 1000)
	pages := f.config.PageHashes(nil, harness.Tokens(5, 4*30), hicache.Space{})
	f.set(0, pages)
	kept := 0
	for i, there := range f.pages(pages) {
		if theirs := f.leading(pages[i:i+1]) == 1; theirs != there {
			t.Fatalf("page %d: SGLang has %v, kvatlas %v", i, theirs, there)
		}
		if there {
			kept++
		}
	}
	if kept == 0 || kept > 10 {
		t.Fatalf("%d of 30 pages of 100 bytes were kept in 1000 bytes", kept)
	}
}
