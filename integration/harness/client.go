package harness

import (
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Client returns a client of a namespace's indexers on a connection.
func Client(t testing.TB, conn *jetstream.Conn, namespace string, o client.Options) *client.Client {
	t.Helper()
	c, err := client.NATS(conn.NATS(), namespace, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// NodeClient returns a client of a single node of the default namespace, which answers from its own partitions.
func NodeClient(t testing.TB, conn *jetstream.Conn, node string) *client.Client {
	t.Helper()
	pool, err := rpc.NewPool(conn.NATS())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return client.OverPool(pool, func(op string) string {
		subject, err := jetstream.Names("default").Node(node, op)
		if err != nil {
			t.Error(err)
		}
		return subject
	}, "node "+node+" does not answer", client.Options{})
}
