package natsauth

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/nats-io/nkeys"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Mode is the way in which servers receive users.
type Mode string

// The modes; see the package comment.
const (
	Static Mode = "static"
	JWT    Mode = "jwt"
)

const (
	rosterFile    = "roster.json"
	rosterVersion = 1
)

// Roster lists namespaces and users. It is stored as JSON and contains no secrets.
type Roster struct {
	Version    int         `json:"version"`
	Mode       Mode        `json:"mode"`
	Namespaces []Namespace `json:"namespaces"`
	Members    []Member    `json:"members"`

	// Operator and System are the public keys of the operator and of the system account. Mode JWT only.
	Operator string `json:"operator,omitempty"`
	System   string `json:"system_account,omitempty"`

	// Removed are accounts that servers may still have. Mode JWT only; [Ring.Push] deletes them on the servers.
	Removed []string `json:"removed,omitempty"`
}

// Namespace is a deployment with users in the roster.
type Namespace struct {
	Name       string `json:"name"`
	Partitions uint32 `json:"partitions"`
}

// Member is a NATS user.
type Member struct {
	Namespace string `json:"namespace"`
	Role      Role   `json:"role"`

	// Name distinguishes a further reader, router or operator from the namespace's own; empty for the namespace's own.
	// Analysts have names.
	Name string `json:"name,omitempty"`

	// Worker, Pool and Store name the publisher behind a shim's key; Pool may be empty. Models are the models that a
	// shim may serve; an empty list permits all models.
	Worker string   `json:"worker,omitempty"`
	Pool   string   `json:"pool,omitempty"`
	Store  string   `json:"store,omitempty"`
	Models []string `json:"models,omitempty"`

	// Keys are the public keys: the current key first, then keys that are still valid after a rotation.
	Keys []string `json:"keys"`

	// Account is the public key of the user's account. Revoked are user keys that are no longer valid in the account.
	// Mode JWT only.
	Account string   `json:"account,omitempty"`
	Revoked []string `json:"revoked,omitempty"`
}

// removable reports whether a namespace works without the user.
func (m *Member) removable() bool {
	return m.Name != "" || m.Role == RoleShim || m.Role == RolePool || m.Role == RoleStore
}

// Ring is a folder with the keys of NATS users.
type Ring struct {
	Roster

	dir      string
	keepKeys bool
}

