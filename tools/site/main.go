// Command site renders the documentation as static HTML:
//
//	go run ./tools/site [--out bin/site]
//
// The pages are README.md, the pages of docs, and all pages that these link to. Other linked files are copied. Every
// page has the navigation of docs/README.md and a search without a server: search-index.js has the text of each section
// as JSON. The site needs no network, also if a browser opens the files from a disk.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	out := flag.String("out", "bin/site", "folder for the site; earlier content is removed")
	flag.Parse()
	if err := run(*out); err != nil {
		fmt.Fprintln(os.Stderr, "site:", err)
		os.Exit(1)
	}
}

func run(out string) error {
	files, err := build(os.DirFS("."))
	if err != nil {
		return err
	}
	if err := os.RemoveAll(out); err != nil {
		return err
	}
	for name, data := range files {
		path := filepath.Join(out, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			return err
		}
	}
	fmt.Println(filepath.Join(out, "index.html"))
	return nil
}
