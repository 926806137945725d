// Package page is the live page of an indexer: plain HTML, CSS and ES modules in the program, without a build step and
// without a foreign address. It has no secrets and no data. What it shows it asks of the API, with the token that the
// reader types.
package page

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"net/http"
	"path"

	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/web"
)

//go:embed static
var static embed.FS

// policy lets the page load nothing but its own files, and ask nothing but its own host.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// file is one of the page's.
type file struct {
	path, contentType, tag string
	body                   []byte
}

var files = read()

// read reads all files: static/index.html is /, any other static/NAME is /page/NAME.
func read() (list []file) {
	entries, err := static.ReadDir("static")
	if err != nil {
		panic(err) // it is in the program
	}
	for _, e := range entries {
		body, err := static.ReadFile("static/" + e.Name())
		if err != nil {
			panic(err)
		}
		f := file{path: "/page/" + e.Name(), contentType: contentTypes[path.Ext(e.Name())], body: body}
		if e.Name() == "index.html" {
			f.path = "/"
		}
		sum := sha256.Sum256(body)
		f.tag = `"` + hex.EncodeToString(sum[:12]) + `"`
		list = append(list, f)
	}
	return list
}

// contentTypes do not depend on the machine's tables, as those of package mime do.
var contentTypes = map[string]string{
	".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
	".svg": "image/svg+xml",
}

// Register adds the page's files.
func Register(mux *web.Mux) {
	for i := range files {
		f := &files[i]
		pattern := f.path
		if pattern == "/" {
			pattern = "/{$}"
		}
		mux.Handle(pattern, web.Rules{http.MethodGet: {Needs: rights.Anybody, Cost: web.Probe}}, f.serve)
	}
}

func (f *file) serve(w http.ResponseWriter, r *http.Request) {
	if !web.Allowed(w, r, http.MethodGet) {
		http.Error(w, web.WrongMethod(r, http.MethodGet).Error(), http.StatusMethodNotAllowed)
		return
	}
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-cache") // it is asked each time whether it has changed
	h.Set("ETag", f.tag)
	if r.Header.Get("If-None-Match") == f.tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	h.Set("Content-Type", f.contentType)
	_, _ = w.Write(f.body) // or the reader has gone
}
