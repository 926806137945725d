// Package page contains the live page of an indexer: plain HTML, CSS and ES modules, embedded in the program. The page
// has no build step and loads no foreign address. No secrets and no data are embedded: the browser requests the
// data from the API, with the reader's token.
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

// policy restricts the page to files and requests of its own host.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// file is a file of the page.
type file struct {
	path, contentType, tag string
	body                   []byte
}

var files = read()

// read loads all files: static/index.html is /, any other static/NAME is /page/NAME.
func read() (list []file) {
	entries, err := static.ReadDir("static")
	if err != nil {
		panic(err) // embedded in the program
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

// contentTypes is independent of the machine's tables, unlike package mime.
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
	h.Set("Cache-Control", "no-cache") // browsers revalidate the file at every load
	h.Set("ETag", f.tag)
	if r.Header.Get("If-None-Match") == f.tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	h.Set("Content-Type", f.contentType)
	_, _ = w.Write(f.body) // an error means a disconnected reader
}
