package server

import (
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/faces/kvindexer/kvindexerpb"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// tokens returns the tokens of a token file's text.
func tokens(t *testing.T, text string) *rights.Tokens {
	t.Helper()
	list, err := rights.New([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// passed serves permitted requests.
func passed(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }

// rulesOf returns a port with the routes of another port. Every route replies with StatusTeapot.
func rulesOf(mux *web.Mux) *web.Mux {
	out := web.NewMux()
	for path, rules := range mux.Routes() {
		out.Handle(path, rules, passed)
	}
	out.Otherwise(passed)
	return out
}

// bare returns a server with ports and without a node.
func bare(list *rights.Tokens) *Server {
	return &Server{Settings: Settings{HTTPTokens: list, QueryWorkers: 10}, intake: web.Intake{Most: maxBodies},
		scrape: http.NotFoundHandler()}
}

// may lists the permitted roles of every route of every port, in the order of rolesOf; "-" is a request without a
// token. Every route has a row, and every row has a route.
var may = map[string]string{
	"--http-listen GET /": "- read route register operate", "--http-listen GET /healthz": "- read route register operate",
	"--http-listen GET /readyz":                   "- read route register operate",
	"--http-listen GET /health":                   "read route register operate",
	"--http-listen GET /v1/openapi.json":          "read route register operate",
	"--http-listen GET /v1/kv_indexer.proto":      "read route register operate",
	"--http-listen GET /metrics":                  "read route operate",
	"--http-listen GET /v1/watch":                 "read route operate",
	"--http-listen POST /v1/find":                 "read route operate",
	"--http-listen GET /v1/workers":               "read route operate",
	"--http-listen GET /v1/status":                "read route operate",
	"--http-listen POST /v1/prefixes":             "read route operate",
	"--http-listen GET /v1/loads":                 "read route operate",
	"--http-listen POST /v1/loads":                "read route operate",
	"--http-listen POST /v1/potential_loads":      "read route operate",
	"--http-listen GET /v1/engine_load":           "read route operate",
	"--http-listen POST /v1/recorded":             "read route operate",
	"--http-listen GET /v1/funnel":                "read route operate",
	"--http-listen GET /v1/capacity":              "read route operate",
	"--http-listen GET /v1/removal_order":         "read route operate",
	"--http-listen POST /v1/removal_order":        "read route operate",
	"--http-listen GET /v1/prefixes/hot":          "read route operate",
	"--http-listen POST /v1/prefixes/hot":         "read route operate",
	"--http-listen POST /v1/prefixes/warm":        "operate",
	"--http-listen GET /v1/tenants":               "operate",
	"--http-listen POST /v1/tenants":              "operate",
	"--http-listen GET /v1/scaling":               "read route operate",
	"--http-listen POST /v1/scaling":              "read route operate",
	"--http-listen GET /workers":                  "read route operate",
	"--http-listen POST /query":                   "read route operate",
	"--http-listen POST /query_by_hash":           "read route operate",
	"--http-listen POST /overlap_scores":          "read route operate",
	"--http-listen POST /v1/select":               "route",
	"--http-listen POST /v1/book":                 "route",
	"--http-listen POST /v1/prefill_complete":     "route",
	"--http-listen POST /v1/progress":             "route",
	"--http-listen POST /v1/output_block":         "route",
	"--http-listen POST /v1/free":                 "route",
	"--http-listen POST /v1/report":               "route",
	"--http-listen GET /v1/sessions":              "route operate",
	"--http-listen POST /v1/sessions":             "route operate",
	"--http-listen POST /v1/sessions/end":         "route operate",
	"--http-listen POST /v1/engine_load":          "route register",
	"--http-listen POST /v1/workers":              "register",
	"--http-listen POST /register":                "register",
	"--http-listen POST /unregister":              "register operate",
	"--http-listen DELETE /v1/workers/{instance}": "register operate",
	"--http-listen PATCH /v1/workers/{instance}":  "operate",
	"--http-listen GET /v1/verify":                "operate",
	"--http-listen POST /v1/snapshot":             "operate",
	"--http-listen GET /dump":                     "operate",

	"--select-listen GET /health":                              "- read route register operate",
	"--select-listen GET /ready":                               "read route register operate",
	"--select-listen POST /select":                             "route",
	"--select-listen POST /select_and_reserve":                 "route",
	"--select-listen POST /reservations":                       "route",
	"--select-listen POST /reservations/{id}/prefill_complete": "route",
	"--select-listen POST /reservations/{id}/output_block":     "route",
	"--select-listen DELETE /reservations/{id}":                "route",
	"--select-listen POST /workers":                            "register",
	"--select-listen GET /workers":                             "read route operate",
	"--select-listen PATCH /workers/{id}":                      "operate",
	"--select-listen DELETE /workers/{id}":                     "register operate",
	"--select-listen GET /loads":                               "read route operate",
	"--select-listen POST /potential_loads":                    "read route operate",
	"--select-listen POST /overlap_scores":                     "read route operate",
	"--select-listen GET /dump":                                "operate",
	"--select-listen GET /replica_sync/peers":                  "read route operate",
	"--select-listen POST /replica_sync/register_peer":         "operate",
	"--select-listen POST /replica_sync/deregister_peer":       "operate",

	"--slot-tracker-listen GET /health":                        "- read route register operate",
	"--slot-tracker-listen POST /register":                     "register",
	"--slot-tracker-listen POST /unregister":                   "register operate",
	"--slot-tracker-listen GET /workers":                       "read route operate",
	"--slot-tracker-listen POST /add":                          "route",
	"--slot-tracker-listen POST /prefill_complete":             "route",
	"--slot-tracker-listen POST /free":                         "route",
	"--slot-tracker-listen GET /loads":                         "read route operate",
	"--slot-tracker-listen POST /potential_loads":              "read route operate",
	"--slot-tracker-listen GET /replica_sync/peers":            "read route operate",
	"--slot-tracker-listen POST /replica_sync/register_peer":   "operate",
	"--slot-tracker-listen POST /replica_sync/deregister_peer": "operate",

	"--conductor-listen POST /query":      "read route operate",
	"--conductor-listen POST /register":   "register",
	"--conductor-listen POST /unregister": "register operate",
	"--conductor-listen GET /services":    "read route operate",
	"--conductor-listen GET /global_view": "read route operate",

	"--grpc-listen " + kvindexerpb.KVIndexer_MatchExternalKvPrefix_FullMethodName: "read route operate",
	"--grpc-listen " + extprocv3.ExternalProcessor_Process_FullMethodName:         "route",
}

// rolesOf are the tokens of the matrix.
var rolesOf = []string{"-", "read", "route", "register", "operate"}

// TestRolesOfRoutes requests every route of every port with a token of every role.
func TestRolesOfRoutes(t *testing.T) {
	text := ""
	for _, role := range rolesOf[1:] {
		text += role + " 0123456789abc-" + role + "\n"
	}
	s, seen := bare(tokens(t, text+"0123456789abc-everything\nread,register 0123456789abc-both")), map[string]bool{}
	check := func(route string, allowed func(header string) (may bool, why string)) {
		t.Helper()
		row, there := may[route]
		if !there {
			t.Errorf("%s has no row: add the permitted roles to the table", route)
		}
		seen[route] = true
		for _, role := range rolesOf {
			header := "Bearer 0123456789abc-" + role
			if role == "-" {
				header = ""
			}
			want := slices.Contains(strings.Fields(row), role)
			if is, why := allowed(header); is != want {
				t.Errorf("%s with role %s: %v %s", route, role, is, why)
			} else if !is && role != "-" && !strings.Contains(why, "role") {
				t.Errorf("%s with role %s: the error does not name the role: %s", route, role, why)
			}
		}
		if is, why := allowed("Bearer 0123456789abc-everything"); !is {
			t.Errorf("%s with a token of all roles: %s", route, why)
		}
		wanted := strings.Contains(row, "read") || strings.Contains(row, "register")
		if is, why := allowed("Bearer 0123456789abc-both"); is != wanted {
			t.Errorf("%s with the roles read and register: %v %s", route, is, why)
		}
	}
	for _, p := range s.httpPorts() {
		mux := rulesOf(p.mux())
		h := s.guarded(mux, p.deny)
		for pattern, rules := range mux.Routes() {
			path := strings.NewReplacer("{$}", "", "{instance}", "w", "{id}", "1").Replace(pattern)
			for method, rule := range rules {
				row := p.flag + " " + method + " " + strings.TrimSuffix(pattern, "{$}")
				if strings.HasPrefix(pattern, "/page/") {
					row = p.flag + " GET /" // as all files of the page
				}
				check(row, func(header string) (bool, string) {
					r, w := httptest.NewRequest(method, path, nil), httptest.NewRecorder()
					r.Header.Set("Authorization", header)
					h.ServeHTTP(w, r)
					if want := map[bool]int{true: 401, false: 403}[header == ""]; w.Code != want && w.Code != 418 {
						t.Errorf("%s with %q: %d %s", row, header, w.Code, w.Body)
					}
					return w.Code == 418, w.Body.String()
				})
				if rule.Needs == rights.Anybody && rule.Cost != web.Probe {
					t.Errorf("%s has no bound and needs no token", row)
				}
			}
		}
		for _, header := range []string{"", "Bearer 0123456789abc-nobody", "Basic 0123456789abc-everything", "Bearer"} {
			for _, path := range []string{"/nothing", "/v1/find", "//v1/find", "/page/../v1/find", "/V1/FIND"} {
				r, w := httptest.NewRequest("POST", path, nil), httptest.NewRecorder()
				r.Header.Set("Authorization", header)
				if h.ServeHTTP(w, r); w.Code != 401 || w.Header().Get("WWW-Authenticate") == "" {
					t.Errorf("%s %s with %q: %d", p.flag, path, header, w.Code)
				}
			}
		}
	}
	for method, needs := range grpcNeeds {
		check("--grpc-listen "+method, func(header string) (bool, string) {
			failure := s.HTTPTokens.Check(header, needs, "")
			return failure == nil, fmt.Sprint(failure)
		})
	}
	for route := range may {
		if !seen[route] {
			t.Errorf("there is no %s", route)
		}
	}
}

// TestGRPCMethodsHaveRoles checks that exactly the methods of the gRPC port have roles.
func TestGRPCMethodsHaveRoles(t *testing.T) {
	port := grpc.NewServer()
	extprocv3.RegisterExternalProcessorServer(port, extprocv3.UnimplementedExternalProcessorServer{})
	kvindexerpb.RegisterKVIndexerServer(port, kvindexerpb.UnimplementedKVIndexerServer{})
	var methods []string
	for service, info := range port.GetServiceInfo() {
		for _, m := range info.Methods {
			methods = append(methods, "/"+service+"/"+m.Name)
		}
	}
	slices.Sort(methods)
	if list := slices.Sorted(maps.Keys(grpcNeeds)); !slices.Equal(list, methods) {
		t.Errorf("roles are of %q, the port has %q", list, methods)
	}
}

// foreign are browsers' headers in requests of other sites' web pages.
var foreign = []http.Header{
	{"Sec-Fetch-Site": {"cross-site"}, "Sec-Fetch-Mode": {"no-cors"}}, {"Sec-Fetch-Site": {"same-site"}},
	{"Sec-Fetch-Site": {"cross-site"}, "Sec-Fetch-Mode": {"navigate"}},
	{"Origin": {"https://evil.example"}}, {"Origin": {"null"}}, {"Origin": {"http://localhost:1"}},
}

// TestOtherSites requests every route of every port as web pages of other sites can. Only cheap and short read requests
// are permitted.
func TestOtherSites(t *testing.T) {
	dear := []string{}
	for _, p := range bare(nil).httpPorts() {
		mux := rulesOf(p.mux())
		h := bare(nil).guarded(mux, p.deny)
		for pattern, rules := range mux.Routes() {
			path := strings.NewReplacer("{$}", "", "{instance}", "w", "{id}", "1").Replace(pattern)
			for method, rule := range rules {
				if method == "GET" && (rule.Cost == web.Costly || rule.Cost == web.Lasting) {
					dear = append(dear, p.flag+" "+pattern)
				}
				code := func(method string, header http.Header) int {
					r, w := httptest.NewRequest(method, "http://localhost"+path, nil), httptest.NewRecorder()
					maps.Copy(r.Header, header)
					h.ServeHTTP(w, r)
					return w.Code
				}
				methods := []string{method}
				if method == "GET" {
					methods = append(methods, "HEAD")
				}
				for _, method := range methods {
					for _, header := range foreign {
						passes := method == "GET" || method == "HEAD"
						passes = passes && (rule.Cost == web.Probe || rule.Cost == web.Usual)
						if want := map[bool]int{true: 418, false: 403}[passes]; code(method, header) != want {
							t.Errorf("%s %s %s with %v: %d, want %d", p.flag, method, pattern, header, code(method, header), want)
						}
					}
					for _, header := range []http.Header{{}, {"Sec-Fetch-Site": {"same-origin"}},
						{"Sec-Fetch-Site": {"none"}}, {"Origin": {"http://localhost"}}} {
						if got := code(method, header); got != 418 {
							t.Errorf("%s %s %s with %v: %d", p.flag, method, pattern, header, got)
						}
					}
				}
			}
		}
	}
	slices.Sort(dear)
	want := []string{"--http-listen /dump", "--http-listen /v1/removal_order", "--http-listen /v1/tenants",
		"--http-listen /v1/verify", "--http-listen /v1/watch", "--select-listen /dump"}
	if !slices.Equal(dear, want) {
		t.Errorf("the costly and lasting paths of GET are %q, want %q", dear, want)
	}
}

// TestOtherNames checks that, without a token, a foreign Host name is refused, unless the reply has no data.
func TestOtherNames(t *testing.T) {
	var ended []string
	s := bare(nil)
	p := s.httpPorts()[0]
	alone := s.guarded(rulesOf(p.mux()), p.deny)
	named := bare(tokens(t, "0123456789abcdef")).guarded(rulesOf(p.mux()), p.deny)
	for _, c := range []struct {
		guard              http.Handler
		method, host, path string
		origin, token      string
		want               int
	}{
		{alone, "POST", "127.0.0.1:8090", "/v1/find", "", "", 418},
		{alone, "POST", "localhost:8090", "/v1/find", "", "", 418},
		{alone, "POST", "[::1]:8090", "/v1/find", "", "", 418},
		{alone, "GET", "LocalHost.", "/v1/status", "", "", 418},
		{alone, "GET", "evil.example:8090", "/v1/workers", "", "", 403},
		{alone, "POST", "evil.example", "/v1/find", "http://evil.example", "", 403},
		{alone, "GET", "localhost.evil.example", "/v1/workers", "", "", 403},
		{alone, "GET", "evil.example", "/nothing", "", "", 403},
		{alone, "GET", "evil.example", "/healthz", "", "", 418},
		{named, "POST", "indexer.example", "/v1/find", "", "0123456789abcdef", 418},
		{named, "POST", "indexer.example", "/v1/find", "https://evil.example", "0123456789abcdef", 403},
		{named, "POST", "indexer.example", "/v1/find", "", "", 401},
	} {
		r, w := httptest.NewRequest(c.method, "http://x"+c.path, nil), httptest.NewRecorder()
		r.Host = c.host
		for name, value := range map[string]string{"Origin": c.origin, "Authorization": "Bearer " + c.token} {
			if value != "" {
				r.Header.Set(name, value)
			}
		}
		if c.guard.ServeHTTP(w, r); w.Code != c.want || c.want == 403 &&
			!strings.Contains(w.Body.String(), `"code":"forbidden"`) {
			t.Errorf("%s %s%s from %q: %d %s, want %d", c.method, c.host, c.path, c.origin, w.Code, w.Body, c.want)
		}
	}
	for _, c := range s.outcomes.Counts() {
		ended = append(ended, fmt.Sprint(c.Operation, " ", c.Outcome, " ", c.Count))
	}
	if len(ended) != 1 || ended[0] != "other forbidden 4" {
		t.Errorf("%q", ended)
	}
}

// TestSlowUploads checks that slow or silent clients occupy no places and block no other client of any port. The status
// does not advise more query workers because of such clients.
func TestSlowUploads(t *testing.T) {
	t.Parallel()
	s := bare(nil)
	s.QueryWorkers = 100 // fewer than slow clients, and more than uploads that are about to begin
	for _, p := range s.httpPorts() {
		mux := web.NewMux()
		var begun, refused atomic.Int32
		mux.Handle("/upload", web.Rules{http.MethodPost: web.Reads}, func(w http.ResponseWriter, r *http.Request) {
			begun.Add(1)
			if _, failure := web.ReadBody(w, r, 8<<20); failure != nil {
				p.deny(w, failure)
			}
		})
		server := httptest.NewServer(s.guarded(mux, func(w http.ResponseWriter, failure *api.Error) {
			refused.Add(1)
			p.deny(w, failure)
		}))
		defer server.Close()
		const slow = 200
		for i := range slow {
			c, err := net.Dial("tcp", server.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			head := []string{"Transfer-Encoding: chunked\r\n\r\n1\r\n \r\n", "Transfer-Encoding: chunked\r\n\r\n",
				"Content-Length: 8388608\r\n\r\n{"}[i%3]
			if _, err := fmt.Fprint(c, "POST /upload HTTP/1.1\r\nHost: localhost\r\n", head); err != nil {
				t.Fatal(err)
			}
			for int(begun.Load()) <= i { // otherwise all uploads would begin at once
				if runtime.Gosched(); refused.Load() > 0 {
					t.Fatalf("%s: a slow client is refused", p.flag)
				}
			}
		}
		for range 30 {
			reply, err := http.Post(server.URL+"/upload", "", strings.NewReader(strings.Repeat(" ", 1<<20)))
			if err != nil {
				t.Fatal(err)
			}
			reply.Body.Close()
			if reply.StatusCode != http.StatusOK {
				t.Fatalf("%s: another client is answered with %d", p.flag, reply.StatusCode)
			}
		}
		server.CloseClientConnections()
		for s.intake.Held() > 0 {
			runtime.Gosched()
		}
	}
	if list := s.outcomes.Problems(time.Now()); len(list) > 0 {
		t.Errorf("%q", list)
	}
}

// TestPlaces checks that concurrent requests are limited, and that further requests are refused and counted. Metrics
// are always served.
func TestPlaces(t *testing.T) {
	s := bare(nil)
	s.QueryWorkers = 2
	entered, release := make(chan struct{}), make(chan struct{})
	mux := web.NewMux()
	wait := func(w http.ResponseWriter, r *http.Request) {
		if _, failure := web.ReadBody(w, r, 100); failure != nil {
			denyAsAPI(w, failure)
			return
		}
		entered <- struct{}{}
		<-release
	}
	mux.Handle("/v1/find", web.Rules{http.MethodPost: web.Reads}, wait)
	mux.Handle("/v1/workers", web.Rules{http.MethodGet: web.Reads}, wait)
	mux.Handle("/metrics", web.Rules{http.MethodGet: {Needs: rights.Read, Cost: web.Probe}}, passed)
	h := s.guarded(mux, denyAsAPI)
	ask := func(method, path, body string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, "http://localhost"+path, strings.NewReader(body)))
		return w
	}
	var asked sync.WaitGroup
	asked.Go(func() { ask("POST", "/v1/find", "{}") })
	asked.Go(func() { ask("GET", "/v1/workers", "") })
	<-entered
	<-entered
	for _, path := range []string{"/v1/find", "/other"} {
		w := ask("POST", path, "{}")
		if w.Code != 429 || !strings.Contains(w.Body.String(), "2 requests are running over HTTP") {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
	if w := ask("GET", "/metrics", ""); w.Code != 418 {
		t.Errorf("metrics: %d", w.Code)
	}
	close(release)
	asked.Wait()
	if w := ask("POST", "/v1/find", strings.Repeat(" ", 101)); w.Code != 413 {
		t.Errorf("too large: %d", w.Code)
	}
	go func() { <-entered }()
	if w := ask("POST", "/v1/find", "{}"); w.Code != 200 {
		t.Errorf("when there is room: %d", w.Code)
	}
	if list := s.outcomes.Problems(time.Now()); len(list) != 1 || !strings.Contains(list[0], "2 requests") {
		t.Errorf("%q", list)
	}
}
