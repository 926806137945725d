package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// WriteWorkerStore writes a file for worker-shim's --l3-config.
func WriteWorkerStore(t testing.TB, c hicache.Config) string {
	t.Helper()
	data, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "l3.json")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// PutPages puts pages [from, to) of a prompt into the folder of SGLang's file backend.
func PutPages(t testing.TB, c *hicache.SGLang, prompt []uint32, from, to int) {
	t.Helper()
	keys := c.FileKeys(c.PageHashes(nil, prompt, hicache.Space{}))
	for _, key := range keys.Keys[from*keys.PerPage : to*keys.PerPage] {
		if err := os.WriteFile(filepath.Join(c.Directory, key+".bin"), []byte("page"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// WriteStores writes a file for --l3-config.
func WriteStores(t testing.TB, models map[string]hicache.Config) string {
	t.Helper()
	data, err := json.Marshal(models)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "l3.json")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func CommaList(tokens []uint32) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(tokens), " ", ","), "[]")
}
