package natsauth

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Files of a ring in mode JWT, beside the files of its users.
const (
	operatorSeed = "operator.nk"
	systemSeed   = "system.account.nk"
	systemCreds  = "system.creds"
)

func accountSeed(namespace, user string) string { return namespace + "-" + user + ".account.nk" }

func (r *Ring) credsPath(namespace, user string) string {
	return filepath.Join(r.dir, namespace+"-"+user+".creds")
}

// SystemCreds returns the path of the credentials for [Ring.Push].
func (r *Ring) SystemCreds() string { return filepath.Join(r.dir, systemCreds) }

// pair reads a key pair of the ring.
func (r *Ring) pair(name string) (nkeys.KeyPair, error) {
	path := filepath.Join(r.dir, name)
	seed, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pair, err := nkeys.ParseDecoratedNKey(seed)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return pair, nil
}

// writeCreds writes the credentials file of a user's current key.
func (r *Ring) writeCreds(m *Member, g *Grant) error {
	user := jwt.NewUserClaims(m.Keys[0])
	user.Name = m.Namespace + "-" + g.User
	user.Pub.Allow = g.AllowPublish()
	user.Sub.Allow = g.AllowSubscribe()
	if g.Respond {
		user.Resp = &jwt.ResponsePermission{MaxMsgs: 1, Expires: ReplyWithin}
	}
	seed, err := os.ReadFile(r.SeedFile(m.Namespace, g))
	if err != nil {
		return err
	}
	return r.sign(user, accountSeed(m.Namespace, g.User), seed, r.credsPath(m.Namespace, g.User))
}

func (r *Ring) writeSystemCreds() error {
	pair, err := nkeys.CreateUser()
	if err != nil {
		return err
	}
	key, err := pair.PublicKey()
	if err != nil {
		return err
	}
	seed, err := pair.Seed()
	if err != nil {
		return err
	}
	user := jwt.NewUserClaims(key)
	user.Name = "system"
	// Only the permissions that Push needs.
	user.Pub.Allow = []string{claimsUpdate, claimsDelete}
	user.Sub.Allow = []string{"_INBOX.>"}
	return r.sign(user, systemSeed, seed, r.SystemCreds())
}

// sign signs a user with an account's key and writes the credentials file.
func (r *Ring) sign(user *jwt.UserClaims, account string, seed []byte, path string) error {
	pair, err := r.pair(account)
	if err != nil {
		return err
	}
	token, err := user.Encode(pair)
	if err != nil {
		return err
	}
	text, err := jwt.FormatUserConfig(token, []byte(strings.TrimSpace(string(seed))))
	if err != nil {
		return err
	}
	return writeNew(path, text)
}

// accountTokens returns the signed accounts of the selected members, by public key.
func (r *Ring) accountTokens(which func(*Member) bool) (map[string]string, error) {
	operator, err := r.pair(operatorSeed)
	if err != nil {
		return nil, err
	}
	tokens := map[string]string{}
	for _, ns := range r.Namespaces {
		accounts, err := r.accounts(ns.Name)
		if err != nil {
			return nil, err
		}
		keys := map[string]string{} // public keys of accounts, by name
		for _, a := range accounts {
			keys[a.Name] = r.Members[r.find(ns.Name, a.Users[0].Grant.User)].Account
		}
		for _, a := range accounts {
			m := &r.Members[r.find(ns.Name, a.Users[0].Grant.User)]
			if !which(m) {
				continue
			}
			token, err := accountClaims(&a, m, keys).Encode(operator)
			if err != nil {
				return nil, fmt.Errorf("account %s: %w", a.Name, err)
			}
			tokens[m.Account] = token
		}
	}
	return tokens, nil
}

func accountClaims(a *Account, m *Member, keys map[string]string) *jwt.AccountClaims {
	claims := jwt.NewAccountClaims(m.Account)
	claims.Name = a.Name
	if a.JetStream {
		claims.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: jwt.NoLimit, DiskStorage: jwt.NoLimit,
			Streams: jwt.NoLimit, Consumer: jwt.NoLimit}
	}
	for _, e := range a.Exports {
		export := &jwt.Export{Name: e.Subject, Subject: jwt.Subject(e.Subject), Type: exportType(e.Stream)}
		if !e.Stream {
			export.ResponseType = jwt.ResponseTypeSingleton
			if e.Many {
				export.ResponseType = jwt.ResponseTypeStream
			}
		}
		claims.Exports.Add(export)
	}
	for _, i := range a.Imports {
		claims.Imports.Add(&jwt.Import{Name: i.Subject, Subject: jwt.Subject(i.Subject), Account: keys[i.From],
			Type: exportType(i.Stream)})
	}
	for _, key := range m.Revoked {
		claims.RevokeAt(key, time.Now().Add(24*365*100*time.Hour)) // revoked for tokens of any age
	}
	return claims
}