// Create returns a new ring in a folder. The folder may exist, but must not contain a roster. Before [Ring.Save], only
// secrets are written.
func Create(dir string, mode Mode) (*Ring, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	switch _, err := os.Stat(filepath.Join(dir, rosterFile)); {
	case err == nil:
		return nil, fmt.Errorf("%s already has keys (%s); use another folder, or change the keys with `indexer auth add`, "+
			"`rotate` or `remove`", dir, rosterFile)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	r := &Ring{dir: dir, Roster: Roster{Version: rosterVersion, Mode: mode}}
	if mode == JWT {
		var err error
		if r.Operator, err = r.newKey(operatorSeed, nkeys.CreateOperator); err != nil {
			return nil, err
		}
		if r.System, err = r.newKey(systemSeed, nkeys.CreateAccount); err != nil {
			return nil, err
		}
		if err := r.writeSystemCreds(); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// Open reads the ring in a folder.
func Open(dir string) (*Ring, error) {
	text, err := os.ReadFile(filepath.Join(dir, rosterFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s has no %s: make keys with `indexer auth create`", dir, rosterFile)
	}
	if err != nil {
		return nil, err
	}
	r := &Ring{dir: dir}
	if err := strictjson.Unmarshal(text, &r.Roster); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, rosterFile), err)
	}
	if r.Version != rosterVersion {
		return nil, fmt.Errorf("%s has version %d; this program reads version %d", filepath.Join(dir, rosterFile),
			r.Version, rosterVersion)
	}
	return r, nil
}

// KeepKeys makes Add reuse secrets that are already in the folder: keys of a release without rosters.
func (r *Ring) KeepKeys() { r.keepKeys = true }

// Save writes the roster.
func (r *Ring) Save() error {
	text, err := json.MarshalIndent(&r.Roster, "", "  ")
	if err != nil {
		return err
	}
	return replaceFile(filepath.Join(r.dir, rosterFile), append(text, '\n'))
}

// AddNamespace adds a namespace and its users for nodes, readers, routers and operators.
func (r *Ring) AddNamespace(name string, partitions uint32) error {
	if r.namespace(name) != nil {
		return fmt.Errorf("%s already contains namespace %s", r.dir, name)
	}
	r.Namespaces = append(r.Namespaces, Namespace{Name: name, Partitions: partitions})
	for _, role := range []Role{RoleNode, RoleReader, RoleRouter,
		RoleOperator} {
		if _, err := r.Add(Member{Namespace: name, Role: role}); err != nil {
			return err
		}
	}
	return nil
}

// AddAll adds users, and returns their names.
func (r *Ring) AddAll(list []Member) (users []string, err error) {
	for _, m := range list {
		g, err := r.Add(m)
		if err != nil {
			return nil, err
		}
		users = append(users, g.User)
	}
	return users, nil
}

// Add adds a user and creates its keys. It returns the user's grant.
func (r *Ring) Add(m Member) (Grant, error) {
	g, err := r.grant(&m)
	if err != nil {
		return g, err
	}
	if r.find(m.Namespace, g.User) >= 0 {
		return g, fmt.Errorf("%s already contains user %s of namespace %s", r.dir, g.User, m.Namespace)
	}
	for i := range r.Members {
		if other, err := r.grant(&r.Members[i]); err == nil && r.seedPath(r.Members[i].Namespace, other.User) ==
			r.seedPath(m.Namespace, g.User) {
			return g, fmt.Errorf("user %s of namespace %s would have the key file of user %s of namespace %s: use another "+
				"folder for one of the namespaces", g.User, m.Namespace, other.User, r.Members[i].Namespace)
		}
	}
	key, err := r.newUserKey(m.Namespace, g.User)
	if err != nil {
		return g, err
	}
	m.Keys = []string{key}
	if r.Mode == JWT {
		if m.Account, err = r.newKey(accountSeed(m.Namespace, g.User), nkeys.CreateAccount); err != nil {
			return g, err
		}
		if err := r.writeCreds(&m, &g); err != nil {
			return g, err
		}
	}
	r.Members = append(r.Members, m)
	return g, nil
}

// Rotate creates a new key for a user. The old key stays valid until [Ring.Finish], and its secret stays in the folder
// with the suffix ".old".
func (r *Ring) Rotate(namespace, user string) error {
	m, g, err := r.member(namespace, user)
	if err != nil {
		return err
	}
	if len(m.Keys) > 1 {
		return fmt.Errorf("user %s already has two keys; give its programs the new key, then end the rotation with "+
			"--finish", user)
	}
	for _, path := range r.secrets(m, &g) {
		if err := os.Rename(path, path+".old"); err != nil {
			return err
		}
	}
	key, err := r.newUserKey(namespace, user)
	if err != nil {
		return err
	}
	m.Keys = append([]string{key}, m.Keys...)
	if r.Mode == JWT {
		return r.writeCreds(m, &g)
	}
	return nil
}

// Finish ends the rotation of a user's key: the old key becomes invalid, and its secret is removed. The result is false
// without a rotation.
func (r *Ring) Finish(namespace, user string) (bool, error) {
	m, g, err := r.member(namespace, user)
	if err != nil || len(m.Keys) < 2 {
		return false, err
	}
	if r.Mode == JWT {
		m.Revoked = append(m.Revoked, m.Keys[1:]...)
	}
	m.Keys = m.Keys[:1]
	for _, path := range r.secrets(m, &g) {
		if err := os.Remove(path + ".old"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return true, err
		}
	}
	return true, nil
}

// Remove removes a user and its secrets.
func (r *Ring) Remove(namespace, user string) error {
	m, g, err := r.member(namespace, user)
	if err != nil {
		return err
	}
	if !m.removable() {
		return fmt.Errorf("user %s of namespace %s cannot be removed: every namespace needs it; replace its key with "+
			"`indexer auth rotate`",
			user, namespace)
	}
	paths := r.secrets(m, &g)
	for _, path := range r.secrets(m, &g) {
		paths = append(paths, path+".old")
	}
	if m.Account != "" {
		r.Removed = append(r.Removed, m.Account)
		paths = append(paths, filepath.Join(r.dir, accountSeed(namespace, user)))
	}
	for _, path := range paths {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := r.removeSettings(namespace, &g); err != nil {
		return err
	}
	r.Members = slices.Delete(r.Members, r.find(namespace, user), r.find(namespace, user)+1)
	return nil
}

// Flags returns the flags for a connection as the user.
func (r *Ring) Flags(namespace string, g *Grant) string {
	flag, path := r.credential(namespace, g)
	return flag + " " + path + " --nats-inbox-prefix " + g.Inbox
}

// credential returns the file for a connection as the user, and the flag that names the file.
func (r *Ring) credential(namespace string, g *Grant) (flag, path string) {
	if r.Mode == JWT {
		return "--nats-creds", r.credsPath(namespace, g.User)
	}
	return "--nats-nkey", r.SeedFile(namespace, g)
}

// Grants returns the permissions of each user of a namespace.
func (r *Ring) Grants(namespace string) (grants []Grant, err error) {
	for i := range r.Members {
		if m := &r.Members[i]; m.Namespace == namespace {
			g, err := r.grant(m)
			if err != nil {
				return nil, err
			}
			grants = append(grants, g)
		}
	}
	return grants, nil
}

// ServerConfig returns the part of a nats-server configuration for the ring. In mode JWT, servers store accounts in the
// folder resolver.
func (r *Ring) ServerConfig(resolver string) (string, error) {
	if r.Mode == JWT {
		return r.operatorConfig(resolver)
	}
	return r.staticConfig(func(_ string, accounts []Account) []Account { return accounts })
}

// TransitionConfig is ServerConfig with all users of a namespace in one account, as in releases before 0.5.
func (r *Ring) TransitionConfig() (string, error) {
	if r.Mode == JWT {
		return "", fmt.Errorf("the keys in %s have mode jwt: servers accept new accounts with `indexer auth push`", r.dir)
	}
	return r.staticConfig(oneAccount)
}

// staticConfig returns the accounts of all namespaces as a configuration. amend changes the accounts of a namespace.
func (r *Ring) staticConfig(amend func(ns string, accounts []Account) []Account) (string, error) {
	var all []Account
	for _, ns := range r.Namespaces {
		accounts, err := r.accounts(ns.Name)
		if err != nil {
			return "", err
		}
		all = append(all, amend(ns.Name, accounts)...)
	}
	return accountsConfig(all), nil
}

func (r *Ring) accounts(namespace string) ([]Account, error) {
	var users []User
	for i := range r.Members {
		m := &r.Members[i]
		if m.Namespace != namespace {
			continue
		}
		g, err := r.grant(m)
		if err != nil {
			return nil, err
		}
		users = append(users, User{Grant: g, Keys: m.Keys})
	}
	return arrange(namespace, users), nil
}

func (r *Ring) namespace(name string) *Namespace {
	i := slices.IndexFunc(r.Namespaces, func(n Namespace) bool { return n.Name == name })
	if i < 0 {
		return nil
	}
	return &r.Namespaces[i]
}

// grant returns the permissions of a member.
func (r *Ring) grant(m *Member) (Grant, error) {
	ns := r.namespace(m.Namespace)
	if ns == nil {
		return Grant{}, fmt.Errorf("%s has no namespace %s", r.dir, m.Namespace)
	}
	switch m.Role {
	case RoleNode:
		return NodeGrant(ns.Name), nil
	case RoleReader:
		return m.named(ReaderGrant(ns.Name))
	case RoleRouter:
		return m.named(RouterGrant(ns.Name))
	case RoleOperator:
		return m.named(OperatorGrant(ns.Name))
	case RoleAnalyst:
		return m.named(AnalystGrant(ns.Name))
	case RoleShim:
		return ShimGrant(ns.Name, ns.Partitions, events.WorkerID(m.Worker), m.Models...)
	case RolePool:
		return PoolGrant(ns.Name, ns.Partitions, m.Pool, m.Models...)
	case RoleStore:
		return StoreGrant(ns.Name, m.Store)
	}
	return Grant{}, fmt.Errorf("this release has no role %q", m.Role)
}

func (m *Member) named(g Grant) (Grant, error) {
	if m.Name == "" {
		return g, nil
	}
	return g.Named(m.Name)
}

func (r *Ring) find(namespace, user string) int {
	return slices.IndexFunc(r.Members, func(m Member) bool {
		g, err := r.grant(&m)
		return err == nil && m.Namespace == namespace && g.User == user
	})
}

func (r *Ring) member(namespace, user string) (*Member, Grant, error) {
	i := r.find(namespace, user)
	if i < 0 {
		grants, _ := r.Grants(namespace)
		names := make([]string, len(grants))
		for i := range grants {
			names[i] = grants[i].User
		}
		return nil, Grant{}, fmt.Errorf("namespace %s has no user %s in %s; it has %s", namespace, user, r.dir,
			strings.Join(names, ", "))
	}
	g, err := r.grant(&r.Members[i])
	return &r.Members[i], g, err
}

// SeedFile returns the path of the seed of a user's key.
func (r *Ring) SeedFile(namespace string, g *Grant) string {
	return r.seedPath(namespace, g.User)
}

func (r *Ring) seedPath(namespace, user string) string {
	return filepath.Join(r.dir, namespace+"-"+user+".nk")
}

// secrets returns the paths of a user's secrets.
func (r *Ring) secrets(m *Member, g *Grant) []string {
	paths := []string{r.seedPath(m.Namespace, g.User)}
	if r.Mode == JWT {
		paths = append(paths, r.credsPath(m.Namespace, g.User))
	}
	return paths
}

// newUserKey creates a key pair for a user, and returns the public key. If the ring keeps keys, an existing seed in the
// folder is reused.
func (r *Ring) newUserKey(namespace, user string) (public string, err error) {
	path := r.seedPath(namespace, user)
	if r.keepKeys {
		seed, err := os.ReadFile(path)
		if err == nil {
			return publicOf(path, seed)
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
	}
	return r.newKey(filepath.Base(path), nkeys.CreateUser)
}

// newKey creates a key pair, writes the seed to a new file of the ring, and returns the public key.
func (r *Ring) newKey(name string, create func() (nkeys.KeyPair, error)) (public string, err error) {
	pair, err := create()
	if err != nil {
		return "", err
	}
	seed, err := pair.Seed()
	if err != nil {
		return "", err
	}
	if err := writeNew(filepath.Join(r.dir, name), append(seed, '\n')); err != nil {
		return "", err
	}
	return pair.PublicKey()
}

func publicOf(path string, seed []byte) (string, error) {
	pair, err := nkeys.ParseDecoratedNKey(seed)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	return pair.PublicKey()
}

// writeNew writes a secret to a new file.
func writeNew(path string, secret []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(secret)
	return errors.Join(err, f.Close())
}

// replaceFile replaces a file atomically.
func replaceFile(path string, text []byte) error {
	next := path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := writeNew(next, text); err != nil {
		return err
	}
	return os.Rename(next, path)
}
