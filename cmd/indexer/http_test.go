package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
)

// TestHTTPSecurity: a port that others can reach needs a token, and with one nothing but the health checks is answered without it.
func TestHTTPSecurity(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for listen, good := range map[string]bool{"127.0.0.1:0": true, "[::1]:0": true, "localhost:0": true, "": true, ":0": false, "0.0.0.0:0": false, "[::]:0": false, "10.0.0.1:0": false} {
		if err := (&httpSecurity{}).check(listen); (err == nil) != good {
			t.Errorf("%q without a token: %v", listen, err)
		}
		if err := (&httpSecurity{tokenFile: file}).check(listen); err != nil {
			t.Errorf("%q with a token: %v", listen, err)
		}
	}
	for name, s := range map[string]*httpSecurity{
		"half a pair": {cert: "x"}, "no such pair": {cert: "x", key: "y"}, "no such token": {tokenFile: "/nonexistent"},
	} {
		if s.check("127.0.0.1:0") == nil {
			t.Errorf("%s is taken", name)
		}
	}
	s := &httpSecurity{tokenFile: file}
	if err := s.check(":0"); err != nil {
		t.Fatal(err)
	}
	h := s.guard(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for _, c := range []struct {
		path, header string
		want         int
	}{
		{"/v1/find", "", 401}, {"/register", "Bearer 0123456789abcdeX", 401}, {"/v1/find", "Basic 0123456789abcdef", 401}, {"/metrics", "Bearer", 401},
		{"/v1/find", "Bearer 0123456789abcdef", 200}, {"/register", "bearer 0123456789abcdef", 200}, {"/healthz", "", 200}, {"/readyz", "", 200},
	} {
		r, w := httptest.NewRequest("GET", c.path, nil), httptest.NewRecorder()
		r.Header.Set("Authorization", c.header)
		if h.ServeHTTP(w, r); w.Code != c.want {
			t.Errorf("%s with %q: %d, want %d", c.path, c.header, w.Code, c.want)
		}
	}
}
