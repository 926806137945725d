package cluster

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// namespaces lists the measured namespaces, with the partitions of the bed.
var namespaces = []string{"inside", "one", "three", "single"}

// user is a connection of a namespace's user.
type user struct {
	conn *jetstream.Conn
	pool *rpc.Pool
}

// users are the NATS users of a measurement. Either a single user without a name has all rights, or every role has a
// user in a separate account, as indexer auth create makes them.
type users struct {
	config    string // of the NATS server; empty allows every connection
	ring      *natsauth.Ring
	bare      *user
	connected map[string]*user // by namespace and user
}

// bareAccounts are the accounts of bare requests and their responders. Bare requests cross accounts as queries do, so a
// ratio excludes the cost of accounts in the NATS server.
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
		if _, err := ring.Add(natsauth.Member{Namespace: ns, Role: natsauth.RolePool}); err != nil {
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
			core := grants[i].Role != natsauth.RoleNode && grants[i].Role != natsauth.RolePool
			u.connected[ns+" "+string(grants[i].Role)] = join(jetstream.ConnOptions{NkeyFile: u.ring.SeedFile(ns, &grants[i]),
				InboxPrefix: grants[i].Inbox, Core: core})
		}
	}
	return err
}

// as is the connection of a namespace's user with a role.
func (u *users) as(namespace string, role natsauth.Role) *user {
	if u.ring == nil {
		return u.bare
	}
	return u.connected[namespace+" "+string(role)]
}

// flags returns the connection flags of a namespace's node.
func (u *users) flags(namespace string) []string {
	if u.ring == nil {
		return nil
	}
	g := natsauth.NodeGrant(namespace)
	return strings.Fields(u.ring.Flags(namespace, &g))
}

func (u *users) close() {
	for _, one := range u.connected {
		one.conn.Close()
	}
	u.bare.conn.Close()
}
