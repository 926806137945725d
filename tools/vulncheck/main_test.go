package main

import (
	"archive/zip"
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// advisory returns an advisory of the database. The tests' module calls bits.Reverse.
func advisory(id, pkg, symbol string) string {
	return `{"schema_version": "1.3.1", "id": "` + id + `", "modified": "2026-01-01T00:00:00Z",
"published": "2026-01-01T00:00:00Z", "summary": "made by a test", "details": "made by a test",
"database_specific": {"url": "https://pkg.go.dev/vuln/` + id + `"},
"affected": [{"package": {"name": "stdlib", "ecosystem": "Go"},
"ranges": [{"type": "SEMVER", "events": [{"introduced": "0"}, {"fixed": "99.0.0"}]}],
"ecosystem_specific": {"imports": [{"path": "` + pkg + `", "symbols": ["` + symbol + `"]}]}}]}`
}

// database writes advisories as files in the layout of golang.org/x/vulndb.
func database(t *testing.T, advisories map[string]string) (folder string) {
	t.Helper()
	folder = t.TempDir()
	for id, text := range advisories {
		write(t, filepath.Join(folder, id+".json"), text)
	}
	return folder
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// module writes a module that calls bits.Reverse: math/bits imports nothing, so govulncheck loads little.
func module(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	write(t, filepath.Join(dir, "go.mod"), "module example.org/checked\n\ngo 1.26.0\n")
	write(t, filepath.Join(dir, "main.go"), "package main\n\nimport \"math/bits\"\n\nfunc main() { _ = bits.Reverse(1) }\n")
	return dir
}

// away returns the address of a port without a listener.
func away(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return "http://" + l.Addr().String()
}

// TestRun checks the exit status: 3 for a called vulnerability, 0 for an uncalled vulnerability, and 0 with NOT CHECKED
// without a reachable source. Every other failure has status 1.
func TestRun(t *testing.T) {
	dir := module(t)
	called := map[string]string{"GO-2026-0001": advisory("GO-2026-0001", "math/bits", "Reverse"),
		"GO-2026-0002": advisory("GO-2026-0002", "math/bits", "Div")}
	imported := map[string]string{"GO-2026-0002": advisory("GO-2026-0002", "math/bits", "Div")}
	other := map[string]string{"GO-2026-0003": advisory("GO-2026-0003", "net/smtp", "Dial")}
	none := func(context.Context) (string, string, error) { return "", "", errors.New("no proxy answers") }
	copied := func(advisories map[string]string) source {
		return func(context.Context) (string, string, error) { return database(t, advisories), "v0.0.1", nil }
	}
	broken := map[string]string{"GO-2026-0001": strings.ReplaceAll(called["GO-2026-0001"], "database_specific", "x")}
	file := func(advisories map[string]string) string { return "file://" + database(t, advisories) }
	for name, c := range map[string]struct {
		check check
		want  int
		says  []string
		not   string
	}{
		"called":     {check{db: file(called), source: none}, 3, []string{"GO-2026-0001"}, "#2: GO"},
		"not called": {check{db: file(other), source: none}, 0, []string{"No vulnerabilities found"}, "NOT CHECKED"},
		"imported":   {check{db: file(imported), source: none}, 0, []string{"by 0 vulnerabilities"}, "NOT CHECKED"},
		"copy":       {check{db: away(t), source: copied(called)}, 3, []string{"v0.0.1", "GO-2026-0001"}, "NOT CHECKED"},
		// govulncheck panics at this advisory and exits with status 2 or, occasionally, 0
		"a panic":   {check{db: file(broken), source: none}, 1, []string{"GO-2026-0001"}, "No vulnerabilities"},
		"nothing":   {check{db: away(t), source: none}, 0, []string{"NOT CHECKED", "refused", "no proxy"}, "found"},
		"no folder": {check{db: "file:///nowhere/at/all", source: none}, 1, []string{"nowhere"}, "NOT CHECKED"},
		"no such package": {check{db: file(other), source: none, patterns: []string{"./absent"}}, 1,
			[]string{"absent"}, "NOT CHECKED"},
	} {
		var out bytes.Buffer
		c.check.dir, c.check.out = dir, &out
		if c.check.patterns == nil {
			c.check.patterns = []string{"./..."}
		}
		status := c.check.run(t.Context())
		text := out.String()
		for _, word := range c.says {
			if !strings.Contains(text, word) {
				t.Errorf("%s: the output lacks %q", name, word)
			}
		}
		if status != c.want || strings.Contains(text, c.not) {
			t.Errorf("%s: status %d, not %d:\n%s", name, status, c.want, text)
		}
	}
}

// TestReach checks that a missing answer and a refusal by a proxy are unreachable. An address without a database is
// another error.
func TestReach(t *testing.T) {
	t.Parallel()
	status := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/index/db.json.gz" {
			t.Errorf("asked for %s", r.URL.Path)
		}
		w.WriteHeader(status)
	}))
	defer s.Close()
	for code, want := range map[int]string{200: "", 403: "unreachable", 407: "unreachable", 429: "unreachable",
		500: "unreachable", 503: "unreachable", 404: "other", 410: "other", 401: "other"} {
		status = code
		err := reach(t.Context(), s.URL+"/")
		is := "other"
		if errors.As(err, new(unreachable)) {
			is = "unreachable"
		} else if err == nil {
			is = ""
		}
		if is != want {
			t.Errorf("status %d is %q, not %q: %v", code, is, want, err)
		}
	}
	if err := reach(t.Context(), away(t)); !errors.As(err, new(unreachable)) {
		t.Errorf("a closed port: %v", err)
	}
}

