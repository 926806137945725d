package server

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// anything is an indexer that answers every request.
type anything struct{ api.Indexer }

func (*anything) Find(_ context.Context, q *api.Query) (*api.Answer, error) {
	return &api.Answer{Model: q.Model, Complete: true, Workers: []api.Overlap{{Instance: "w1", Device: 12}}}, nil
}

func (*anything) Workers(context.Context, api.WorkersRequest) (*api.WorkerList, error) {
	return &api.WorkerList{}, nil
}

func (*anything) Snapshot(context.Context) (*api.SnapshotList, error) {
	return &api.SnapshotList{}, nil
}

// TestHTTPRefuses checks that every refusal over HTTP has an error of the catalogue in the format of the request, and
// is counted.
func TestHTTPRefuses(t *testing.T) {
	var outcomes outcomes
	h := front(&anything{}, func(op, outcome string) { outcomes.Count(api.OverHTTP, op, outcome) })
	const query = `{"model":"m","tokens":[1]}`
	packed, _ := api.Marshal(api.MsgPack, &api.Query{Model: "m", Tokens: api.Tokens{1}})
	asked := 0
	for _, c := range []struct {
		method, path, contentType, deadline, body string
		status                                    int
		code                                      api.Code // empty for a successful request
		want                                      string
	}{
		{"POST", "/v1/find", api.JSON, "", query, 200, "", `"model":"m"`},
		{"POST", "/v1/find", api.JSON, "18446744073709551615", query, 200, "", `"model":"m"`},
		{"POST", "/v1/find", "application/json; charset=utf-8", "1000", query, 200, "", `"model":"m"`},
		{"POST", "/v1/find", "Application/JSON", "", query, 200, "", `"model":"m"`},
		{"POST", "/v1/find", api.MsgPack, "", string(packed), 200, "", "\xa5model\xa1m"},
		{"POST", "/v1/find", "application/x-msgpack", "", string(packed), 200, "", "\xa5model\xa1m"},
		{"POST", "/v1/snapshot", "", "", "", 200, "", "snapshots"},
		{"GET", "/v1/workers", "", "", "", 200, "", "workers"},
		{"HEAD", "/v1/workers", "", "", "", 200, "", ""},
		{"GET", "/v1/workers", api.JSON, "", "null", 200, "", "workers"},

		{"GET", "/v1/find", "", "", "", 405, api.CodeWrongMethod, "/v1/find supports POST, not GET"},
		{"OPTIONS", "/v1/find", "", "", "", 405, api.CodeWrongMethod, "supports POST"},
		{"PUT", "/v1/workers", api.JSON, "", query, 405, api.CodeWrongMethod, "supports GET"},
		{"POST", "/healthz", api.JSON, "", query, 405, api.CodeWrongMethod, "supports GET"},
		{"GET", "/v1/nothing", "", "", "", 404, api.CodeUnknownOperation, "/v1/nothing"},
		{"POST", "/v1/find", "", "", query, 415, api.CodeWrongContentType,
			`send the header "Content-Type: application/json"`},
		{"POST", "/v1/find", "text/plain", "", query, 415, api.CodeWrongContentType, `"Content-Type: application/json"`},
		{"POST", "/v1/find", "application/x-www-form-urlencoded", "", query, 415, api.CodeWrongContentType,
			"application/x-www-form-urlencoded"},
		{"POST", "/v1/find", "multipart/form-data; boundary=x", "", query, 415, api.CodeWrongContentType, "multipart"},
		{"POST", "/v1/find", ";;", "", query, 415, api.CodeWrongContentType, ";;"},
		{"POST", "/v1/snapshot", "text/plain", "", "", 415, api.CodeWrongContentType, "text/plain"},
		{"POST", "/v1/find", api.JSON, "soon", query, 400, api.CodeMalformed,
			`the header Kv-Deadline-Ms is "soon", not a whole number`},
		{"POST", "/v1/find", api.JSON, "0", query, 400, api.CodeMalformed, `Kv-Deadline-Ms is "0"`},
		{"POST", "/v1/find", api.JSON, "-5", query, 400, api.CodeMalformed, `Kv-Deadline-Ms is "-5"`},
		{"POST", "/v1/find", api.MsgPack, "1.5", string(packed), 400, api.CodeMalformed, `Kv-Deadline-Ms is "1.5"`},
		{"POST", "/v1/find?model=m", api.JSON, "", query, 400, api.CodeMalformed,
			"accepts no parameters in the URL, such as model"},
		{"POST", "/v1/find", api.JSON, "", strings.Repeat(" ", api.MaxBody+1), 413, api.CodeTooLarge,
			"more than 8388608 bytes (8 MiB)"},
		{"POST", "/v1/find", api.JSON, "", `{"model":"m","tokens":[1],"lora":"a"}`, 400, api.CodeMalformed,
			`did you mean "lora_name"?`},
	} {
		r, w := httptest.NewRequest(c.method, c.path, strings.NewReader(c.body)), httptest.NewRecorder()
		if c.contentType != "" {
			r.Header.Set("Content-Type", c.contentType)
		}
		if c.deadline != "" {
			r.Header.Set("Kv-Deadline-Ms", c.deadline)
		}
		h.ServeHTTP(w, r)
		asked++
		form, _ := api.ContentType(c.contentType)
		name := fmt.Sprintf("%s %s %q %.40s", c.method, c.path, c.contentType, c.body)
		if w.Code != c.status || w.Header().Get("Content-Type") != form {
			t.Errorf("%s: %d %q %.200q, want %d", name, w.Code, w.Header().Get("Content-Type"), w.Body, c.status)
			continue
		}
		if c.code == "" {
			if !bytes.Contains(w.Body.Bytes(), []byte(c.want)) {
				t.Errorf("%s: %q, want %q", name, w.Body, c.want)
			}
			continue
		}
		var e api.ErrorBody
		if err := api.Unmarshal(form, w.Body.Bytes(), &e); err != nil || e.Error == nil || e.Error.Code != c.code ||
			!strings.Contains(e.Error.Message, c.want) {
			t.Errorf("%s: %q, want %s with %q", name, w.Body, c.code, c.want)
		}
		if allow := w.Header().Get("Allow"); (allow != "") != (c.status == 405) {
			t.Errorf("%s: Allow is %q", name, allow)
		}
	}
	counted := 0
	for _, n := range outcomes.Counts() {
		counted += int(n.Count)
	}
	if counted != asked {
		t.Errorf("%d of %d requests are counted: %v", counted, asked, outcomes.Counts())
	}
}

