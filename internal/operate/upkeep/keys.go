package upkeep

import (
	"fmt"
	"io"
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
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

// Keys changes the keys of NATS users in a folder. It prints the settings of the users and of the NATS servers.
type Keys struct {
	Ring     *natsauth.Ring
	Resolver string    // folder of the NATS servers for accounts; for keys created with JWTs
	NATS     string    // address of the NATS servers in the settings files of the users
	Servers  io.Writer // gets the configuration of NATS servers
	Users    io.Writer // gets the users' connection settings and the next step
}

// Create creates keys for the users of new namespaces. Without shims and pools, a single pool serves all shims.
func (k *Keys) Create(namespaces []string, partitions uint32, names *UserNames) error {
	for _, ns := range namespaces {
		if err := k.Ring.AddNamespace(ns, partitions); err != nil {
			return err
		}
		members := names.members(ns)
		if len(names.Shims)+len(names.Pools) == 0 {
			members = append(members, natsauth.Member{Namespace: ns, Role: natsauth.RolePool, Models: names.Models})
		}
		if _, err := k.Ring.AddAll(members); err != nil {
			return err
		}
	}
	if err := k.Ring.Save(); err != nil {
		return err
	}
	for _, ns := range namespaces {
		if err := k.writeUsers(ns); err != nil {
			return err
		}
	}
	return k.printServers()
}

// Add creates keys for further users of a namespace.
func (k *Keys) Add(namespace string, names *UserNames) error {
	members := names.members(namespace)
	if len(members) == 0 {
		return usage.Errorf("--shim, --pool, --store, --reader, --router, --operator or --analyst is missing")
	}
	added, err := k.Ring.AddAll(members)
	if err != nil {
		return err
	}
	if err := k.Ring.Save(); err != nil {
		return err
	}
	if err := k.writeUsers(namespace, added...); err != nil {
		return err
	}
	return k.published()
}

// Rotate creates new keys for users, or makes the old keys invalid with finish. Without users, it rotates the keys of
// all users of the namespace.
func (k *Keys) Rotate(namespace string, users []string, finish bool) error {
	if len(users) == 0 {
		grants, err := k.Ring.Grants(namespace)
		if err != nil {
			return err
		}
		for _, g := range grants {
			users = append(users, g.User)
		}
	}
	for _, user := range users {
		if !finish {
			if err := k.Ring.Rotate(namespace, user); err != nil {
				return err
			}
			if err := k.Ring.Save(); err != nil { // at once: the folder has the secret
				return err
			}
			continue
		}
		ended, err := k.Ring.Finish(namespace, user)
		if err != nil {
			return err
		}
		if !ended {
			fmt.Fprintf(k.Users, "%s: no old key\n", escape.Text(user))
		}
	}
	if err := k.Ring.Save(); err != nil {
		return err
	}
	if err := k.printUsers(namespace, users...); err != nil {
		return err
	}
	return k.published()
}

// Remove removes users and their keys.
func (k *Keys) Remove(namespace string, users []string) error {
	if len(users) == 0 {
		return usage.Errorf("--user is missing")
	}
	for _, user := range users {
		if err := k.Ring.Remove(namespace, user); err != nil {
			return err
		}
	}
	if err := k.Ring.Save(); err != nil {
		return err
	}
	return k.published()
}

// Print prints the configuration of NATS servers and the connection settings of all users again. With transition, it
// prints only a configuration with all users in the nodes' account.
func (k *Keys) Print(transition bool) error {
	if transition {
		text, err := k.Ring.TransitionConfig()
		if err == nil {
			_, err = io.WriteString(k.Servers, text)
		}
		return err
	}
	for _, ns := range k.Ring.Namespaces {
		if err := k.printUsers(ns.Name); err != nil {
			return err
		}
	}
	return k.printServers()
}

// printUsers prints the connection settings of a namespace's users: all users, or the named users.
func (k *Keys) printUsers(namespace string, only ...string) error {
	return k.eachUser(namespace, only, func(g *natsauth.Grant) error {
		fmt.Fprintf(k.Users, "%s: %s\n", escape.Text(g.User), escape.Text(k.Ring.Flags(namespace, g)))
		return nil
	})
}

// writeUsers writes the settings files of a namespace's users, of all or of the named users, and prints the users.
func (k *Keys) writeUsers(namespace string, only ...string) error {
	err := k.eachUser(namespace, only, func(g *natsauth.Grant) error {
		return k.Ring.WriteSettings(namespace, k.NATS, g)
	})
	if err != nil {
		return err
	}
	if err := k.printUsers(namespace, only...); err != nil {
		return err
	}
	fmt.Fprintf(k.Users, "in place of the flags: --config %s, with the user's name for *\n",
		escape.Text(k.Ring.SettingsFile(namespace, &natsauth.Grant{User: "*"})))
	return nil
}

// eachUser calls do for all users of a namespace, or for the named users, until an error.
func (k *Keys) eachUser(namespace string, only []string, do func(*natsauth.Grant) error) error {
	grants, err := k.Ring.Grants(namespace)
	for i := range grants {
		if err == nil && (len(only) == 0 || slices.Contains(only, grants[i].User)) {
			err = do(&grants[i])
		}
	}
	return err
}

// printServers prints the configuration of NATS servers.
func (k *Keys) printServers() error {
	text, err := k.Ring.ServerConfig(k.Resolver)
	if err == nil {
		_, err = io.WriteString(k.Servers, text)
	}
	return err
}

// published describes the step that activates a change of the keys.
func (k *Keys) published() error {
	if k.Ring.Mode == natsauth.JWT {
		fmt.Fprintln(k.Users, "run `indexer auth push` to give the accounts to the NATS servers")
		return nil
	}
	fmt.Fprintln(k.Users, "replace the accounts in the NATS servers' configuration with the printed accounts, and "+
		"reload one server after the other, always twice (nats-server --signal reload; SIGHUP to an indexer with a server "+
		"inside): a new account's imports work from the second reload on")
	return k.printServers()
}
