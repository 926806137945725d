package server

import (
	"net/http"
	"strings"
	"sync/atomic"

	"github.com/kvatlas/kvatlas/internal/cli"
	"github.com/kvatlas/kvatlas/internal/page"
	"github.com/kvatlas/kvatlas/internal/web"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// open are the paths that anybody may ask: they say nothing of anybody. What the page shows is asked with the token.
var open = pathSet(append(page.Paths(), "/healthz", "/readyz")...)

func pathSet(paths ...string) map[string]bool {
	set := map[string]bool{}
	for _, path := range paths {
		set[path] = true
	}
	return set
}

// writing are paths of GET that have something written: /dump has snapshots written first.
var writing = map[string]bool{"/dump": true}

// access keeps an HTTP port to those who may use it.
type access struct {
	token []byte
	open  map[string]bool // paths that anybody may ask
	deny  denial
}

// denial is how a port tells of an error.
type denial func(w http.ResponseWriter, failure *api.Error)

// denyAsAPI tells of it as the API does.
func denyAsAPI(w http.ResponseWriter, failure *api.Error) {
	_ = web.WriteReply(w, api.JSON, failure.Body(api.JSON), failure.Code.HTTPStatus()) // or the caller has gone
}

// guard lets only those pass who may use the port: who brings the token, if there is one, and no web page of another
// site. Browsers say of themselves where a request comes from. One that has a name of its own made to lead here, and so
// seems to be of this site, is told by that name where there is no token to tell it by. ended is told of requests that
// do not pass.
func (a *access) guard(next http.Handler, ended func(op, outcome string)) http.Handler {
	allowed := web.Bearer(a.token)
	site := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var failure *api.Error
		switch {
		case a.open[r.URL.Path]:
		case !allowed(r.Header.Get("Authorization")):
			w.Header().Set("WWW-Authenticate", `Bearer realm="kvatlas"`)
			failure = api.Errorf(api.CodeUnauthorized, "this port wants a bearer token: Authorization: Bearer ...")
		case a.token == nil && !cli.OwnHost(r.Host):
			failure = api.Errorf(api.CodeForbidden,
				"the request is for host %.100q; a port without --http-token-file answers to localhost and to addresses, "+
					"so that no web page can ask it by a name of its own", r.Host)
		default:
			if err := site.Check(unsafe(r)); err != nil {
				failure = api.Errorf(api.CodeForbidden, "a web page of another site may not ask this: %v", err)
			}
		}
		if failure != nil {
			ended(api.OpOther, api.Outcome(failure))
			a.deny(w, failure)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// unsafe returns a request as one that changes something, if it does: GET alone would pass for one that does not.
func unsafe(r *http.Request) *http.Request {
	if writing[r.URL.Path] {
		r = r.Clone(r.Context())
		r.Method = http.MethodPost
	}
	return r
}

// maxBodies bounds the bodies of the requests under way over HTTP, in bytes.
const maxBodies = 64 << 20

// httpRoom bounds what is under way over HTTP at once.
type httpRoom struct {
	requests, bytes   int64 // bounds
	body              int64 // the bound of one body, in bytes
	deny              denial
	underWay, reading atomic.Int64
}

// limit refuses the requests for which there is no room. Health checks and metrics have always some.
func (l *httpRoom) limit(next http.Handler, ended func(op, outcome string)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if open[r.URL.Path] || r.URL.Path == "/metrics" || r.URL.Path == "/health" {
			next.ServeHTTP(w, r)
			return
		}
		size := r.ContentLength
		if size < 0 || size > l.body { // it is not said, or refused once so much is read
			size = l.body
		}
		defer l.underWay.Add(-1)
		defer l.reading.Add(-size)
		n, bytes := l.underWay.Add(1), l.reading.Add(size)
		deny := func(failure *api.Error) {
			ended(opOf(r), api.Outcome(failure))
			l.deny(w, failure)
		}
		switch {
		case n > l.requests:
			deny(api.Errorf(api.CodeBusy,
				"%d requests are under way over HTTP; ask again a little later", l.requests))
		case bytes > l.bytes && bytes > size:
			deny(api.Errorf(api.CodeBusy,
				"%d MiB of requests are under way over HTTP; ask again a little later", l.bytes>>20))
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// opOf is the operation of a request.
func opOf(r *http.Request) string {
	for _, route := range routes {
		prefix, _, named := strings.Cut(route.path, "{")
		is := route.path == r.URL.Path || named && strings.HasPrefix(r.URL.Path, prefix)
		if is && (route.method == r.Method || route.method == http.MethodGet && r.Method == http.MethodHead) {
			return route.op
		}
	}
	return api.OpOther
}
