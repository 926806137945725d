package server

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
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/web"
)

// certify writes a self-signed certificate for 127.0.0.1 with its key, and returns a pool that trusts the certificate.
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

// TestHTTPOverTLS sends requests over TLS with and without the token, with and without trust in the certificate, and
// requests without TLS.
func TestHTTPOverTLS(t *testing.T) {
	dir := t.TempDir()
	const token = "0123456789abcdef0123"
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	pool := certify(t, cert, key)
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	nothing := func(string, string) {}
	s := &Server{Settings: Settings{HTTPTokens: tokens(t, token), QueryWorkers: 10}}
	guarded := s.guarded(front(&anything{}, nothing), denyAsAPI)
	stop, err := web.Serve(web.Face{Listen: "127.0.0.1:0", What: "HTTP", Handler: guarded,
		TLS: &tls.Config{Certificates: []tls.Certificate{pair}}}, slog.New(slog.NewJSONHandler(&said, nil)))
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
	if code, body, err := ask("https://"+line.Listen+"/healthz", "", pool); code != 200 ||
		!strings.Contains(body, "ok") {
		t.Errorf("healthz: %d %s, %v", code, body, err)
	}
	if code, _, err := ask("https://"+line.Listen+path, token, x509.NewCertPool()); err == nil {
		t.Errorf("a client without trust in the certificate got %d", code)
	}
	if code, body, err := ask("http://"+line.Listen+path, token, pool); err == nil &&
		(code != 400 || strings.Contains(body, "unknown_operation")) {
		t.Errorf("without TLS: %d %s", code, body)
	}
}