func exportType(stream bool) jwt.ExportType {
	if stream {
		return jwt.Stream
	}
	return jwt.Service
}

// operatorConfig returns the part of a nats-server configuration that names the operator, with the accounts of nodes
// and their clients. Servers receive the accounts of shims by Push.
func (r *Ring) operatorConfig(resolver string) (string, error) {
	operator, err := r.pair(operatorSeed)
	if err != nil {
		return "", err
	}
	claims := jwt.NewOperatorClaims(r.Operator)
	claims.Name = "kvatlas"
	claims.SystemAccount = r.System
	token, err := claims.Encode(operator)
	if err != nil {
		return "", err
	}
	system := jwt.NewAccountClaims(r.System)
	system.Name = "SYS"
	systemToken, err := system.Encode(operator)
	if err != nil {
		return "", err
	}
	// Removable accounts are left out: a server would accept them again at its next start.
	tokens, err := r.accountTokens(func(m *Member) bool { return !m.removable() })
	if err != nil {
		return "", err
	}
	tokens[r.System] = systemToken
	keys := make([]string, 0, len(tokens))
	for key := range tokens {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	var b strings.Builder
	fmt.Fprintf(&b, "operator: %s\nsystem_account: %s\n", token, r.System)
	fmt.Fprintf(&b, "resolver: { type: full, dir: %q, allow_delete: true, interval: \"2m\" }\nresolver_preload: {\n",
		resolver)
	for _, key := range keys {
		fmt.Fprintf(&b, "  %s: %s\n", key, tokens[key])
	}
	b.WriteString("}\n")
	return b.String(), nil
}

// Subjects for updates of accounts (nats-server › server/accounts.go).
const (
	claimsUpdate = "$SYS.REQ.CLAIMS.UPDATE"
	claimsDelete = "$SYS.REQ.CLAIMS.DELETE"
)

// Push sends all accounts to running servers, and deletes the removed accounts there. conn must be a connection of the
// ring's system user ([Ring.SystemCreds]). Push returns the number of accounts that the server has accepted. Push is
// idempotent.
func (r *Ring) Push(ctx context.Context, conn *jetstream.Conn) (taken int, err error) {
	if r.Mode != JWT {
		return 0, fmt.Errorf("the servers of %s read users from their configuration: print it with `indexer auth print`, "+
			"and reload it", r.dir)
	}
	tokens, err := r.accountTokens(func(*Member) bool { return true })
	if err != nil {
		return 0, err
	}
	for _, token := range tokens {
		if err := updateAccount(ctx, conn, claimsUpdate, token); err != nil {
			return taken, err
		}
		taken++
	}
	if len(r.Removed) == 0 {
		return taken, nil
	}
	operator, err := r.pair(operatorSeed)
	if err != nil {
		return taken, err
	}
	claims := jwt.NewGenericClaims(r.Operator)
	claims.Data["accounts"] = r.Removed
	token, err := claims.Encode(operator)
	if err != nil {
		return taken, err
	}
	if err := updateAccount(ctx, conn, claimsDelete, token); err != nil {
		return taken, err
	}
	r.Removed = nil
	return taken, r.Save()
}

// updateAccount sends a signed token to the servers and returns their refusal.
func updateAccount(ctx context.Context, conn *jetstream.Conn, subject, token string) error {
	reply, err := conn.Request(ctx, subject, "", []byte(token))
	if errors.Is(err, jetstream.ErrNoResponder) {
		return fmt.Errorf("the NATS server does not accept accounts: start it with the configuration of "+
			"`indexer auth print`: %w",
			err)
	}
	if err != nil {
		return err
	}
	var answer struct {
		Error *struct {
			Description string `json:"description"`
		} `json:"error"`
	}
	if err := strictjson.Unmarshal(reply.Body, &answer); err != nil {
		return fmt.Errorf("answer to %s: %w", subject, err)
	}
	if answer.Error != nil {
		return fmt.Errorf("%s: the NATS server refused an account: %s", subject, answer.Error.Description)
	}
	return nil
}
