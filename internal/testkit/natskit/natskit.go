package natskit

import (
	"context"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Start starts a server until the end of the test. The default folder is a temporary folder of the test. The default
// SyncInterval is a minute: tests rarely need files on the disk.
func Start(t testing.TB, options natsserver.Options) *natsserver.Server {
	t.Helper()
	if options.Dir == "" {
		options.Dir = t.TempDir()
	}
	if options.SyncInterval == 0 {
		options.SyncInterval = time.Minute
	}
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	server, err := natsserver.Start(ctx, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	return server
}

// Connect connects to a server until the end of the test.
func Connect(t testing.TB, server *natsserver.Server) *jetstream.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{Server: server, Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	return conn
}

// Namespace starts a server and returns a namespace with streams for the log.
func Namespace(t testing.TB, partitions uint32) *jetstream.Namespace {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	ns, err := jetstream.JoinNamespace(ctx, Connect(t, Start(t, natsserver.Options{})),
		jetstream.NamespaceConfig{Name: "test", Partitions: partitions})
	if err == nil {
		err = ns.EnsureStreams(ctx, jetstream.LogConfig{MaxBytes: 16 << 20})
	}
	if err != nil {
		t.Fatal(err)
	}
	return ns
}
