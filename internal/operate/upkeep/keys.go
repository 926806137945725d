package upkeep

import (
	"context"
	"fmt"
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// UserNames are the names of users with keys in a namespace.
type UserNames struct {
	Shims  []string // workers
	Pools  []string
	Stores []string // HTTP addresses of the masters
	Models []string // permitted models of the workers of Shims and Pools; empty: any model

	Readers, Routers, Operators, Analysts []string
}

// members returns the users in a namespace.
func (n *UserNames) members(namespace string) (list []natsauth.Member) {
	for _, worker := range n.Shims {
		list = append(list, natsauth.Member{Namespace: namespace, Role: natsauth.RoleShim, Worker: worker,
			Models: n.Models})
	}
	for _, pool := range n.Pools {
		list = append(list, natsauth.Member{Namespace: namespace, Role: natsauth.RolePool, Pool: pool, Models: n.Models})
	}
	for _, store := range n.Stores {
		list = append(list, natsauth.Member{Namespace: namespace, Role: natsauth.RoleStore, Store: store})
	}
	for _, c := range []struct {
		role  natsauth.Role
		names []string
	}{{natsauth.RoleReader, n.Readers}, {natsauth.RoleRouter, n.Routers}, {natsauth.RoleOperator, n.Operators},
		{natsauth.RoleAnalyst, n.Analysts}} {
		for _, name := range c.names {
			list = append(list, natsauth.Member{Namespace: namespace, Role: c.role, Name: name})
		}
	}
	return list
}

// Keys changes the keys of NATS users in a folder.
type Keys struct {
	Folder    string
	Namespace string // empty: the only namespace of the folder
	Resolver  string // folder of the NATS servers for accounts; for keys created with JWTs
	NATS      string // address of the NATS servers in the settings files of the users

	Result KeysResult // of the methods so far

	ring *natsauth.Ring // of [Keys.Open] or [Keys.Create]
}

// KeysResult has the settings of NATS servers and users after a change, in the form of the JSON output.
type KeysResult struct {
	Config string    `json:"config,omitempty"` // accounts part of a nats-server configuration
	Users  []KeyUser `json:"users,omitempty"`
	Notes  []string  `json:"notes,omitempty"` // next steps
}

// KeyUser has the connection flags of a user.
type KeyUser struct {
	Namespace string `json:"namespace"`
	User      string `json:"user"`
	Flags     string `json:"flags"`
}

// note adds a note to the result.
func (k *Keys) note(format string, args ...any) {
	k.Result.Notes = append(k.Result.Notes, fmt.Sprintf(format, args...))
}

// Open reads the keys in the folder. The other methods, except Create, need it.
func (k *Keys) Open() (err error) {
	k.ring, err = natsauth.Open(k.Folder)
	return err
}

// choose returns an error if the keys are of several namespaces and none is given.
func (k *Keys) choose() error {
	if k.Namespace != "" {
		return nil
	}
	if len(k.ring.Namespaces) != 1 {
		return usage.Errorf("--namespace is missing: %s has %d namespaces", k.Folder, len(k.ring.Namespaces))
	}
	k.Namespace = k.ring.Namespaces[0].Name
	return nil
}

// NewKeys are the settings of [Keys.Create].
type NewKeys struct {
	Namespaces []string
	Partitions uint32
	Users      UserNames
	JWT        bool // an operator signs the accounts
	Keep       bool // keys of existing users are used; excludes JWT
}

// Check adds the errors of several settings to wrong.
func (n *NewKeys) Check(wrong *usage.Complaints) {
	for _, ns := range n.Namespaces {
		wrong.About("--namespace", jetstream.CheckNamespace(ns))
	}
	wrong.When(n.JWT && n.Keep, "--jwt and --keep-keys exclude each other: users of a JWT need new credentials")
}

// Create creates the folder with the keys for the users of new namespaces. Without shims and pools, a single pool
// serves all shims.
func (k *Keys) Create(n *NewKeys) (err error) {
	mode := natsauth.Static
	if n.JWT {
		mode = natsauth.JWT
	}
	if k.ring, err = natsauth.Create(k.Folder, mode); err != nil {
		return err
	}
	if n.Keep {
		k.ring.KeepKeys()
	}
	return k.create(n.Namespaces, n.Partitions, &n.Users)
}

// create creates keys for the users of namespaces.
func (k *Keys) create(namespaces []string, partitions uint32, names *UserNames) error {
	for _, ns := range namespaces {
		if err := k.ring.AddNamespace(ns, partitions); err != nil {
			return err
		}
		members := names.members(ns)
		if len(names.Shims)+len(names.Pools) == 0 {
			members = append(members, natsauth.Member{Namespace: ns, Role: natsauth.RolePool, Models: names.Models})
		}
		if _, err := k.ring.AddAll(members); err != nil {
			return err
		}
	}
	if err := k.ring.Save(); err != nil {
		return err
	}
	for _, ns := range namespaces {
		if err := k.writeUsers(ns); err != nil {
			return err
		}
	}
	return k.addServers()
}

// Add creates keys for further users of the namespace.
func (k *Keys) Add(names *UserNames) error {
	if err := k.choose(); err != nil {
		return err
	}
	members := names.members(k.Namespace)
	if len(members) == 0 {
		return usage.Errorf("--shim, --pool, --store, --reader, --router, --operator or --analyst is missing")
	}
	added, err := k.ring.AddAll(members)
	if err != nil {
		return err
	}
	if err := k.ring.Save(); err != nil {
		return err
	}
	if err := k.writeUsers(k.Namespace, added...); err != nil {
		return err
	}
	return k.published()
}

// Rotate creates new keys for users, or makes the old keys invalid with finish. Without users, it rotates the keys of
// all users of the namespace.
func (k *Keys) Rotate(users []string, finish bool) error {
	if err := k.choose(); err != nil {
		return err
	}
	if len(users) == 0 {
		grants, err := k.ring.Grants(k.Namespace)
		if err != nil {
			return err
		}
		for _, g := range grants {
			users = append(users, g.User)
		}
	}
	for _, user := range users {
		if !finish {
			if err := k.ring.Rotate(k.Namespace, user); err != nil {
				return err
			}
			if err := k.ring.Save(); err != nil { // at once: the folder has the secret
				return err
			}
			continue
		}
		ended, err := k.ring.Finish(k.Namespace, user)
		if err != nil {
			return err
		}
		if !ended {
			k.note("%s: no old key", user)
		}
	}
	if err := k.ring.Save(); err != nil {
		return err
	}
	if err := k.addUsers(k.Namespace, users...); err != nil {
		return err
	}
	return k.published()
}

// Remove removes users and their keys.
func (k *Keys) Remove(users []string) error {
	if err := k.choose(); err != nil {
		return err
	}
	if len(users) == 0 {
		return usage.Errorf("--user is missing")
	}
	for _, user := range users {
		if err := k.ring.Remove(k.Namespace, user); err != nil {
			return err
		}
	}
	if err := k.ring.Save(); err != nil {
		return err
	}
	return k.published()
}

// Print has the configuration of NATS servers and the connection settings of all users as the result. With transition,
// the result is only a configuration with all users in the nodes' account.
func (k *Keys) Print(transition bool) (err error) {
	if transition {
		k.Result.Config, err = k.ring.TransitionConfig()
		return err
	}
	for _, ns := range k.ring.Namespaces {
		if err := k.addUsers(ns.Name); err != nil {
			return err
		}
	}
	return k.addServers()
}

// SystemCreds returns the credentials file for [Keys.Push].
func (k *Keys) SystemCreds() string { return k.ring.SystemCreds() }

// Push sends the accounts of keys with JWTs to the NATS servers of a connection. It returns the number of accounts.
func (k *Keys) Push(ctx context.Context, conn *jetstream.Conn) (accounts int, err error) {
	return k.ring.Push(ctx, conn)
}

// addUsers adds to the result the connection settings of a namespace's users: all users, or the named users.
func (k *Keys) addUsers(namespace string, only ...string) error {
	return k.eachUser(namespace, only, func(g *natsauth.Grant) error {
		k.Result.Users = append(k.Result.Users, KeyUser{namespace, g.User, k.ring.Flags(namespace, g)})
		return nil
	})
}

// writeUsers writes the settings files of a namespace's users, of all or of the named users.
func (k *Keys) writeUsers(namespace string, only ...string) error {
	err := k.eachUser(namespace, only, func(g *natsauth.Grant) error {
		return k.ring.WriteSettings(namespace, k.NATS, g)
	})
	if err != nil {
		return err
	}
	if err := k.addUsers(namespace, only...); err != nil {
		return err
	}
	k.note("in place of the flags: --config %s, with the user's name for *",
		k.ring.SettingsFile(namespace, &natsauth.Grant{User: "*"}))
	return nil
}

// eachUser calls do for all users of a namespace, or for the named users, until an error.
func (k *Keys) eachUser(namespace string, only []string, do func(*natsauth.Grant) error) error {
	grants, err := k.ring.Grants(namespace)
	for i := range grants {
		if err == nil && (len(only) == 0 || slices.Contains(only, grants[i].User)) {
			err = do(&grants[i])
		}
	}
	return err
}

// addServers adds the configuration of NATS servers to the result.
func (k *Keys) addServers() (err error) {
	k.Result.Config, err = k.ring.ServerConfig(k.Resolver)
	return err
}

// published describes the step that activates a change of the keys.
func (k *Keys) published() error {
	if k.ring.Mode == natsauth.JWT {
		k.note("run `indexer auth push` to give the accounts to the NATS servers")
		return nil
	}
	k.note("replace the accounts in the NATS servers' configuration with the printed accounts, and " +
		"reload one server after the other, always twice (nats-server --signal reload; SIGHUP to an indexer with a server " +
		"inside): a new account's imports work from the second reload on")
	return k.addServers()
}
