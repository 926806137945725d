package cluster

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	"github.com/kvatlas/kvatlas/internal/cluster"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// bed is what is measured on.
type bed struct {
	ctx      context.Context
	o        Options
	dir      string
	url      string
	conn     *jetstream.Conn
	pool     *rpc.Pool
	names    []string                              // of the three nodes
	filled   map[events.Partition]events.StreamSeq // what was taken in last: partitions that have events, and up to where
	progress func(string)
	report   Report
}

// connect starts a NATS server and connects to it.
func (b *bed) connect() (server *process, err error) {
	if server, err = b.start("bench", "cluster", "--role", "nats", "--data", filepath.Join(b.dir, "nats")); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			server.stop()
		}
	}()
	m, err := server.wait(b.ctx, `listen=(\S+)`)
	if err != nil {
		return nil, err
	}
	return server, b.join(m[1])
}

// join connects to a NATS server.
func (b *bed) join(url string) (err error) {
	b.url = url
	if b.conn, err = jetstream.Connect(b.ctx, jetstream.ConnOptions{URLs: []string{url}}); err == nil {
		b.pool, err = rpc.NewPool(b.conn.NATS())
	}
	return err
}

// nodeNames returns names of three nodes of which none keeps all partitions, where that can be.
func nodeNames(partitions uint32, copies int) (names []string) {
	for try := range 1000 {
		names = names[:0]
		kept := map[string]uint32{}
		for _, letter := range []string{"a", "b", "c"} {
			names = append(names, letter+strconv.Itoa(try))
		}
		for p := range events.Partition(partitions) {
			for _, owner := range cluster.Order(names, nil, p)[:min(copies, len(names))] {
				kept[owner]++
			}
		}
		if copies >= len(names) || max(kept[names[0]], kept[names[1]], kept[names[2]]) < partitions {
			break
		}
	}
	return names
}

// node starts a node and waits until it is ready.
func (b *bed) node(namespace, id string, args ...string) (*process, error) {
	p, err := b.start(append([]string{"serve", "--nats", b.url, "--namespace", namespace, "--node-id", id,
		"--replication", "2", "--http-listen", "",
		"--partitions", fmt.Sprint(b.o.Partitions), "--snapshot-interval", "1000h", "--log-age", "2000h",
		"--snapshot-blocks", "4000000000",
		"--log-bytes", fmt.Sprint(64<<20 + 24*Rounds*b.o.Workers*b.o.Blocks)}, args...)...)
	if err != nil {
		return nil, err
	}
	if _, err := p.wait(b.ctx, `msg=ready`); err != nil {
		p.stop()
		return nil, err
	}
	return p, nil
}

// settled waits until so many nodes have every partition ready so many times in all.
func (b *bed) settled(client *client.Client, nodes, copies int) error {
	for begun := time.Now(); ; {
		within, cancel := context.WithTimeout(b.ctx, 5*time.Second)
		s, err := client.Status(within)
		cancel()
		if err == nil && s.Cluster != nil && len(s.Cluster.Nodes) == nodes && len(s.Cluster.Short) == 0 {
			ready := 0
			for _, n := range s.Cluster.Nodes {
				ready += len(n.Ready)
			}
			if ready == copies*int(b.o.Partitions) {
				return nil
			}
		}
		if b.ctx.Err() != nil {
			return b.ctx.Err()
		}
		if time.Since(begun) > patience {
			return fmt.Errorf("the nodes have not settled within %v: %w", patience, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// client asks any node of a namespace.
func (b *bed) client(namespace string) *client.Client {
	subject := func(op string) string { return jetstream.QuerySubject(namespace, op) }
	return client.OverPool(b.pool, subject, "no node answers", client.Options{})
}

// nodeClient asks one node, which answers for what it holds itself.
func (b *bed) nodeClient(namespace, node string) *client.Client {
	return client.OverPool(b.pool, func(op string) string {
		subject, _ := jetstream.NodeSubject(namespace, node, op) // our nodes' names are good
		return subject
	}, "node "+node+" does not answer", client.Options{})
}
