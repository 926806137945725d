package externalmetrics

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// vectors reads a file of testdata, which has the encoding of Kubernetes' types.
func vectors(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// fleet is the fleet of testdata/README.md.
var fleet = map[string]api.Scaling{
	"llama":             {WaitingUncachedTokens: 84500, QueuedUncachedTokens: 2000, QueuedRequests: 3},
	"meta-llama/Llama3": {WaitingUncachedTokens: 30000},
}

// config returns the configuration for a fleet. The counts of outcomes are added to ended.
func config(fleet map[string]api.Scaling, ended map[string]int) Config {
	var mu sync.Mutex
	return Config{
		Models: func() ([]string, error) { return slices.Sorted(maps.Keys(fleet)), nil },
		Scaling: func(_ context.Context, q *api.ScalingRequest) (*api.Scaling, error) {
			s := fleet[q.Model]
			return &s, nil
		},
		Now: func() time.Time { return time.Unix(1_800_000_000, 5).In(time.FixedZone("", 3600)) },
		Ended: func(op, outcome string) {
			mu.Lock()
			defer mu.Unlock()
			ended[op+" "+outcome]++
		},
	}
}

// request sends a request of an API server.
func request(h http.Handler, method, path string) *httptest.ResponseRecorder {
	r, w := httptest.NewRequest(method, path, nil), httptest.NewRecorder()
	r.Header.Set("X-Remote-User", "system:serviceaccount:kube-system:horizontal-pod-autoscaler")
	h.ServeHTTP(w, r)
	return w
}

const waiting = "/apis/external.metrics.k8s.io/v1beta1/namespaces/inference/kvatlas-waiting-uncached-tokens"

// TestEncoding compares the objects with the encoding of Kubernetes' types.
func TestEncoding(t *testing.T) {
	ended := map[string]int{}
	h := Handler(config(fleet, ended))
	for file, path := range map[string]string{
		"apis.json":      "/apis",
		"group.json":     "/apis/external.metrics.k8s.io",
		"resources.json": "/apis/external.metrics.k8s.io/v1beta1",
		"values.json":    waiting,
		"status.json":    waiting + "?labelSelector=model",
	} {
		h := h
		if file == "status.json" {
			h = Handler(config(map[string]api.Scaling{"m": {Missing: []string{"n2"}}}, ended))
		}
		w := request(h, "GET", path)
		if want := vectors(t, file); !bytes.Equal(w.Body.Bytes(), bytes.TrimSpace(want)) {
			t.Errorf("%s: %s\nwant %s", path, w.Body, want)
		}
		if got := w.Header().Get("Content-Type"); got != "application/json" {
			t.Errorf("%s: content type %q", path, got)
		}
	}
	if ended["external_metrics ok"] != 4 || ended["external_metrics unavailable"] != 1 {
		t.Errorf("outcomes %v", ended)
	}
}

// TestRequests sends requests with selectors and errors.
func TestRequests(t *testing.T) {
	twins := map[string]api.Scaling{"a/b": {}, "a_b": {}, "c": {WaitingUncachedTokens: 7}}
	for _, c := range []struct {
		fleet        map[string]api.Scaling
		method, path string
		code         int
		want         string // values of the models in order, or a part of the message
	}{
		{fleet, "GET", waiting, 200, "84500 30k"},
		{fleet, "GET", waiting + "?labelSelector=model%3Dllama", 200, "84500"},
		{fleet, "GET", waiting + "?labelSelector=model=meta-llama_Llama3&limit=5", 200, "30k"},
		{fleet, "GET", waiting + "?labelSelector=model+in+(llama,x),!tier", 200, "84500"},
		{fleet, "GET", waiting + "?labelSelector=model=other", 200, ""},
		{fleet, "GET", waiting + "?labelSelector=tier=gold", 200, ""},
		{fleet, "GET", strings.Replace(waiting, "waiting-uncached-tokens", "queued-requests", 1), 200, "3 0"},
		{fleet, "GET", strings.Replace(waiting, "waiting", "queued", 1), 200, "2k 0"},
		{fleet, "HEAD", waiting, 200, "84500 30k"},
		{fleet, "GET", waiting + "?labelSelector=model%3D%28", 400, "BadRequest"},
		{fleet, "GET", waiting + "?labelSelector=a&labelSelector=b", 400, "BadRequest"},
		{fleet, "GET", waiting + "?fieldSelector=a", 400, "BadRequest"},
		{fleet, "GET", waiting + "?labelSelector=%zz", 400, "BadRequest"},
		{fleet, "GET", strings.Replace(waiting, "waiting", "other", 1), 404, "NotFound"},
		{fleet, "GET", "/v1/scaling?model=llama", 404, "NotFound"},
		{fleet, "GET", "/openapi/v2", 404, "NotFound"},
		{fleet, "GET", "/", 404, "NotFound"},
		{fleet, "POST", waiting, 405, "MethodNotAllowed"},
		{fleet, "DELETE", "/apis", 405, "MethodNotAllowed"},
		{twins, "GET", waiting, 409, "Conflict"},
		{twins, "GET", waiting + "?labelSelector=model=c", 200, "7"},
		{twins, "GET", waiting + "?labelSelector=model=a_b", 409, "Conflict"},
	} {
		w := request(Handler(config(c.fleet, map[string]int{})), c.method, c.path)
		var got struct {
			Reason string
			Code   int
			Items  []struct{ Value string }
		}
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || w.Code != c.code {
			t.Errorf("%s %s: %d %s, %v; want %d", c.method, c.path, w.Code, w.Body, err, c.code)
			continue
		}
		var values []string
		for _, i := range got.Items {
			values = append(values, i.Value)
		}
		is := strings.Join(values, " ")
		if c.code != 200 {
			if is = got.Reason; got.Code != c.code {
				t.Errorf("%s %s: the status has the code %d", c.method, c.path, got.Code)
			}
		}
		if is != c.want {
			t.Errorf("%s %s: %s, want %s", c.method, c.path, is, c.want)
		}
	}
}

// TestOnlyAPIServers: a request without the name of a client, or with several, is no request of an API server.
func TestOnlyAPIServers(t *testing.T) {
	h := Handler(config(fleet, map[string]int{}))
	for _, names := range [][]string{nil, {""}, {"a", "b"}} {
		r, w := httptest.NewRequest("GET", waiting, nil), httptest.NewRecorder()
		r.Header["X-Remote-User"] = names
		if h.ServeHTTP(w, r); w.Code != 401 || !strings.Contains(w.Body.String(), `"reason":"Unauthorized"`) {
			t.Errorf("%q: %d %s", names, w.Code, w.Body)
		}
	}
}

// TestRunningRequests: the running requests have a bound. Later requests are served again.
func TestRunningRequests(t *testing.T) {
	c, hold := config(fleet, map[string]int{}), make(chan struct{})
	var begun, done sync.WaitGroup
	begun.Add(maxRunning)
	c.Scaling = func(context.Context, *api.ScalingRequest) (*api.Scaling, error) {
		begun.Done()
		<-hold
		return &api.Scaling{}, nil
	}
	h := Handler(c)
	for range maxRunning {
		done.Go(func() {
			if w := request(h, "GET", waiting+"?labelSelector=model=llama"); w.Code != 200 {
				t.Errorf("%d %s", w.Code, w.Body)
			}
		})
	}
	begun.Wait()
	w := request(h, "GET", "/apis")
	if w.Code != 429 || w.Header().Get("Retry-After") == "" || !strings.Contains(w.Body.String(), "TooManyRequests") {
		t.Errorf("beyond the bound: %d %s", w.Code, w.Body)
	}
	close(hold)
	done.Wait()
	if w := request(h, "GET", "/apis"); w.Code != 200 {
		t.Errorf("afterwards: %d %s", w.Code, w.Body)
	}
}

// TestQuantities compares quantities with Kubernetes'.
func TestQuantities(t *testing.T) {
	var list []struct {
		Number uint64
		Text   string
	}
	if err := json.Unmarshal(vectors(t, "quantities.json"), &list); err != nil || len(list) < 10 {
		t.Fatal(len(list), err)
	}
	for _, v := range list {
		if got := quantity(v.Number); got != v.Text {
			t.Errorf("%d is %s, want %s", v.Number, got, v.Text)
		}
	}
}

// TestSelectors compares the parser with Kubernetes', by random selectors.
func TestSelectors(t *testing.T) {
	var of struct {
		Labels    []map[string]string
		Selectors []struct {
			Selector string
			Invalid  bool
			Matches  []bool // of Labels
		}
	}
	if err := json.Unmarshal(vectors(t, "selectors.json"), &of); err != nil || len(of.Selectors) < 100 {
		t.Fatal(len(of.Selectors), err)
	}
	for _, v := range of.Selectors {
		s, err := parseSelector(v.Selector)
		if (err != nil) != v.Invalid {
			t.Errorf("%q: %v, want invalid: %v", v.Selector, err, v.Invalid)
			continue
		}
		for i, labels := range of.Labels {
			if err == nil && s.matches(labels) != v.Matches[i] {
				t.Errorf("%q matches %v: %v", v.Selector, labels, !v.Matches[i])
			}
		}
	}
	if _, err := parseSelector("model=" + strings.Repeat("a", maxSelector)); err == nil {
		t.Error("a long selector is valid")
	}
}

// TestLabels: labels are valid in Kubernetes for all names of models.
func TestLabels(t *testing.T) {
	for model, want := range map[string]string{
		"llama": "llama", "meta-llama/Llama-3.1-8B": "meta-llama_Llama-3.1-8B", "llama:batch": "llama_batch",
		"/models/qwen/": "models_qwen", "modèle": "mod_le", "": "", "//": "",
		strings.Repeat("ab", 40): strings.Repeat("ab", 31) + "a",
	} {
		if got := labelOf(model); got != want || got != "" && !isName.MatchString(got) || len(got) > maxLabel {
			t.Errorf("%q has the label %q, want %q", model, got, want)
		}
	}
}

// FuzzSelector: no selector ends the process, and a valid selector has a bounded number of requirements.
func FuzzSelector(f *testing.F) {
	for _, s := range []string{"", "model=llama", "model in (a, b),!tier", "x notin (),y", "a==b,c!=", "=,(((", "!!a"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parseSelector(text)
		if err == nil && len(s) > len(text)/2+1 {
			t.Errorf("%q has %d requirements", text, len(s))
		}
		for _, r := range s {
			long := slices.ContainsFunc(r.values, func(v string) bool { return len(v) > maxLabel })
			if err := checkKey(r.key); err != nil || long {
				t.Errorf("%q has the requirement %+v", text, r)
			}
		}
		s.matches(map[string]string{"model": "llama"})
	})
}
