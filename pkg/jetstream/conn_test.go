package jetstream

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/api"
	kvclient "github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// plainServer starts a nats-server with foreign settings.
func plainServer(t testing.TB, opts *server.Options) *server.Server {
	t.Helper()
	opts.Host, opts.NoSigs = "127.0.0.1", true
	if opts.Port == 0 {
		opts.Port = server.RANDOM_PORT
	}
	srv, err := server.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	go srv.Start()
	if !srv.ReadyForConnections(patience) {
		t.Fatal("the server is not ready")
	}
	t.Cleanup(func() {
		srv.Shutdown()
		srv.WaitForShutdown()
	})
	return srv
}

// configServer starts a nats-server from a configuration.
func configServer(t testing.TB, text string) *server.Server {
	t.Helper()
	conf := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	opts, err := server.ProcessConfigFile(conf)
	if err != nil {
		t.Fatal(err)
	}
	opts.StoreDir = t.TempDir()
	return plainServer(t, opts)
}

func TestConnectWithoutJetStream(t *testing.T) {
	t.Parallel()
	srv := plainServer(t, &server.Options{})
	_, err := Connect(ctxFor(t), ConnOptions{URLs: []string{srv.ClientURL()}, Wait: true})
	if !errors.Is(err, ErrNoJetStream) {
		t.Fatalf("a server without JetStream: %v", err)
	}
	srv = configServer(t, `
		jetstream: enabled
		accounts { A { users = [ { user: a, password: a } ] }, B { jetstream: enabled, users = [ { user: b, password: b } ] } }`)
	_, err = Connect(ctxFor(t), ConnOptions{URLs: []string{srv.ClientURL()}, User: "a", Password: "a", Wait: true})
	if !errors.Is(err, ErrNoJetStream) {
		t.Fatalf("an account without JetStream: %v", err)
	}
	connect(t, ConnOptions{URLs: []string{srv.ClientURL()}, User: "b", Password: "b"})
}

