package integration

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// TestGatewayCertificates checks gRPC with --grpc-client-ca: a gateway's certificate signed by the authority replaces a
// token. A certificate of another authority does not, and a server's certificate does not.
func TestGatewayCertificates(t *testing.T) {
	t.Parallel()
	ca, other := harness.NewAuthority(t), harness.NewAuthority(t)
	cert, key := ca.Issue("indexer", x509.ExtKeyUsageServerAuth)
	const token = "0123456789abcdef"
	tokens := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(tokens, []byte("route "+token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	clients := map[string]func() (cert, key string){
		"":            func() (string, string) { return "", "" },
		"a gateway":   func() (string, string) { return ca.Issue("gateway", x509.ExtKeyUsageClientAuth) },
		"a server":    func() (string, string) { return ca.Issue("server", x509.ExtKeyUsageServerAuth) },
		"a stranger":  func() (string, string) { return other.Issue("gateway", x509.ExtKeyUsageClientAuth) },
		"itself sign": func() (string, string) { return other.File, strings.TrimSuffix(other.File, "crt") + "key" },
	}
	for _, c := range []struct {
		name string
		args []string
		may  map[string]codes.Code // by client and, behind a +, the token
		said string                // to a client without a certificate
	}{
		{"no token", nil, map[string]codes.Code{"": codes.Unauthenticated, "+token": codes.Unauthenticated,
			"a gateway": codes.OK}, "client certificate of an authority in --grpc-client-ca"},
		{"a token too", []string{"--http-token-file", tokens}, map[string]codes.Code{"": codes.Unauthenticated,
			"+token": codes.OK, "a gateway": codes.OK}, "bearer token"},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := harness.StartIndexer(t, t.TempDir(), "", append([]string{"--grpc-listen", "127.0.0.1:0", "--http-cert", cert,
				"--http-key", key, "--grpc-client-ca", ca.File}, c.args...)...)
			addr := x.WaitFor(`gRPC is served" listen=(\S+)`)[1]
			for _, client := range []string{"", "+token", "a gateway", "a server", "a stranger", "itself sign"} {
				who, with, _ := strings.Cut(client, "+")
				cert, key := clients[who]()
				err := process(t, addr, ca.File, cert, key, with != "", token)
				want, known := c.may[client]
				if !known {
					want = codes.Unavailable // the handshake fails
				}
				if status.Code(err) != want {
					t.Errorf("client %q: %v, want %v", client, err, want)
				}
				if client == "" && !strings.Contains(err.Error(), c.said) {
					t.Errorf("without a certificate: %v", err)
				}
			}
		})
	}
}

// process opens a stream of a gateway and ends the stream. The error is nil if the indexer has replied.
func process(t *testing.T, addr, ca, cert, key string, withToken bool, token string) error {
	t.Helper()
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AppendCertsFromPEM([]byte(readFile(t, ca)))
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		// for any request of the server
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	if withToken {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	stream, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
	if err != nil {
		return err
	}
	err = stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{
		RequestHeaders: &extprocv3.HttpHeaders{EndOfStream: true}}})
	if err != nil {
		_, err = stream.Recv()
		return err
	}
	_, err = stream.Recv()
	return err
}

// TestClientCAFlags checks that a file without authorities, and a port without TLS, are refused with the name of the
// flag.
func TestClientCAFlags(t *testing.T) {
	t.Parallel()
	ca := harness.NewAuthority(t)
	_, key := ca.Issue("indexer", x509.ExtKeyUsageServerAuth)
	for _, c := range []struct {
		args []string
		said string
	}{
		{[]string{"--grpc-client-ca", ca.File}, "--grpc-client-ca has no effect without --grpc-listen"},
		{[]string{"--grpc-listen", "127.0.0.1:0", "--grpc-client-ca", ca.File}, "--http-cert and --http-key"},
		{[]string{"--grpc-listen", "127.0.0.1:0", "--grpc-client-ca", key}, "has no certificate in PEM"},
		{[]string{"--grpc-listen", "127.0.0.1:0", "--grpc-client-ca", key + "-none"}, "no such file"},
		{[]string{"--grpc-listen", "0.0.0.0:0"}, "--http-token-file"},
		{[]string{"--grpc-listen", "0.0.0.0:0", "--grpc-insecure"}, "--http-token-file"},
	} {
		r := harness.Run(t, "indexer", append([]string{"serve", "--data", t.TempDir()}, c.args...)...)
		if r.Code != 2 || !strings.Contains(r.Stderr, c.said) {
			t.Errorf("%v: %d %s; want %s", c.args, r.Code, r.Stderr, c.said)
		}
	}
}
