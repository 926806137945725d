//go:build judges

package envoy

import (
	"crypto/x509"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
)

// commented matches the lines of deploy/envoy for mutual TLS.
var commented = regexp.MustCompile(`(?m)^      # ( *(?:transport_socket|name|typed_config|"@type"|common_tls_context|` +
	`tls_certificates|- certificate_chain|private_key|validation_context|trusted_ca):.*)$`)

// mutualTLS returns the edits that enable the commented lines of deploy/envoy with the given files. An empty cert
// removes the gateway's certificate.
func mutualTLS(t *testing.T, ca, cert, key string) (edits []string) {
	t.Helper()
	text, err := os.ReadFile(root + "/deploy/envoy/envoy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	lines := commented.FindAllStringSubmatch(string(text), -1)
	if len(lines) != 10 {
		t.Fatalf("deploy/envoy has %d lines for mutual TLS", len(lines))
	}
	files := strings.NewReplacer("ca.crt", ca, "gateway.crt", cert, "gateway.key", key)
	for _, line := range lines {
		without := cert == "" && regexp.MustCompile(`tls_certificates|certificate_chain|private_key`).MatchString(line[1])
		if !without {
			edits = append(edits, line[0], "      "+files.Replace(line[1]))
		}
	}
	return edits
}

// tokenFile writes a file of tokens.
func tokenFile(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(file, []byte("0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestGatewaysWithoutTokens runs Envoy with deploy/envoy and without a token. The second turn of a chat goes to the
// worker of the first turn with --grpc-insecure and with mutual TLS. Otherwise requests go round robin, and the indexer
// counts the refusals.
func TestGatewaysWithoutTokens(t *testing.T) {
	ca, other := harness.NewAuthority(t), harness.NewAuthority(t)
	server, serverKey := ca.Issue("indexer", x509.ExtKeyUsageServerAuth)
	cert, key := ca.Issue("gateway", x509.ExtKeyUsageClientAuth)
	strange, strangeKey := other.Issue("gateway", x509.ExtKeyUsageClientAuth)
	tls := []string{"--grpc-client-ca", ca.File, "--http-cert", server, "--http-key", serverKey}
	tokens := []string{"--http-token-file", tokenFile(t)}
	for _, c := range []struct {
		name    string
		flags   []string
		edits   []string
		chooses bool
		outcome string // expected outcome in the indexer's metric; empty without a call
	}{
		{"insecure", append(tokens, "--grpc-insecure"), nil, true, "ok"},
		{"mutual TLS", tls, mutualTLS(t, ca.File, cert, key), true, "ok"},
		{"mutual TLS beside tokens", append(tokens, tls...), mutualTLS(t, ca.File, cert, key), true, "ok"},
		{"neither", tokens, nil, false, "unauthorized"},
		{"no certificate", tls, mutualTLS(t, ca.File, "", ""), false, "unauthorized"},
		{"a certificate of another authority", tls, mutualTLS(t, ca.File, strange, strangeKey), false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := startWith(t, c.flags, c.edits...)
			chosen := 0
			for chat := range 6 {
				prompt := harness.Tokens(chat*100_000, 40*blockSize)
				first := g.do("POST", "/v1/completions", completion(false, prompt))
				second := g.do("POST", "/v1/completions", completion(false, append(prompt, harness.Tokens(9_000_000, 64)...)))
				if !first.whole(false) || !second.whole(false) {
					t.Fatal(first, second)
				}
				if second.engine == first.engine {
					chosen++
				}
			}
			if (chosen == 6) != c.chooses {
				t.Errorf("%d of 6 second turns went to the worker of the first", chosen)
			}
			if counted := g.outcomes(); c.outcome != "" && counted[c.outcome] == 0 || c.outcome == "" && len(counted) > 0 {
				t.Errorf("the indexer counts %v of gateways, want %q", counted, c.outcome)
			}
		})
	}
}

// outcomes returns the indexer's numbers of gateway calls by outcome.
func (g *gateway) outcomes() map[string]uint64 {
	g.t.Helper()
	counted := map[string]uint64{}
	for _, r := range harness.Status(g.t, g.indexer.NATS).Requests {
		if r.Operation == "Process" {
			counted[r.Outcome] += r.Count
		}
	}
	return counted
}
