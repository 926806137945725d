package server

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestToken: with a token nothing but the health checks is answered without it.
func TestToken(t *testing.T) {
	a := &access{token: []byte("0123456789abcdef"), open: open, deny: denyAsAPI}
	h := a.guard(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), func(string, string) {})
	for _, c := range []struct {
		path, header string
		want         int
	}{
		{"/v1/find", "", 401}, {"/register", "Bearer 0123456789abcdeX", 401}, {"/v1/find", "Basic 0123456789abcdef",
			401}, {"/metrics", "Bearer", 401},
		{"/v1/find", "Bearer 0123456789abcdef", 200}, {"/register", "bearer 0123456789abcdef", 200}, {"/healthz", "",
			200}, {"/readyz", "", 200},
		{"/", "", 200}, {"/page/app.js", "", 200}, {"/page/../v1/find", "", 401}, {"/v1/watch", "", 401},
	} {
		r, w := httptest.NewRequest("GET", c.path, nil), httptest.NewRecorder()
		r.Header.Set("Authorization", c.header)
		if h.ServeHTTP(w, r); w.Code != c.want {
			t.Errorf("%s with %q: %d, want %d", c.path, c.header, w.Code, c.want)
		}
	}
}

// TestWebPagesOfOthers: without a token a port is for programs on this host, and not for web pages that somebody made
// to ask it.
func TestWebPagesOfOthers(t *testing.T) {
	var ended []string
	passed := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	alone := (&access{open: open, deny: denyAsAPI}).guard(passed,
		func(op, outcome string) { ended = append(ended, op+" "+outcome) })
	withToken := (&access{token: []byte("0123456789abcdef"), open: open, deny: denyAsAPI}).guard(passed,
		func(string, string) {})
	for _, c := range []struct {
		guard               http.Handler
		method, host, path  string
		origin, site, token string
		want                int
	}{
		{alone, "POST", "127.0.0.1:8090", "/v1/find", "", "", "", 418},
		{alone, "POST", "localhost:8090", "/v1/find", "", "", "", 418},
		{alone, "POST", "[::1]:8090", "/v1/find", "", "", "", 418},
		{alone, "GET", "LocalHost.", "/v1/status", "", "", "", 418},
		{alone, "POST", "localhost:8090", "/v1/find", "http://localhost:8090", "same-origin", "", 418},
		{alone, "POST", "localhost:8090", "/v1/snapshot", "https://evil.example", "cross-site", "", 403},
		{alone, "POST", "localhost:8090", "/v1/snapshot", "https://evil.example", "", "", 403},
		{alone, "POST", "localhost:8090", "/v1/snapshot", "null", "", "", 403},
		{alone, "POST", "localhost:8090", "/register", "http://localhost:3000", "same-site", "", 403},
		{alone, "GET", "evil.example:8090", "/v1/workers", "", "", "", 403}, // whose name was made to lead here
		{alone, "POST", "evil.example", "/v1/find", "http://evil.example", "", "", 403},
		{alone, "GET", "localhost.evil.example", "/v1/workers", "", "", "", 403},
		{alone, "GET", "evil.example", "/healthz", "", "", "", 418},
		{alone, "GET", "localhost:8090", "/v1/status", "https://evil.example", "cross-site", "", 418},
		{alone, "GET", "localhost:8090", "/dump", "", "", "", 418},
		{alone, "GET", "localhost:8090", "/dump", "", "none", "", 418},       // typed by somebody
		{alone, "GET", "localhost:8090", "/dump", "", "cross-site", "", 403}, // it has snapshots written
		{alone, "HEAD", "localhost:8090", "/dump", "https://evil.example", "", "", 403},
		{withToken, "POST", "indexer.example", "/v1/find", "", "", "0123456789abcdef", 418},
		{withToken, "POST", "indexer.example", "/v1/find", "https://evil.example", "cross-site", "0123456789abcdef",
			403},
		{withToken, "POST", "indexer.example", "/v1/find", "", "", "", 401},
	} {
		r, w := httptest.NewRequest(c.method, "http://x"+c.path, nil), httptest.NewRecorder()
		r.Host = c.host
		for name, value := range map[string]string{"Origin": c.origin, "Sec-Fetch-Site": c.site,
			"Authorization": "Bearer " + c.token} {
			if value != "" {
				r.Header.Set(name, value)
			}
		}
		if c.guard.ServeHTTP(w, r); w.Code != c.want || c.want == 403 &&
			!strings.Contains(w.Body.String(), `"code":"forbidden"`) {
			t.Errorf("%s %s%s from %q: %d %s, want %d", c.method, c.host, c.path, c.origin, w.Code, w.Body, c.want)
		}
	}
	if len(ended) != 9 || ended[0] != "other forbidden" {
		t.Errorf("%q", ended)
	}
}

// TestRoomOverHTTP: what is under way over HTTP is bounded by number and by bytes; more is refused, and counted.
func TestRoomOverHTTP(t *testing.T) {
	var outcomes outcomes
	entered, release := make(chan struct{}), make(chan struct{})
	room := &httpRoom{requests: 3, bytes: 1000, body: api.MaxBody, deny: denyAsAPI}
	h := room.limit(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			return
		}
		entered <- struct{}{}
		<-release
	}), func(op, outcome string) { outcomes.Count(api.OverHTTP, op, outcome) })
	begin := func(bytes int) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		go h.ServeHTTP(w, httptest.NewRequest("POST", "/v1/find", strings.NewReader(strings.Repeat(" ", bytes))))
		<-entered
		return w
	}
	refused := func(path string, bytes int, want string) {
		t.Helper()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("POST", path, strings.NewReader(strings.Repeat(" ", bytes))))
		said := w.Body.String()
		if w.Code != 429 || !strings.Contains(said, `"code":"busy"`) || !strings.Contains(said, want) {
			t.Errorf("%s: %d %s, want %s", path, w.Code, said, want)
		}
	}
	begin(2000) // one that is larger than all may be has its turn alone
	refused("/v1/find", 1, "MiB of requests are under way")
	release <- struct{}{}
	for room.underWay.Load() > 0 { // it has left the room a moment later
	}
	begin(500)
	begin(400)
	refused("/register", 200, "MiB")
	begin(1)
	refused("/v1/find", 1, "3 requests are under way over HTTP; ask again a little later")
	w := httptest.NewRecorder()
	if h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil)); w.Code != 200 {
		t.Errorf("metrics: %d", w.Code)
	}
	close(release)
	for _, c := range outcomes.Counts() {
		if c.Outcome != "busy" || c.Operation != api.OpFind && c.Operation != api.OpOther {
			t.Errorf("%+v", c)
		}
	}
	if problems := outcomes.Problems(time.Now()); len(problems) != 1 || !strings.Contains(problems[0], "3 requests") {
		t.Errorf("%q", problems)
	}
}
