package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestHTTPSecurity: a port that others can reach needs a token, and with one nothing but the health checks is answered
// without it.
func TestHTTPSecurity(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for listen, good := range map[string]bool{"127.0.0.1:0": true, "[::1]:0": true, "localhost:0": true, "": true,
		":0": false, "0.0.0.0:0": false, "[::]:0": false, "10.0.0.1:0": false} {
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
	h := s.guard(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), func(string, string) {})
	for _, c := range []struct {
		path, header string
		want         int
	}{
		{"/v1/find", "", 401}, {"/register", "Bearer 0123456789abcdeX", 401}, {"/v1/find", "Basic 0123456789abcdef",
			401}, {"/metrics", "Bearer", 401},
		{"/v1/find", "Bearer 0123456789abcdef", 200}, {"/register", "bearer 0123456789abcdef", 200}, {"/healthz", "",
			200}, {"/readyz", "", 200},
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
	alone := (&httpSecurity{}).guard(passed, func(op, outcome string) { ended = append(ended, op+" "+outcome) })
	withToken := (&httpSecurity{token: []byte("0123456789abcdef")}).guard(passed, func(string, string) {})
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
	if len(ended) != 7 || ended[0] != "other forbidden" {
		t.Errorf("%q", ended)
	}
}

// certify writes a certificate for 127.0.0.1 that signs itself, and its key, and returns who trusts it.
func certify(t *testing.T, cert, key string) *x509.CertPool {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA:        true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	must(err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	must(err)
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	must(os.WriteFile(cert, text, 0o600))
	must(os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600))
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	return pool
}

// TestHTTPOverTLS asks over TLS, with the token and without, as one who trusts the certificate and as one who does not;
// and without TLS.
func TestHTTPOverTLS(t *testing.T) {
	dir := t.TempDir()
	const token = "0123456789abcdef0123"
	if err := os.WriteFile(filepath.Join(dir, "token"), []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &serving{httpListen: "127.0.0.1:0", security: httpSecurity{
		tokenFile: filepath.Join(dir, "token"), cert: filepath.Join(dir, "cert.pem"), key: filepath.Join(dir,
			"key.pem"),
	}}
	pool := certify(t, s.security.cert, s.security.key)
	if err := s.security.check(s.httpListen); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	front := api.NewHTTP(api.HTTPConfig{Ready: func() error { return nil }, Metrics: http.NotFoundHandler()})
	stop, err := s.serveHTTP(s.security.guard(front, func(string, string) {}),
		slog.New(slog.NewJSONHandler(&said, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	var line struct{ Listen string }
	if err := json.Unmarshal([]byte(said.String()), &line); err != nil || line.Listen == "" {
		t.Fatalf("it said %q", &said)
	}
	ask := func(url, token string, roots *x509.CertPool) (int, string, error) {
		t.Helper()
		r, err := http.NewRequest("GET", url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
		defer transport.CloseIdleConnections()
		reply, err := (&http.Client{Transport: transport, Timeout: 4 * time.Minute}).Do(r)
		if err != nil {
			return 0, "", err
		}
		defer reply.Body.Close()
		body, err := io.ReadAll(reply.Body)
		return reply.StatusCode, string(body), err
	}
	const path = "/v1/nothing" // where the answer is the server's own
	if code, body, err := ask("https://"+line.Listen+path, token, pool); code != 404 ||
		!strings.Contains(body, "unknown_operation") {
		t.Errorf("with the token: %d %s, %v", code, body, err)
	}
	if code, body, err := ask("https://"+line.Listen+path, "", pool); code != 401 ||
		!strings.Contains(body, "unauthorized") {
		t.Errorf("without a token: %d %s, %v", code, body, err)
	}
	if code, body, err := ask("https://"+line.Listen+"/readyz", "", pool); code != 200 ||
		!strings.Contains(body, "ready") {
		t.Errorf("readyz: %d %s, %v", code, body, err)
	}
	if code, _, err := ask("https://"+line.Listen+path, token, x509.NewCertPool()); err == nil {
		t.Errorf("one who does not trust the certificate got %d", code)
	}
	if code, body, err := ask("http://"+line.Listen+path, token, pool); err == nil &&
		(code != 400 || strings.Contains(body, "unknown_operation")) {
		t.Errorf("without TLS: %d %s", code, body)
	}
}