// TestDownload downloads a copy of the database from a module proxy, which is a folder in the test.
func TestDownload(t *testing.T) {
	const version, path = "v0.0.0-20260101000000-0123456789ab", "golang.org/x/vulndb"
	dir := t.TempDir()
	proxy := func(files ...string) string {
		root := t.TempDir()
		at := filepath.Join(root, path, "@v", version)
		write(t, filepath.Join(root, path, "@v", "list"), "")
		write(t, filepath.Join(root, path, "@latest"), `{"Version": "`+version+`", "Time": "2026-01-01T00:00:00Z"}`)
		write(t, at+".info", `{"Version": "`+version+`", "Time": "2026-01-01T00:00:00Z"}`)
		write(t, at+".mod", "module "+path+"\n")
		var b bytes.Buffer
		z := zip.NewWriter(&b)
		for _, file := range append(files, "go.mod") {
			w, err := z.Create(path + "@" + version + "/" + file)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write([]byte("module " + path + "\n")); err != nil {
				t.Fatal(err)
			}
		}
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		write(t, at+".zip", b.String())
		return "file://" + root
	}
	t.Chdir(dir)
	t.Setenv("GONOSUMDB", path)
	t.Setenv("GOFLAGS", "-modcacherw")
	t.Setenv("GOMODCACHE", t.TempDir())
	t.Setenv("GOPROXY", proxy("data/osv/GO-2026-0001.json"))
	folder, is, err := download(t.Context())
	if err != nil || is != version || filepath.Base(folder) != "osv" {
		t.Errorf("%q %q %v", folder, is, err)
	}
	if _, err := os.Stat(filepath.Join(folder, "GO-2026-0001.json")); err != nil {
		t.Error(err)
	}
	for what, c := range map[string]struct{ proxy, word string }{
		"a copy without advisories": {proxy("data/README"), "no advisories"},
		"no proxy":                  {"off", "GOPROXY=off"},
		"an unreachable proxy":      {away(t), "refused"},
	} {
		t.Setenv("GOMODCACHE", t.TempDir())
		t.Setenv("GOPROXY", c.proxy)
		if _, _, err := download(t.Context()); err == nil || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
