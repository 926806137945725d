package page

import (
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/edge/web"
)

func get(t *testing.T, path, tag string) *httptest.ResponseRecorder {
	t.Helper()
	mux := web.NewMux()
	Register(mux)
	r, w := httptest.NewRequest("GET", path, nil), httptest.NewRecorder()
	r.Header.Set("If-None-Match", tag)
	mux.ServeHTTP(w, r)
	return w
}

// TestFiles: each file is served with its type and a policy. An unchanged file is not sent twice.
func TestFiles(t *testing.T) {
	for i := range files {
		path := files[i].path
		w := get(t, path, "")
		h := w.Header()
		if w.Code != 200 || h.Get("Content-Type") == "" || !strings.Contains(h.Get("Content-Security-Policy"),
			"default-src 'none'") || strings.Contains(h.Get("Content-Security-Policy"), "unsafe") {
			t.Errorf("%s: %d %v", path, w.Code, h)
		}
		if again := get(t, path, h.Get("ETag")); again.Code != 304 || again.Body.Len() > 0 {
			t.Errorf("%s again: %d", path, again.Code)
		}
	}
	if w := get(t, "/page/nothing.js", ""); w.Code != 404 {
		t.Errorf("a missing file: %d", w.Code)
	}
}

// TestNothingForeign: no file contains another host, or a script or style in its HTML. Every referenced file exists.
func TestNothingForeign(t *testing.T) {
	foreign := regexp.MustCompile(`(https?:)?//[a-z0-9.-]+\.[a-z]+`)
	inline := regexp.MustCompile(`(?i)<style|<script[^>]*>[^<]|\son[a-z]+="|\sstyle="|innerHTML|eval\(|javascript:`)
	named := regexp.MustCompile(`(?:from "\.|(?:src|href)="page)/([\w.-]+)"`)
	for i := range files {
		f := &files[i]
		text := strings.ReplaceAll(string(f.body), "http://www.w3.org/2000/svg", "")
		if found := foreign.FindString(text); found != "" {
			t.Errorf("%s names %s", f.path, found)
		}
		if found := inline.FindString(text); found != "" {
			t.Errorf("%s has %q, which the policy forbids", f.path, found)
		}
		for _, name := range named.FindAllStringSubmatch(text, -1) {
			if w := get(t, "/page/"+name[1], ""); w.Code != 200 {
				t.Errorf("%s references the missing file %s", f.path, name[1])
			}
		}
	}
}

// TestCauses: the page and docs/funnel.md describe the causes of lost tokens in the same words.
func TestCauses(t *testing.T) {
	doc, err := os.ReadFile("../../../docs/funnel.md")
	if err != nil {
		t.Fatal(err)
	}
	script, err := static.ReadFile("static/causes.js")
	if err != nil {
		t.Fatal(err)
	}
	link := regexp.MustCompile(`\[(.*?)\]\(.*?\)`)
	plain := func(s string) string { return strings.ReplaceAll(link.ReplaceAllString(s, "$1"), "`", "") }
	rows := regexp.MustCompile("(?m)^\\| `(\\w+)` \\| (.*?) \\| (.*?) \\|$").FindAllStringSubmatch(string(doc), -1)
	for _, r := range rows {
		want := "\n  " + r[1] + `: ["` + plain(r[2]) + "\",\n    \"" + plain(r[3]) + `"`
		if !strings.Contains(string(script), want) {
			t.Errorf("causes.js does not contain%s", want)
		}
	}
	if n := strings.Count(string(script), ",\n    \""); n != len(rows) || n == 0 {
		t.Errorf("causes.js has %d causes, docs/funnel.md %d", n, len(rows))
	}
}
