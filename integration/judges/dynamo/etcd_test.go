//go:build judges

package dynamo

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/ingest/dynamo"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// TestEventPlaneOverEtcd runs Dynamo's own publishers with registrations in a real etcd, their default. The index must
// be equal to the engines, also after kills of the workers' process and of etcd.
func TestEventPlaneOverEtcd(t *testing.T) {
	etcd := pyenv.StartEtcd(t, http.DefaultClient, "", "")
	p := startPlane(t, etcd.URL, false)
	p.serve(30)
	shim := p.shim()
	p.equal("after a late start")
	p.serve(100)
	p.equal("live")

	// Kill the workers' process. The lease in etcd ends, and the shim drops the publisher. Then start another process.
	p.workers.Kill()
	shim.WaitFor(`has gone".*rank=0`)
	shim.WaitFor(`has gone".*rank=1`)
	p.workers = pyenv.StartDynamoWorkers(t, p.discovery, "", planeBlock)
	p.open(0)
	p.open(1)
	p.prompts = nil
	p.serve(30)
	p.equal("with another process")

	// Kill etcd. Known publishers remain connected.
	etcd.Kill()
	shim.WaitFor("discovery cannot be read")
	p.serve(30)
	p.equal("without etcd")
	etcd.Start(http.DefaultClient)
	p.workers.Do(map[string]any{"op": "close", "rank": 1}, nil)
	shim.WaitFor(`has gone".*worker=` + p.workers.Worker + `.*rank=1`)
	p.open(1)
	p.serve(30)
	p.equal("with etcd again, and another publisher of a rank")
}

// TestEtcdAsItIs sends requests to a real etcd, over TLS and with users, for more records than an answer can have, and
// compacts the revisions of a watch.
func TestEtcdAsItIs(t *testing.T) {
	cert, key, trust := certificate(t)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: trust}}}
	etcd := pyenv.StartEtcd(t, client, cert, key)
	type text = map[string]any
	token := ""
	do := func(path string, asked text) []byte {
		t.Helper()
		body, err := json.Marshal(asked)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, "POST", etcd.URL+path, bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			r.Header.Set("Authorization", token)
		}
		answer, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		var said []byte
		if path == "/v3/watch" { // a watch stays open
			in := bufio.NewReader(answer.Body)
			for range 2 {
				var line []byte
				line, err = in.ReadBytes('\n')
				said = append(said, line...)
			}
		} else {
			said, err = io.ReadAll(answer.Body)
		}
		if err != nil || answer.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s: %s, %v", path, answer.Status, said, err)
		}
		return said
	}
	key0, keyEnd := []byte("v1/event_"), []byte("v1/event`")
	do("/v3/auth/user/add", text{"name": "root", "password": "top"})
	do("/v3/auth/user/add", text{"name": "reader", "password": "secret"})
	do("/v3/auth/role/add", text{"name": "root"})
	do("/v3/auth/role/add", text{"name": "events"})
	do("/v3/auth/role/grant", text{"name": "events", "perm": text{"permType": "READ", "key": key0, "range_end": keyEnd}})
	do("/v3/auth/user/grant", text{"user": "root", "role": "root"})
	do("/v3/auth/user/grant", text{"user": "reader", "role": "events"})
	do("/v3/auth/enable", text{})
	var root struct{ Token string }
	if err := json.Unmarshal(do("/v3/auth/authenticate", text{"name": "root", "password": "top"}), &root); err != nil {
		t.Fatal(err)
	}
	token = root.Token
	name := func(i int) []byte { return fmt.Appendf(nil, "v1/event_channels/namespace/ns/topic/kv-events/%x", i) }
	put := func(i int) {
		do("/v3/kv/put", text{"key": name(i), "value": fmt.Appendf(nil, `{"type":"EventChannel","scope":{"namespace":"ns"},`+
			`"topic":"kv-events","instance_id":%d,"transport":{"kind":"Zmq","config":{"endpoint":"tcp://192.0.2.1:%d"}}}`, i, i)})
	}
	const most = 700 // more than a page
	for i := range most {
		put(i)
	}
	do("/v3/kv/put", text{"key": []byte("v1/instances/x"), "value": []byte("{}")})

	copyOf := func(user, password string) *dynamo.Etcd {
		e, err := dynamo.NewEtcd(dynamo.EtcdConfig{URLs: []string{etcd.URL}, User: user, Password: password,
			TLS: &tls.Config{RootCAs: trust}})
		if err != nil {
			t.Fatal(err)
		}
		go e.Run(t.Context())
		return e
	}
	e := copyOf("reader", "secret")
	count := func(n int) func() (bool, string) {
		return func() (bool, string) {
			list, wrong, err := e.Publishers()
			return len(list) == n && len(wrong) == 0 && err == nil, fmt.Sprint(len(list), wrong, err)
		}
	}
	harness.Eventually(t, "all are listed, without cards", func() (bool, string) {
		list, wrong, err := e.Publishers()
		return len(list) == most && err == nil && strings.Contains(fmt.Sprint(wrong), "prefix v1/mdc/") &&
			strings.Contains(fmt.Sprint(wrong), "permission denied"), fmt.Sprint(len(list), wrong, err)
	})
	do("/v3/auth/role/grant", text{"name": "events", "perm": text{"permType": "READ", "key": []byte("v1/mdc/"),
		"range_end": []byte("v1/mdc0")}})
	harness.Eventually(t, "all are listed, with cards", count(most))
	put(most)
	harness.Eventually(t, "one more", count(most+1))
	do("/v3/kv/deleterange", text{"key": name(3)})
	harness.Eventually(t, "one less", count(most))
	for _, c := range [][3]string{{"", "", "user name is empty"}, {"reader", "guess", "authentication failed"}} {
		bad := copyOf(c[0], c[1])
		harness.Eventually(t, "refused: "+c[2], func() (bool, string) {
			_, _, err := bad.Publishers()
			return err != nil && strings.Contains(err.Error(), c[2]), fmt.Sprint(err)
		})
	}

	// A watch with a compacted revision gets the same answer from the fake etcd of the unit test.
	do("/v3/kv/compaction", text{"revision": 500, "physical": true})
	said := do("/v3/watch", text{"create_request": text{"key": key0, "range_end": keyEnd, "start_revision": 3}})
	if lines := bytes.Split(bytes.TrimSpace(said), []byte("\n")); len(lines) != 2 ||
		!bytes.Contains(lines[0], []byte(`"created":true`)) || !bytes.Contains(lines[1], []byte(`"canceled":true`)) ||
		!bytes.Contains(lines[1], []byte(`"compact_revision":"500"`)) {
		t.Errorf("the reply to a watch of a compacted revision is %s", said)
	}
}

// certificate writes a certificate of 127.0.0.1 with its key to files, and returns a pool that trusts the certificate.
func certificate(t *testing.T) (cert, key string, trust *x509.CertPool) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	of := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true,
		BasicConstraintsValid: true, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	der, err := x509.CreateCertificate(rand.Reader, of, of, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	privateDER, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	cert, key = filepath.Join(folder, "cert.pem"), filepath.Join(folder, "key.pem")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for path, text := range map[string][]byte{cert: text,
		key: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: privateDER})} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	trust = x509.NewCertPool()
	trust.AppendCertsFromPEM(text)
	return cert, key, trust
}
