package integration

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"github.com/vmihailenco/msgpack/v5"
)

// routerLine is a router event that stores consecutive blocks of a prompt.
func routerLine(t testing.TB, instance string, rank events.Rank, id events.EventID, prompt []uint32, from int) []byte {
	t.Helper()
	h, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	e := events.Event{Kind: events.Stored, Tier: events.Device, Locals: h.Hash(nil, prompt)[from:], HasParent: from > 0,
		Parent: events.BlockHash(99 + from)}
	for i := range e.Locals {
		e.Blocks = append(e.Blocks, events.BlockHash(100+from+i))
	}
	return events.AppendRouterEvent(nil, events.RankKey{Instance: events.WorkerID(instance), Rank: rank}, id, &e)
}

// TestLines reads an engine of an unknown kind as lines on a Unix socket: two workers on a connection, bad names and
// lines in between, a restarted shim that continues, a gap that clears, and a restart of the numbers.
func TestLines(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	socket := filepath.Join(t.TempDir(), "lines")
	launch := func() (*harness.Process, net.Conn) {
		p := harness.Start(t, "worker-shim", "run", "--source", "ndjson", "--engine", "ipc://"+socket, "--model", "m",
			"--block-size", "16", "--nats", x.NATS)
		var c net.Conn
		harness.Eventually(t, "the shim listens", func() (bool, string) {
			var err error
			c, err = net.Dial("unix", socket)
			return err == nil, fmt.Sprintf("%v\n%s", err, p.Said())
		})
		t.Cleanup(func() { c.Close() })
		return p, c
	}
	prompt := harness.Tokens(1, 6*harness.BlockSize)
	say := func(to io.Writer, lines ...string) {
		t.Helper()
		if _, err := io.WriteString(to, strings.Join(lines, "\n")+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	one := func(id events.EventID, blocks, from int) string {
		return string(routerLine(t, "a", 0, id, prompt[:blocks*harness.BlockSize], from))
	}
	p, c := launch()
	say(c, string(routerLine(t, strings.Repeat("x", 256), 0, 1, prompt, 0)), string(routerLine(t, "", 0, 1, prompt, 0)))
	p.WaitFor("cannot be a worker's")
	say(c, one(1, 2, 0), "this is no JSON", `{"worker_id":"a","event":{"event_id":2,"data":{"renamed":{}}}}`,
		one(3, 4, 2),
		string(routerLine(t, "b", 0, 1, prompt[:harness.BlockSize], 0)))
	x.WaitDepth(t, "m", prompt, "a", 4)
	x.WaitDepth(t, "m", prompt, "b", 1)
	p.WaitFor("line=7") // empty lines count
	if w := harness.WaitLease(t, x, "a", true); w.Lease.PID != p.Cmd.Process.Pid {
		t.Errorf("the lease is %+v, not of process %d", w.Lease, p.Cmd.Process.Pid)
	}
	harness.WaitLease(t, x, "b", true)
	if r := harness.Run(t, "worker-shim", "run", "--source", "ndjson", "--engine", "ipc://"+socket, "--model", "m",
		"--block-size", "16", "--nats", x.NATS); r.Code != 1 || !strings.Contains(r.Stderr, "address already in use") {
		t.Errorf("a second shim on the same socket ended with %d and %q", r.Code, r.Stderr)
	}
	p.Kill() // leaves the socket behind
	if _, err := os.Stat(socket); err != nil {
		t.Fatal(err)
	}
	p, c = launch()
	say(c, one(4, 5, 4))
	x.WaitDepth(t, "m", prompt, "a", 5)
	if strings.Contains(p.Said(), "new incarnation") {
		t.Fatalf("the shim did not continue:\n%s", p.Said())
	}
	say(c, one(9, 6, 5)) // 5 to 8 are missing
	x.WaitDepth(t, "m", prompt, "a", 0)
	say(c, one(1, 3, 0)) // the engine begins anew
	x.WaitDepth(t, "m", prompt, "a", 3)
	x.WaitDepth(t, "m", prompt, "b", 1)
}

// TestLinesOfOneWorker reads a worker's lines without a name, with an event or several on a line, until the shutdown.
// The same lines are loaded as another worker.
func TestLinesOfOneWorker(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	prompt := harness.Tokens(1, 3*harness.BlockSize)
	bare := func(id events.EventID, blocks, from int) string {
		var line struct{ Event json.RawMessage }
		if err := json.Unmarshal(routerLine(t, "x", 0, id, prompt[:blocks*harness.BlockSize], from), &line); err != nil {
			t.Fatal(err)
		}
		return string(line.Event)
	}
	lines := bare(1, 1, 0) + "\n" + `{"events":[` + bare(2, 2, 1) + "," + bare(3, 3, 2) + `],"shutdown":false}` + "\n"
	file := filepath.Join(t.TempDir(), "lines")
	if err := os.WriteFile(file, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	common := []string{"--model", "m", "--block-size", "16", "--nats", x.NATS}
	if r := harness.Run(t, "indexer", append([]string{"import", "--worker", "7", file}, common...)...); r.Code != 0 {
		t.Fatalf("load: %+v", r)
	}
	x.WaitDepth(t, "m", prompt, "7", 3)
	if r := harness.Run(t, "indexer", append([]string{"import", file}, common...)...); r.Code != 2 ||
		!strings.Contains(r.Stderr, "line 1") {
		t.Errorf("load without a name: %+v", r)
	}
	socket := filepath.Join(t.TempDir(), "socket")
	p := harness.Start(t, "worker-shim", append([]string{"run", "--source", "ndjson", "--engine", "ipc://" + socket,
		"--worker", "8"}, common...)...)
	var c net.Conn
	harness.Eventually(t, "the shim listens", func() (bool, string) {
		var err error
		c, err = net.Dial("unix", socket)
		return err == nil, fmt.Sprint(err)
	})
	defer c.Close()
	if _, err := io.WriteString(c, lines); err != nil {
		t.Fatal(err)
	}
	x.WaitDepth(t, "m", prompt, "8", 3)
	if _, err := io.WriteString(c, "{\"events\":[],\"shutdown\":true}\n"); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(harness.Patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("after the shutdown: %v\n%s", err, p.Said())
	}
}

// dynamoEnvelope returns router events in the MessagePack envelope of Dynamo's workers.
func dynamoEnvelope(t testing.TB, worker uint64, prompt []uint32) []byte {
	t.Helper()
	h, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	var blocks []any
	for i, local := range h.Hash(nil, prompt) {
		blocks = append(blocks, map[string]any{"block_hash": i + 1, "tokens_hash": uint64(local), "mm_extra_info": nil})
	}
	inner, err := msgpack.Marshal([]any{map[string]any{"worker_id": worker, "storage_tier": "device",
		"event": map[string]any{
			"event_id": 1, "dp_rank": 1, "data": map[string]any{"stored": map[string]any{"parent_hash": nil,
				"blocks": blocks}}}}})
	if err != nil {
		t.Fatal(err)
	}
	envelope, err := msgpack.Marshal(map[string]any{"topic": "kv-events", "publisher_id": worker, "sequence": 1,
		"published_at": 1, "payload": inner})
	if err != nil {
		t.Fatal(err)
	}
	return envelope
}

const dynamoSubject = "namespace.dynamo.component.backend.kv-events"

// publishUntil publishes on Dynamo's subject repeatedly until a shim has logged a text. A repeated event is a
// duplicate.
func publishUntil(t testing.TB, conn *nats.Conn, data []byte, p *harness.Process, said string) {
	t.Helper()
	harness.Eventually(t, fmt.Sprintf("the shim logs %q", said), func() (bool, string) {
		output := p.Said()
		if strings.Contains(output, said) {
			return true, ""
		}
		publishDynamo(t, conn, data)
		return false, output
	})
}

func publishDynamo(t testing.TB, conn *nats.Conn, data []byte) {
	t.Helper()
	if err := conn.Publish(dynamoSubject, data); err != nil {
		t.Fatal(err)
	}
}

// connectNATS connects to a NATS server until the test ends.
func connectNATS(t testing.TB, url string, options ...nats.Option) *nats.Conn {
	t.Helper()
	conn, err := nats.Connect(url, append(options, nats.Timeout(harness.Patience), nats.MaxReconnects(-1))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	return conn
}

// TestDynamoOverNATS publishes Dynamo's form of events over NATS: as MessagePack in the envelope, and as JSON.
func TestDynamoOverNATS(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	p := harness.Start(t, "worker-shim", "run", "--source", "dynamo-nats", "--engine", dynamoSubject, "--model", "m",
		"--block-size", "16", "--nats", x.NATS)
	conn := connectNATS(t, "nats://"+x.NATS)
	prompt := harness.Tokens(1, 2*harness.BlockSize)
	publishUntil(t, conn, dynamoEnvelope(t, 7, prompt), p, "starting")
	publishUntil(t, conn, routerLine(t, "8", 0, 1, prompt[:harness.BlockSize], 0), p, "starting worker=8")
	x.WaitDepth(t, "m", prompt, "7", 2)
	x.WaitDepth(t, "m", prompt, "8", 1)
	publishUntil(t, conn, []byte("what is this"), p, "without router events of Dynamo's")
	p.WaitFor(fmt.Sprintf("without router events of Dynamo's.*subject=%s", dynamoSubject))
	harness.WaitLease(t, x, "7", true)
}

// newUserKey makes an nkey of a NATS user.
func newUserKey(t *testing.T) (seed []byte, public string) {
	t.Helper()
	pair, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	if seed, err = pair.Seed(); err != nil {
		t.Fatal(err)
	}
	if public, err = pair.PublicKey(); err != nil {
		t.Fatal(err)
	}
	return seed, public
}

// TestDynamosOwnServer reads a Dynamo fleet on a separate NATS server without JetStream, with TLS and authentication by
// password and by nkey.
func TestDynamosOwnServer(t *testing.T) {
	t.Parallel()
	x := harness.StartIndexer(t, t.TempDir(), "")
	dir := t.TempDir()
	cert, key := writeCertificate(t, dir)
	seed, public := newUserKey(t)
	addr, config, nkey := loopback.Reserve(t), filepath.Join(dir, "nats.conf"), filepath.Join(dir, "dynamo.nk")
	text := fmt.Sprintf(
		"listen: %q\ntls { cert_file: %q, key_file: %q }\nauthorization { users: [ { user: dynamo, password: secret }, { nkey: %s } ] }\n", addr, cert, key, public)
	for path, data := range map[string][]byte{config: []byte(text), nkey: seed} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	harness.Start(t, "nats-server", "-c", config).WaitFor(`Server is ready`)
	who, err := nats.NkeyOptionFromSeed(nkey)
	if err != nil {
		t.Fatal(err)
	}
	conn := connectNATS(t, "tls://"+addr, nats.RootCAs(cert), who)
	prompt := harness.Tokens(1, 2*harness.BlockSize)
	shim := []string{"run", "--source", "dynamo-nats", "--engine", dynamoSubject, "--model", "m", "--block-size", "16",
		"--nats", x.NATS,
		"--engine-nats", "tls://" + addr, "--engine-nats-ca", cert}
	for i, as := range [][]string{{"--engine-nats-user", "dynamo", "--engine-nats-password", "secret"},
		{"--engine-nats-nkey", nkey}} {
		p := harness.Start(t, "worker-shim", append(shim, as...)...)
		p.WaitFor("connected to --engine-nats")
		publishUntil(t, conn, dynamoEnvelope(t, uint64(i), prompt), p, fmt.Sprintf("starting worker=%d", i))
		x.WaitDepth(t, "m", prompt, fmt.Sprint(i), 2)
		p.Stop()
	}
	if r := harness.Run(t, "worker-shim", append(shim, "--engine-nats-user", "dynamo", "--engine-nats-password",
		"wrong")...); r.Code != 1 || !strings.Contains(r.Stderr, "--engine-nats: ") ||
		!strings.Contains(r.Stderr, "uthorization") {
		t.Errorf("a wrong password: ended with %d and %q", r.Code, r.Stderr)
	}
}

// writeCertificate writes a self-signed certificate for loopback with its key.
func writeCertificate(t testing.TB, dir string) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der},
		key: {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}
