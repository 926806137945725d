package cluster

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// bed is the environment of a measurement.
type bed struct {
	ctx      context.Context
	o        Options
	dir      string
	addr     string // of the NATS server
	users    *users
	names    []string                              // of the three nodes
	filled   map[events.Partition]events.StreamSeq // the last messages of the current step, for partitions with events
	progress func(string)
	report   Report
}

// connect starts a NATS server and connects to the server.
func (b *bed) connect() (server *process, err error) {
	if b.users = (&users{}); b.o.Accounts {
		if b.users, err = newUsers(b.dir, b.o.Partitions); err != nil {
			return nil, err
		}
	}
	if server, err = b.start("bench", "cluster", "--role", "nats", "--data", filepath.Join(b.dir, "nats"), "--nats-config",
		b.users.config); err != nil {
		return nil, err
	}
	m, err := server.wait(b.ctx, `listen=(\S+)`)
	if err == nil {
		err = b.join(m[1])
	}
	if err != nil {
		server.stop()
	}
	return server, err
}

// join connects to a NATS server.
func (b *bed) join(addr string) error {
	b.addr = addr
	return b.users.connect(b, addr)
}

// echoURL returns the server's URL for the processes that answer bare requests.
func (b *bed) echoURL() string {
	if b.o.Accounts {
		return "nats://echo:echo@" + b.addr
	}
	return "nats://" + b.addr
}

// nodeNames returns the names of three nodes. If possible, no node keeps all partitions.
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

// node starts a node and waits for readiness.
func (b *bed) node(namespace, id string, args ...string) (*process, error) {
	args = append(b.users.flags(namespace), args...)
	p, err := b.start(append([]string{"serve", "--nats", b.addr, "--namespace", namespace, "--node-id", id,
		"--partition-replicas", "2", "--http-listen", "",
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

// client returns a client for any node of a namespace, as a router has.
func (b *bed) client(namespace string) *client.Client {
	return b.clientOf(namespace, natsauth.RoleRouter)
}

func (b *bed) clientOf(namespace string, role natsauth.Role) *client.Client {
	subject := func(op string) string { return jetstream.Names(namespace).Query(op) }
	return client.OverPool(b.users.as(namespace, role).pool, subject, "no node answers", client.Options{})
}

// nodeClient returns a client for a single node, which answers from its own partitions.
func (b *bed) nodeClient(namespace, node string) *client.Client {
	return client.OverPool(b.users.as(namespace, natsauth.RoleNode).pool, func(op string) string {
		subject, _ := jetstream.Names(namespace).Node(node, op) // our nodes' names are good
		return subject
	}, "node "+node+" does not answer", client.Options{})
}
