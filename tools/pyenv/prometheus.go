package pyenv

import (
	"io"
	"path/filepath"
	"testing"
)

// FetchPrometheus unpacks Debian's Prometheus without an installation, unless present.
func FetchPrometheus(progress io.Writer) error {
	cache, err := cacheDir()
	if err != nil {
		return err
	}
	return unpack(progress, prometheusFolder(cache), []string{"prometheus"})
}

func prometheusFolder(cache string) string { return filepath.Join(cache, "prometheus") }

// Prometheus returns the paths of Prometheus and of promtool.
func Prometheus(t testing.TB) (server, tool string) {
	t.Helper()
	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(prometheusFolder(cache), "usr/bin")
	if !exists(dir) {
		t.Fatalf("%s is missing; run: %s", dir, fetchCommand)
	}
	return filepath.Join(dir, "prometheus"), filepath.Join(dir, "promtool")
}
