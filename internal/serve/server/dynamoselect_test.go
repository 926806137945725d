package server

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/internal/faces/compat/dynamoselect"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// exchange is a request to a service of Dynamo with the reply.
type exchange struct {
	tracker            bool
	method, path, body string
	status             int
	answer             string
}

// exchanges reads transcripts. A section has the requests to a process. The header of a section is ignored.
func exchanges(t testing.TB, file string) (sections [][]exchange) {
	t.Helper()
	text, err := os.ReadFile("../../faces/compat/dynamoselect/testdata/" + file)
	if err != nil {
		t.Fatal(err)
	}
	tracker := false
	var e exchange
	for _, line := range strings.Split(string(text), "\n") {
		answer, is := strings.CutPrefix(line, "   -> ")
		switch {
		case strings.HasPrefix(line, "## "), strings.HasPrefix(line, "---- "):
			tracker = strings.Contains(line, "----")
			sections = append(sections, nil)
		case is:
			status, body, _ := strings.Cut(answer, " ")
			if e.status, err = strconv.Atoi(status); err != nil {
				t.Fatalf("%s: %q", file, line)
			}
			e.answer = strings.TrimSpace(body)
			sections[len(sections)-1] = append(sections[len(sections)-1], e)
		case len(sections) > 0 && line != "":
			part := strings.SplitN(line, " ", 3)
			e = exchange{tracker: tracker, method: part[0], path: part[1], body: strings.TrimSpace(part[2])}
		}
	}
	return sections
}

// TestAsDynamoAnswers plays requests to ai-dynamo-runtime 1.6.1. The replies must be equal.
func TestAsDynamoAnswers(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	nats := natskit.Start(t, natsserver.Options{})
	played := 0
	for _, file := range []string{"transcript-1.6.1.txt", "exchanges-1.6.1.txt", "worker-statuses-1.6.1.txt"} {
		for i, section := range exchanges(t, file) {
			s, end := serveDynamo(ctx, t, nats, file[:4]+strconv.Itoa(i))
			play(t, file, section, s)
			for _, g := range s.guesses.Status() {
				if dynamoselect.Tracked(g.Name) {
					t.Errorf("the slot tracker's bookings make guesses: %+v", g)
				}
			}
			played += len(section)
			end()
		}
	}
	if played < 200 {
		t.Errorf("%d exchanges", played)
	}
}

// serveDynamo runs a node without engines, until end is called.
func serveDynamo(ctx context.Context, t testing.TB, nats *natsserver.Server, namespace string) (s *Server, end func()) {
	t.Helper()
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{Server: nats, Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	s, err = New(ctx, Settings{ID: "a", Conn: conn, Namespace: namespace, Partitions: 2, Drain: 4 * time.Second,
		AwayPatience: testkit.Patience, LogBytes: 1 << 20, SnapshotInterval: time.Hour, Routing: routing.DefaultConfig(),
		Engines: compat.Engines{OnRefused: shim.KeepOnRefused, SilentAfter: time.Hour}}, // no engine is there
		slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- s.Run(running) }()
	select {
	case <-s.ready:
		s.waitLoads(ctx)
	case <-ctx.Done():
		t.Fatal("the server is not ready in time")
	}
	return s, func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		conn.Close()
	}
}

// TestHealthOfSlotTracker: an answer without a body has no content type, as with Dynamo. A client would read JSON from
// nothing.
func TestHealthOfSlotTracker(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	nats := natskit.Start(t, natsserver.Options{})
	s, end := serveDynamo(ctx, t, nats, "health")
	defer end()
	for name, face := range map[string]http.Handler{"slot tracker": dynamoselect.Tracker(s.dynamo()),
		"selection": dynamoselect.Selection(s.dynamo())} {
		server := httptest.NewServer(face)
		defer server.Close()
		for _, method := range []string{http.MethodGet, http.MethodHead} {
			r, err := http.NewRequestWithContext(ctx, method, server.URL+"/health", nil)
			if err != nil {
				t.Fatal(err)
			}
			answer, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			answer.Body.Close()
			want := ""
			if name == "selection" {
				want = api.JSON
			}
			if got := answer.Header.Get("Content-Type"); answer.StatusCode != http.StatusOK || got != want {
				t.Errorf("%s: %s /health: %d, content type %q, want %q", name, method, answer.StatusCode, got, want)
			}
		}
	}
}

var eventSources = regexp.MustCompile(`, "kv_events_endpoints": \{[^}]*\}`)

// FuzzDynamoServices sends random requests to both services of Dynamo. Every reply is JSON or an error text, and no
// reply is an internal error.
func FuzzDynamoServices(f *testing.F) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	nats := natskit.Start(f, natsserver.Options{})
	for _, section := range exchanges(f, "transcript-1.6.1.txt") {
		for _, e := range section {
			f.Add(e.tracker, e.method, e.path, eventSources.ReplaceAll([]byte(e.body), nil))
		}
	}
	s, end := serveDynamo(ctx, f, nats, "fuzz")
	defer end()
	selection, tracker := dynamoselect.Selection(s.dynamo()), dynamoselect.Tracker(s.dynamo())
	f.Fuzz(func(t *testing.T, tracked bool, method, path string, body []byte) {
		at, err := url.ParseRequestURI(path)
		if err != nil || bytes.Contains(body, []byte("_endpoint")) {
			return // an invalid request, or a request that connects to a random address
		}
		r := &http.Request{Method: method, URL: at, Header: http.Header{"Content-Type": {"application/json"}},
			Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)), Host: "127.0.0.1"}
		w := httptest.NewRecorder()
		if tracked {
			tracker.ServeHTTP(w, r)
		} else {
			selection.ServeHTTP(w, r)
		}
		isJSON := w.Header().Get("Content-Type") == api.JSON
		if w.Body.Len() == 0 && method != http.MethodHead && w.Header().Get("Content-Type") != "" {
			t.Errorf("%s %s %q: a content type without a body", method, path, body)
		}
		if w.Code == http.StatusInternalServerError || isJSON && w.Body.Len() > 0 && !json.Valid(w.Body.Bytes()) {
			t.Errorf("%s %s %q: %d %s", method, path, body, w.Code, w.Body)
		}
	})
}