func TestConnectNobodyThere(t *testing.T) {
	t.Parallel()
	addr := loopback.Reserve(t)
	if _, err := Connect(ctxFor(t), ConnOptions{URLs: []string{"nats://" + addr}}); !errors.Is(err, ErrUnavailable) ||
		!strings.Contains(err.Error(), addr) {
		t.Fatalf("nobody there: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if _, err := Connect(ctx, ConnOptions{URLs: []string{"nats://" + addr}, Wait: true}); !errors.Is(err,
		ErrUnavailable) {
		t.Fatalf("nobody comes: %v", err)
	}
	waiting := make(chan struct{}, 100)
	connected := make(chan error, 1)
	go func() {
		c, err := Connect(ctxFor(t), ConnOptions{URLs: []string{"nats://" + addr}, Wait: true,
			Waiting: func(error) { waiting <- struct{}{} }})
		if err == nil {
			c.Close()
		}
		connected <- err
	}()
	<-waiting
	startServer(t, t.TempDir(), addr)
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
}

func TestConnectBadFiles(t *testing.T) {
	t.Parallel()
	for _, o := range []ConnOptions{
		{NkeyFile: "/nonexistent/seed"}, {CredsFile: "/nonexistent/creds"}, {CAFile: "/nonexistent/ca"},
		{CertFile: "/nonexistent/cert", KeyFile: "/nonexistent/key"}, {CertFile: "/nonexistent/cert"},
	} {
		if _, err := Connect(ctxFor(t), o); err == nil || !strings.Contains(err.Error(), "/nonexistent/") {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// certificate creates a key and a self-signed certificate for 127.0.0.1, and returns the paths of their files.
func certificate(t testing.TB) (cert, key string) {
	t.Helper()
	priv, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &priv.PublicKey, priv)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(priv)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der},
		key: {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

func TestConnectTLS(t *testing.T) {
	t.Parallel()
	cert, key := certificate(t)
	other, otherKey := certificate(t)
	srv := configServer(t, fmt.Sprintf(`
		jetstream: enabled
		tls { cert_file: %q, key_file: %q, ca_file: %q, verify: true }`, cert, key, cert))
	url := "tls://" + srv.Addr().String()
	connect(t, ConnOptions{URLs: []string{url}, CAFile: cert, CertFile: cert, KeyFile: key})
	for _, o := range []ConnOptions{
		{CAFile: other, CertFile: cert, KeyFile: key}, // the server cannot be verified
		{CAFile: cert, CertFile: other, KeyFile: otherKey},
		{CAFile: cert},
	} {
		o.URLs = []string{url}
		if c, err := Connect(ctxFor(t), o); err == nil {
			c.Close()
			t.Errorf("connected with %+v", o)
		}
	}
	// Waiting does not help against a wrong certificate.
	_, err := Connect(ctxFor(t), ConnOptions{URLs: []string{url}, CAFile: other, CertFile: cert, KeyFile: key,
		Wait: true})
	if err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

func TestConnectTokenAndNkey(t *testing.T) {
	t.Parallel()
	srv := configServer(t, "jetstream: enabled\nauthorization { token: secret }")
	connect(t, ConnOptions{URLs: []string{srv.ClientURL()}, Token: "secret"})
	if _, err := Connect(ctxFor(t), ConnOptions{URLs: []string{srv.ClientURL()}, Token: "wrong",
		Wait: true}); !errors.Is(err, ErrDenied) {
		t.Error(err)
	}
	user, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	public, err := user.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	seed, err := user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "seed")
	if err := os.WriteFile(file, seed, 0o600); err != nil {
		t.Fatal(err)
	}
	srv = configServer(t, "jetstream: enabled\nauthorization { users = [ { nkey: "+public+" } ] }")
	connect(t, ConnOptions{URLs: []string{srv.ClientURL()}, NkeyFile: file})
	if _, err := Connect(ctxFor(t), ConnOptions{URLs: []string{srv.ClientURL()}, Wait: true}); !errors.Is(err,
		ErrDenied) {
		t.Error(err)
	}
}

func TestReconnect(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	addr := loopback.Reserve(t)
	s := startServer(t, dir, addr)
	down, up := make(chan error, 10), make(chan string, 10)
	c := connect(t, ConnOptions{URLs: []string{s.URL()}, Disconnected: func(err error) { down <- err },
		Reconnected: func(url string) { up <- url }})
	s.Stop()
	<-down
	if c.Connected() {
		t.Error("connected to nobody")
	}
	if err := c.Send("a", "", nil); !errors.Is(err, ErrUnavailable) {
		t.Errorf("sending to nobody: %v", err)
	}
	startServer(t, dir, addr)
	<-up
	if _, err := JoinNamespace(ctxFor(t), c, NamespaceConfig{Name: "a"}); err != nil {
		t.Fatal(err)
	}
	c.Close()
	c.Close()
	if _, err := c.Request(ctxFor(t), "a", "", nil); !errors.Is(err, ErrUnavailable) {
		t.Errorf("request on a closed connection: %v", err)
	}
}

// TestASilentServerIsLeft: a client leaves a server that sends nothing more, as if it hung, for another server.
func TestASilentServerIsLeft(t *testing.T) {
	t.Parallel()
	var urls []string
	proxies := map[string]*proxy{}
	for range 2 {
		p := newProxy(t, startServer(t, t.TempDir(), "127.0.0.1:0").Addr())
		urls = append(urls, p.url())
		proxies[p.url()] = p
	}
	back := make(chan string, 10)
	c := connect(t, ConnOptions{URLs: urls, Reconnected: func(url string) { back <- url }})
	left := c.ServerURL()
	proxies[left].deaf.Store(true)
	begun := time.Now()
	select {
	case url := <-back:
		if url == left {
			t.Errorf("%s is silent, and connected to again", url)
		}
	case <-time.After(patience):
		t.Fatal("a silent server is not left")
	}
	t.Logf("the client left it after %v", time.Since(begun))
}

// TestPermissions: the documented grants are necessary and sufficient, and a refusal is reported at once. Waits for
// answers exceed the time of the test.
func TestPermissions(t *testing.T) {
	t.Parallel()
	// internal/edge/natsauth compares the file with its grants.
	accounts, err := os.ReadFile("testdata/accounts.conf")
	if err != nil {
		t.Fatal(err)
	}
	srv := configServer(t, "jetstream: enabled\n"+string(accounts))
	as := func(user, inbox string) *Conn {
		return connect(t, ConnOptions{URLs: []string{srv.ClientURL()}, User: user, Password: "x", InboxPrefix: inbox,
			AttemptTimeout: time.Hour, Core: user == "reader"})
	}
	ctx := ctxFor(t)
	admin := as("admin", "")
	ns, err := JoinNamespace(ctx, admin, NamespaceConfig{Name: "test", Partitions: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := ns.EnsureStreams(ctx, LogConfig{}); err != nil {
		t.Fatal(err)
	}
	if _, err := ns.EnsureSnapshots(ctx, BucketConfig{}); err != nil {
		t.Fatal(err)
	}

	shim, err := OpenNamespace(ctx, as("shim-w1", "_INBOX_shim-w1"), "test")
	if err != nil {
		t.Fatal(err)
	}
	if err := shim.RegisterModel(ctx, Model{Name: "a/b", BlockSize: 16}); err != nil {
		t.Fatal(err)
	}
	p, err := shim.OpenPublisher(ctx, w1, PublisherOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Publish(ctx, numbered(1, 100)); err != nil {
		t.Fatal(err)
	}
	w2 := events.RankKey{Instance: "w2"}
	if _, err := shim.OpenPublisher(ctx, w2, PublisherOptions{}); !errors.Is(err, ErrDenied) ||
		!strings.Contains(err.Error(), "w2") {
		t.Fatalf("opening for another worker: %v", err)
	}
	other, err := ns.OpenPublisher(ctx, w2, PublisherOptions{})
	if err != nil {
		t.Fatal(err)
	}
	other.c = shim.Conn()
	for _, n := range []int{1, 3, 10} {
		if _, err := other.Publish(ctx, numbered(1, n)); !errors.Is(err, ErrDenied) ||
			!strings.Contains(err.Error(), "w2") {
			t.Fatalf("publishing for another worker: %v", err)
		}
	}
	again, err := shim.OpenPublisher(ctx, w1, PublisherOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if m, ok := again.Found(); !ok || m.Seq != 100 || string(m.Data) != "100" || m.Subject != p.Subject() {
		t.Fatalf("the shim's own last message is %+v", m)
	}
	if _, err := ns.EnsureWorkers(ctx, BucketConfig{}); err != nil {
		t.Fatal(err)
	}
	leases := shim.OpenWorkers()
	if _, err := leases.Latest(ctx, "0.w1.0"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("no lease yet: %v", err)
	}
	revision, err := leases.Commit(ctx, nil, Value{"0.w1.0", []byte("lease")}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if entry, err := leases.Latest(ctx, "0.w1.0"); err != nil || string(entry.Value) != "lease" ||
		entry.Revision != revision {
		t.Fatal(entry, err)
	}
	if _, err := leases.Latest(ctx, "0.w2.0"); !errors.Is(err, ErrDenied) {
		t.Fatalf("another worker's lease: %v", err)
	}
	if _, err := JoinNamespace(ctx, shim.Conn(), NamespaceConfig{Name: "other"}); !errors.Is(err, ErrDenied) {
		t.Fatalf("creating a namespace: %v", err)
	}
	// A client gets an error from the first request if no reply can arrive.
	if _, err := Connect(ctx, ConnOptions{URLs: []string{srv.ClientURL()}, User: "node", Password: "x",
		AttemptTimeout: time.Hour, Wait: true}); !errors.Is(err, ErrDenied) {
		t.Fatalf("a refused inbox: %v", err)
	}

	indexer, err := OpenNamespace(ctx, as("node", "_INBOX_node"), "test")
	if err != nil {
		t.Fatal(err)
	}
	rd := startReader(t, indexer, Position{})
	rd.messages(1, 100)
	rd.notice(CaughtUp{100})
	snaps, err := indexer.OpenSnapshots(ctx)
	if err != nil {
		t.Fatal(err)
	}
	rev, err := snaps.Commit(ctx, []Value{{"p0.c.1", []byte("x")}}, Value{"p0.manifest", []byte("m")}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := snaps.Get(ctx, "p0.c.1"); err != nil {
		t.Fatal(err)
	}
	if n, err := snaps.Sweep(ctx, "p0.", func(string) bool { return false }, rev); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	info, err := indexer.StreamInfo(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := indexer.Purge(ctx, 0, info.Epoch, 50); err != nil {
		t.Fatal(err)
	}
	svc, err := Serve(indexer.Conn(), ServiceConfig{Name: "kvatlas", Version: "1.0.0", Endpoints: []Endpoint{{
		Name: "find", Subject: Names("test").Query("find"), QueueGroup: "q",
		Handler: func(context.Context, Request) Response { return Response{Body: []byte("found")} },
	}}})
	if err != nil {
		t.Fatal(err)
	}
	defer svc.Stop(ctx)
	// A shim reads no snapshots: it sends requests to a node. It checks if its rank is served, and answers indexers.
	if _, err := shim.OpenSnapshots(ctx); !errors.Is(err, ErrDenied) {
		t.Fatalf("a shim that reads snapshots: %v", err)
	}
	recall, err := Names("test").Recall(0, w1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := shim.Conn().Request(ctx, recall, "", nil); !errors.Is(err, ErrNoResponder) {
		t.Fatalf("request for the snapshots' data: %v", err)
	}
	rank, err := Names("test").ControlRank(0, w1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := shim.Conn().Request(ctx, rank, ContentJSON, nil); !errors.Is(err, ErrNoResponder) {
		t.Fatalf("asking for the rank: %v", err)
	}
	answers, err := Names("test").Answer(0, w1, "")
	if err != nil {
		t.Fatal(err)
	}
	handler := func(context.Context, Request) Response { return Response{Body: []byte("w1")} }
	desk, err := Serve(shim.Conn(), ServiceConfig{Name: "shim", Version: "1.0.0", Endpoints: []Endpoint{
		{Name: "rank", Subject: rank, Handler: handler},
		{Name: "partition", Subject: Names("test").Control(0), Handler: handler},
	}, AnswerOn: func(id string) string { return answers + id }})
	if err != nil {
		t.Fatal(err)
	}
	defer desk.Stop(ctx)
	if err := shim.Conn().flush(ctx); err != nil {
		t.Fatal(err)
	}
	for _, ns := range []*Namespace{indexer, shim} { // from another account, and from the shim's own
		if reply, err := ns.AskShim(ctx, patience, w1, nil); err != nil || string(reply.Body) != "w1" {
			t.Fatal(reply, err)
		}
	}
	for replies := []Reply(nil); len(replies) == 0; {
		if replies, err = indexer.AskShims(ctx, time.Second, 0, nil); err != nil || len(replies) > 1 {
			t.Fatal(replies, err)
		}
	}
	client := as("reader", "_INBOX_reader")
	reply, err := client.Request(ctx, Names("test").Query("find"), "", nil)
	if err != nil || string(reply.Body) != "found" {
		t.Fatal(reply, err)
	}
	if _, err := client.Request(ctx, "kv.v1.test.secret", "", nil); !errors.Is(err, ErrDenied) {
		t.Fatalf("a subject that is not granted: %v", err)
	}
	pool, err := rpc.NewPool(client.NATS())
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	asking := kvclient.OverPool(pool, func(string) string { return "kv.v1.test.secret" }, "", kvclient.Options{})
	if _, err := asking.Status(ctx); !errors.Is(err, rpc.ErrDenied) || kvclient.CodeOf(err) != api.CodeForbidden {
		t.Fatalf("a subject that is not granted: %v", err)
	}
	// A service installs its own handlers on the connection. Refusals must still arrive.
	if _, err := JoinNamespace(ctx, indexer.Conn(), NamespaceConfig{Name: "other"}); !errors.Is(err, ErrDenied) {
		t.Fatalf("creating a namespace: %v", err)
	}
}

func TestRefusedSubject(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text, kind, subject string
		ok                  bool
	}{
		{`nats: permissions violation: Permissions Violation for Publish to "a.b"`, "Publish", "a.b", true},
		{`nats: permissions violation: permissions Violation for Subscription to "a.*" using queue "q"`, "Subscription",
			"a.*", true},
		{`Permissions Violation for Publish to "a`, "", "", false},
		{`Permissions Violation for `, "", "", false},
		{`something else`, "", "", false},
	} {
		kind, subject, ok := RefusedSubject(c.text)
		if ok != c.ok || ok && (kind != c.kind || subject != c.subject) {
			t.Errorf("%q: %q %q %v", c.text, kind, subject, ok)
		}
	}
}

func TestErrorClasses(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want error
	}{
		{&apiError{Code: 400, ErrCode: 10071}, ErrConflict},
		{&apiError{Code: 400, ErrCode: 10164}, ErrConflict},
		{&apiError{Code: 400, ErrCode: 10054}, ErrTooLarge},
		{&apiError{Code: 503, ErrCode: 10077}, ErrFull},
		{&apiError{Code: 503, ErrCode: 10008}, ErrUnavailable},
		{&apiError{Code: 404, ErrCode: 10059}, ErrNotFound},
		{&apiError{Code: 400, ErrCode: 10176}, ErrUnavailable},
		{nats.ErrNoResponders, ErrUnavailable},
		{nats.ErrMaxPayload, ErrTooLarge},
		{nats.ErrPermissionViolation, ErrDenied},
		{context.DeadlineExceeded, ErrUnavailable},
		{errDisconnected, ErrUnavailable},
	} {
		err := failed("do it", c.err)
		if !errors.Is(err, c.want) || !errors.Is(err, c.err) || !strings.HasPrefix(err.Error(), "do it: ") {
			t.Errorf("%v became %v", c.err, err)
		}
		if again := failed("again", err); strings.Count(again.Error(), c.want.Error()) > strings.Count(err.Error(),
			c.want.Error()) {
			t.Errorf("the class occurs twice: %v", again)
		}
	}
	if failed("x", nil) != nil {
		t.Error("no error became one")
	}
}