// TestStalledBody checks that a body without progress ends with 408 and an error text.
func TestStalledBody(t *testing.T) {
	t.Parallel()
	ended := make(chan string, 1)
	mux := front(&anything{}, func(_, outcome string) { ended <- outcome })
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// The time for the body begins here, so that a slow machine cannot exceed it while the header arrives.
		http.NewResponseController(w).SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		mux.ServeHTTP(w, r)
	}))
	defer server.Close()
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn,
		"POST /v1/find HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"mod")
	conn.SetReadDeadline(time.Now().Add(2 * time.Minute))
	text, err := io.ReadAll(conn)
	_, body, _ := bytes.Cut(text, []byte("\r\n\r\n"))
	var e api.ErrorBody
	if !bytes.HasPrefix(text, []byte("HTTP/1.1 408 ")) || json.Unmarshal(body, &e) != nil ||
		e.Error.Code != api.CodeRequestTimeout || !strings.Contains(e.Error.Message, "5 bytes arrived in time") {
		t.Errorf("%q %v", text, err)
	}
	if t.Failed() {
		return // without a request, no outcome arrives
	}
	if outcome := <-ended; outcome != string(api.CodeRequestTimeout) {
		t.Errorf("the outcome is %s", outcome)
	}
}

// front returns the operations over HTTP, as an indexer serves them.
func front(x api.Indexer, ended func(op, outcome string)) *web.Mux {
	mux := web.NewMux()
	(&httpFront{requests: api.Handler{Indexer: x}, ended: ended, deadline: ops.Deadline}).register(mux)
	return mux
}

// waits is an indexer that answers a query after the client is gone.
type waits struct {
	anything
	begun chan struct{}
}

func (w *waits) Find(ctx context.Context, _ *api.Query) (*api.Answer, error) {
	close(w.begun)
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestWhoAskedHasGone checks that a request of a disconnected client is counted as such, not as an internal error.
func TestWhoAskedHasGone(t *testing.T) {
	t.Parallel()
	x, ended := &waits{begun: make(chan struct{})}, make(chan string, 1)
	mux := web.NewMux()
	(&httpFront{
		requests: api.Handler{Indexer: x}, deadline: time.Hour, ended: func(_, outcome string) { ended <- outcome },
	}).register(mux)
	server := httptest.NewServer(mux)
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, "POST", server.URL+"/v1/find",
		strings.NewReader(`{"model":"m","tokens":[1]}`))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", api.JSON)
	go func() {
		<-x.begun
		cancel()
	}()
	if reply, err := http.DefaultClient.Do(r); err == nil {
		reply.Body.Close()
		t.Error("it was answered")
	}
	if outcome := <-ended; outcome != ops.Canceled {
		t.Errorf("the outcome is %s", outcome)
	}
}