// play sends all requests of a section and compares the replies.
func play(t *testing.T, file string, section []exchange, s *Server) {
	t.Helper()
	selection := dynamoselect.Selection(s.dynamo())
	tracker := dynamoselect.Tracker(s.dynamo())
	for _, e := range section {
		body := pinned(e)
		r := httptest.NewRequest(e.method, e.path, strings.NewReader(body))
		if e.method == http.MethodPost || e.method == http.MethodPatch || e.method == http.MethodPut {
			r.Header.Set("Content-Type", "application/json")
		}
		w := httptest.NewRecorder()
		if e.tracker || e.path == "/register" {
			tracker.ServeHTTP(w, r)
		} else {
			selection.ServeHTTP(w, r)
		}
		want, is := normal(e.answer), normal(w.Body.String())
		if e.method == http.MethodHead {
			is = want
		}
		cut := strings.HasPrefix(e.answer, "[") && !json.Valid([]byte(e.answer)) ||
			strings.HasPrefix(e.answer, "{") && !json.Valid([]byte(e.answer))
		if w.Code != e.status || !cut && e.answer != "-" && !reflect.DeepEqual(is, want) {
			t.Errorf("%s: %s %s %.300s\n  is %d %s\nwant %d %s", file, e.method, e.path, body, w.Code, w.Body, e.status,
				e.answer)
		}
	}
}

// pinned returns a request for the chosen worker of the transcript, because ties are broken at random.
func pinned(e exchange) string {
	var q, a map[string]any
	if !strings.HasPrefix(e.path, "/select") || json.Unmarshal([]byte(e.body), &q) != nil || e.status != 200 ||
		json.Unmarshal([]byte(e.answer), &a) != nil || q["pinned_worker"] != nil {
		return e.body
	}
	q["pinned_worker"] = map[string]any{"worker_id": a["worker_id"], "dp_rank": a["dp_rank"]}
	text, err := json.Marshal(q)
	if err != nil {
		return e.body
	}
	return string(text)
}

var emptyModel = regexp.MustCompile(`\{"model_name":"[^"]*","routing_group":"[^"]*","loads":\[\],[^}]*\},?`)

// normal returns a reply with sorted rows and without models without workers.
func normal(text string) any {
	text = strings.Replace(emptyModel.ReplaceAllString(text, ""), "},]", "}]", 1)
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var v any
	if d.Decode(&v) != nil {
		return text
	}
	return sorted(v)
}

func sorted(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = sorted(v[i])
		}
		if len(v) > 0 {
			if row, is := v[0].(map[string]any); is && row["dp_rank"] != nil {
				slices.SortFunc(v, func(a, b any) int {
					x, _ := json.Marshal(a)
					y, _ := json.Marshal(b)
					return bytes.Compare(x, y)
				})
			}
		}
	case map[string]any:
		for name := range v {
			v[name] = sorted(v[name])
			if list, is := v[name].([]any); is && name == "taints" {
				slices.SortFunc(list, func(a, b any) int { return strings.Compare(a.(string), b.(string)) })
			}
		}
	}
	return v
}

// TestDynamoPortsAreGuarded: the ports of Dynamo's services have the HTTP port's rules, and Dynamo's form of errors.
func TestDynamoPortsAreGuarded(t *testing.T) {
	s := &Server{Settings: Settings{HTTPTokens: tokens(t, "0123456789abcdef"), QueryWorkers: 1},
		intake: web.Intake{Most: maxBodies}}
	in := func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "in") }
	mux := web.NewMux()
	mux.Handle("/health", web.Rules{http.MethodGet: {Needs: rights.Anybody, Cost: web.Probe}}, in)
	mux.Handle("/loads", web.Rules{http.MethodGet: web.Reads}, in)
	mux.Handle("/select", web.Rules{http.MethodPost: web.Chooses}, in)
	h := s.guarded(mux, denyAsDynamo)
	for _, c := range []struct {
		path, token, origin string
		status              int
		want                string
	}{
		{"/health", "", "", 200, "in"},
		{"/ready", "", "", 401, `{"error":"this port requires a bearer token`},
		{"/loads", "0123456789abcdef", "", 200, "in"},
		{"/loads", "0123456789abcdee", "", 401, `{"error":"`},
	} {
		r := httptest.NewRequest(http.MethodGet, c.path, nil)
		if c.token != "" {
			r.Header.Set("Authorization", "Bearer "+c.token)
		}
		w := httptest.NewRecorder()
		if h.ServeHTTP(w, r); w.Code != c.status || !strings.HasPrefix(w.Body.String(), c.want) {
			t.Errorf("%s: %d %s, want %d %s", c.path, w.Code, w.Body, c.status, c.want)
		}
	}
	s.HTTPTokens = nil
	r := httptest.NewRequest(http.MethodPost, "/select", nil)
	r.Host = "evil.example"
	w := httptest.NewRecorder()
	if h := s.guarded(mux, denyAsDynamo); !cli.OwnHost("127.0.0.1:1") {
		t.Fatal("the test's host is not our own")
	} else if h.ServeHTTP(w, r); w.Code != 403 || !strings.HasPrefix(w.Body.String(), `{"error":"the request is for`) {
		t.Errorf("another host: %d %s", w.Code, w.Body)
	}
}
