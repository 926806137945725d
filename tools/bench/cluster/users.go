package cluster

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// namespaces are those that are measured, with the partitions of the bed.
var namespaces = []string{"inside", "one", "three", "single"}

// user is a connection as one of a namespace's users.
type user struct {
	conn *jetstream.Conn
	pool *rpc.Pool
}

// users are the NATS users of a measurement: one without a name for everything, or one for each role. Each is in an
// account of its own then, as indexer auth example makes them.
type users struct {
	config    string // of the NATS server; empty: it takes everybody
	ring      *natsauth.Ring
	bare      *user
	connected map[string]*user // by namespace and user
}

// bareAccounts are those of bare requests and of what answers them: they cross accounts as queries do, so that a ratio
// to them is without what the NATS server takes for that.
const bareAccounts = `
  ECHO { users: [ { user: echo, password: echo } ], exports: [ { service: "bench.>" } ] }
  BARE { users: [ { user: bare, password: bare } ], imports: [ { service: { account: ECHO, subject: "bench.>" } } ] }
`

// newUsers makes the keys and the server's configuration in a folder.
func newUsers(dir string, partitions uint32) (*users, error) {
	ring, err := natsauth.Create(filepath.Join(dir, "keys"), natsauth.Static)
	if err != nil {
		return nil, err
	}
	for _, ns := range namespaces {
		if err := ring.AddNamespace(ns, partitions); err != nil {
			return nil, err
		}
		if _, err := ring.Add(natsauth.Member{Namespace: ns, Role: jetstream.RolePool}); err != nil {
			return nil, err
		}
	}
	text, err := ring.ServerConfig("")
	if err != nil {
		return nil, err
	}
	text = strings.Replace(text, "accounts {\n", "accounts {"+bareAccounts, 1)
	u := &users{ring: ring, config: filepath.Join(dir, "accounts.conf")}
	return u, os.WriteFile(u.config, []byte(text), 0o600)
}

// connect connects as all users to a server.
func (u *users) connect(b *bed, addr string) (err error) {
	u.connected = map[string]*user{}
	join := func(o jetstream.ConnOptions) *user {
		if err != nil {
			return nil
		}
		n := &user{}
		o.URLs = []string{"nats://" + addr}
		if n.conn, err = jetstream.Connect(b.ctx, o); err == nil {
			n.pool, err = rpc.NewPool(n.conn.NATS())
		}
		return n
	}
	if u.ring == nil {
		u.bare = join(jetstream.ConnOptions{})
		return err
	}
	u.bare = join(jetstream.ConnOptions{User: "bare", Password: "bare", Core: true})
	for _, ns := range namespaces {
		grants, failed := u.ring.Grants(ns)
		if failed != nil {
			return failed
		}
		for i := range grants {
			core := grants[i].Role != jetstream.RoleNode && grants[i].Role != jetstream.RolePool
			u.connected[ns+" "+string(grants[i].Role)] = join(jetstream.ConnOptions{NkeyFile: u.ring.SeedFile(ns, &grants[i]),
				InboxPrefix: grants[i].Inbox, Core: core})
		}
	}
	return err
}

// as is the connection of a namespace's user with a role.
func (u *users) as(namespace string, role jetstream.Role) *user {
	if u.ring == nil {
		return u.bare
	}
	return u.connected[namespace+" "+string(role)]
}

// flags are those with which an indexer connects as a namespace's node.
func (u *users) flags(namespace string) []string {
	if u.ring == nil {
		return nil
	}
	g := jetstream.NodeGrant(namespace)
	return strings.Fields(u.ring.Flags(namespace, &g))
}

func (u *users) close() {
	for _, one := range u.connected {
		one.conn.Close()
	}
	u.bare.conn.Close()
}
