package main

import (
	"bytes"
	"encoding/json"
	"html"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	reference = regexp.MustCompile(`(?:href|src)="([^"]*)"`)
	identity  = regexp.MustCompile(` id="([^"]*)"`)
)

func built(t *testing.T) map[string][]byte {
	t.Helper()
	files, err := build(os.DirFS("../.."))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// TestPages checks every page of the documentation: title, tables, and the entry in the navigation.
func TestPages(t *testing.T) {
	files := built(t)
	contents := string(files["docs/index.html"])
	for _, pattern := range []string{"docs/*.md", "docs/engines/*.md"} {
		pages, err := filepath.Glob("../../" + pattern)
		if err != nil || len(pages) == 0 {
			t.Fatal(pages, err)
		}
		for _, name := range pages {
			at := address(strings.TrimPrefix(filepath.ToSlash(name), "../../"))
			page := string(files[at])
			source, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			title, _, _ := strings.Cut(strings.TrimPrefix(string(source), "# "), "\n")
			if !strings.Contains(page, html.EscapeString(strings.ReplaceAll(title, "`", ""))) ||
				!strings.Contains(page, `<link rel="stylesheet" href="../`) {
				t.Errorf("%s has no page %s with the title %q", name, at, title)
			}
			if strings.Contains(string(source), "\n|---") && !strings.Contains(page, "<table>") {
				t.Errorf("%s has no table", at)
			}
			if at != "docs/index.html" && !strings.Contains(contents, `<a href="`+strings.TrimPrefix(at, "docs/")+`">`) {
				t.Errorf("the navigation has no %s", at)
			}
		}
	}
	for name, data := range files {
		if bytes.Contains(data, []byte("http-equiv")) || path.Ext(name) == ".md" {
			t.Errorf("%s does not belong in a site", name)
		}
	}
}

// TestLinks checks the file and the heading of every link. Scripts, styles and pictures use no network.
func TestLinks(t *testing.T) {
	files, checked := built(t), 0
	for name, data := range files {
		if path.Ext(name) != ".html" {
			continue
		}
		for _, m := range reference.FindAllSubmatch(data, -1) {
			link := html.UnescapeString(string(m[1]))
			if strings.Contains(link, "://") {
				if !strings.HasPrefix(string(m[0]), "href") {
					t.Errorf("%s needs %s from the network", name, link)
				}
				continue
			}
			to, anchor, _ := strings.Cut(link, "#")
			target := name
			if to != "" {
				target = path.Join(path.Dir(name), to)
			}
			checked++
			if files[target] == nil {
				t.Errorf("%s links to %s; the site has no such file", name, link)
			} else if anchor != "" && !slices.ContainsFunc(identity.FindAllSubmatch(files[target], -1),
				func(id [][]byte) bool { return string(id[1]) == anchor }) {
				t.Errorf("%s links to %s, and %s has no heading with this anchor", name, link, target)
			}
		}
	}
	if checked < 2000 {
		t.Errorf("only %d links were found", checked)
	}
}

// TestIndex checks the index of the search: all pages, and the heading, address and text of some sections.
func TestIndex(t *testing.T) {
	files := built(t)
	text := bytes.TrimSuffix(bytes.TrimPrefix(files["search-index.js"], []byte("kvatlasIndex = ")), []byte(";\n"))
	var index []section
	if err := json.Unmarshal(text, &index); err != nil {
		t.Fatal(err)
	}
	pages := map[string]bool{}
	for _, s := range index {
		page, _, _ := strings.Cut(s.URL, "#")
		if pages[page] = true; files[page] == nil || s.Page == "" || s.Heading == "" {
			t.Errorf("no page has the section %+v", s)
		}
	}
	for name := range files {
		if path.Ext(name) == ".html" && !pages[name] {
			t.Errorf("the search has no section of %s", name)
		}
	}
	for url, words := range map[string][]string{
		"docs/install.html#with-helm":            {"With Helm", "values-cluster.yaml"},
		"docs/try.html#in-one-command":           {"In one command", "naive twin", "second table"},
		"docs/upgrade.html#new-names":            {"New names", "--partition-replicas"},
		"docs/engines/vllm.html":                 {"vLLM"},
		"clients/python/index.html#errors":       {"Errors", "QuotaExceededError"},
		"docs/reference.html#exit-statuses":      {"Exit statuses"},
		"docs/security.html#rights-of-a-key":     {"Rights of a key"},
		"docs/python-routers.html#ray-serve-llm": {"Ray Serve LLM", "KvatlasRouter"},
	} {
		i := slices.IndexFunc(index, func(s section) bool { return s.URL == url })
		if i < 0 {
			t.Errorf("the search has no section %s", url)
			continue
		}
		for _, word := range words {
			if !strings.Contains(index[i].Heading+"\n"+index[i].Text, word) {
				t.Errorf("the section %s has no %q: %.200s", url, word, index[i].Text)
			}
		}
	}
}
