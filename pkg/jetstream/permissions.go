package jetstream

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/nats-io/nkeys"
)

// Grant is what one NATS user may do: the allow lists of an authorization block (docs.nats.io, "Authorization"). What
// is not on a list is refused.
type Grant struct {
	User string // a name for people, unique in its account
	// prefix of the subjects on which it takes replies; its connections must use it ([ConnOptions.InboxPrefix])
	Inbox     string
	Publish   []string
	Subscribe []string
	Respond   bool // it may answer whoever asks it, for a few seconds
}

// NodeGrant is for indexer nodes: all of a namespace, and JetStream in their account. A namespace has an account of its
// own, which is what keeps two namespaces on one server apart.
func NodeGrant(ns string) Grant {
	g := Grant{User: "node", Inbox: "_INBOX_node", Respond: true}
	g.Publish = []string{"$JS.API.>", subjectRoot + ns + ".>"}
	for _, bucket := range []string{metaBucket(ns), snapshotBucket(ns), nodesBucket(ns), workersBucket(ns)} {
		g.Publish = append(g.Publish, keySubject(bucket, ">"))
	}
	g.Subscribe = []string{g.Inbox + ".>", subjectRoot + ns + ".>", "$SRV.>"}
	return g
}

// ReaderGrant is for whoever only asks.
func ReaderGrant(ns string) Grant {
	return askerGrant(ns, "reader")
}

// RouterGrant is for who chooses workers, books requests on them and ends these, and reports how full engines are: a
// reader's rights and these.
func RouterGrant(ns string) Grant {
	g := askerGrant(ns, "router", "select", "book", "prefill_complete", "output_block", "free", "engine_load",
		"report")
	g.Publish = append(g.Publish, subjectRoot+ns+".dynamo.*.generate", subjectRoot+ns+".dynamo.*.select")
	return g
}

// askerGrant is for who sends requests to nodes: a reader's operations and more.
func askerGrant(ns, user string, more ...string) Grant {
	inbox := "_INBOX_" + user
	g := Grant{User: user, Inbox: inbox, Publish: []string{"$JS.API.INFO"}, Subscribe: []string{inbox + ".>"}}
	for _, op := range append([]string{"find", "workers", "status", "loads", "potential_loads", "engine_loads", "funnel"},
		more...) {
		g.Publish = append(g.Publish, QuerySubject(ns, op))
	}
	return g
}

// OperatorGrant is for who changes, drains, registers and removes workers: a reader's rights and these.
func OperatorGrant(ns string) Grant {
	return askerGrant(ns, "operator", "worker_register", "worker_change", "worker_remove")
}

// ShimGrant is for the shim of one worker, with any ranks; partitions is the namespace's. It may publish this worker's
// events, its lease and how full it is, answer for it, and read the last event and lease. What snapshots know of the
// worker a node tells it.
func ShimGrant(ns string, partitions uint32, instance events.WorkerID) (Grant, error) {
	token, err := EscapeToken(string(instance))
	if err != nil {
		return Grant{}, err
	}
	p := partitionOfToken(token, partitions)
	g := shimGrant(ns, "shim-"+token, []events.Partition{p})
	log := subjectRoot + ns + ".ev." + decimal(uint64(p)) + "." + token + ".*"
	lease := keySubject(workersBucket(ns), decimal(uint64(p))+"."+token+".*")
	g.Publish = append(g.Publish, log, lease, subjectRoot+ns+".engine."+token, ControlSubject(ns, p)+"."+token+".*",
		RecallPrefix(ns)+decimal(uint64(p))+"."+token+".*", directGet+StreamName(ns, p)+"."+log,
		directGet+bucketStream(workersBucket(ns))+"."+lease)
	g.Subscribe = append(g.Subscribe, ControlSubject(ns, p), ControlSubject(ns, p)+"."+token+".*")
	return g, nil
}

// AnyShimGrant is for shims of whichever worker or shared store, where workers come and go too often for a user each.
func AnyShimGrant(ns string, partitions uint32) Grant {
	all := make([]events.Partition, partitions)
	for i := range all {
		all[i] = events.Partition(i)
	}
	g := shimGrant(ns, "shim", all)
	leases := keySubject(workersBucket(ns), "*.*.*") // and no key of operators
	g.Publish = append(g.Publish, subjectRoot+ns+".ev.>", subjectRoot+ns+".ctl.>", subjectRoot+ns+".store.>", leases,
		EngineSubjects(ns),
		RecallPrefix(ns)+">", directGet+bucketStream(workersBucket(ns))+"."+leases)
	for _, p := range all {
		g.Publish = append(g.Publish, directGet+StreamName(ns, p)+"."+streamSubjects(ns, p))
	}
	g.Subscribe = append(g.Subscribe, subjectRoot+ns+".ctl.>")
	return g
}

// directGet begins the subjects of direct gets; the stream's name and the subject whose last message is wanted follow.
const directGet = "$JS.API.DIRECT.GET."

// StoreGrant is for the shim of one shared store, whose master has this HTTP address. It may pass on what that
// publishes, and reads nothing.
func StoreGrant(ns, store string) (Grant, error) {
	subject, err := StoreSubject(ns, store)
	if err != nil {
		return Grant{}, err
	}
	token, _ := EscapeToken(store) // it was one just now
	user := "store-" + token
	return Grant{User: user, Inbox: "_INBOX_" + user, Publish: []string{subject}, Subscribe: []string{"_INBOX_" + user +
		".>"}}, nil
}

func shimGrant(ns, user string, partitions []events.Partition) Grant {
	g := Grant{User: user, Inbox: "_INBOX_" + user, Respond: true}
	g.Publish = []string{"$JS.API.INFO", "$JS.API.STREAM.MSG.GET." + bucketStream(metaBucket(ns)),
		keySubject(metaBucket(ns), "model.*")}
	for _, p := range partitions {
		g.Publish = append(g.Publish, "$JS.API.STREAM.INFO."+StreamName(ns, p))
	}
	g.Subscribe = []string{g.Inbox + ".>", "$SRV.>"}
	return g
}

// Account is a NATS account with users, by their public nkeys or, where Key is empty, by name and password.
type Account struct {
	Name  string
	Users []User
}

// User is a grant for who holds a key.
type User struct {
	Grant    Grant
	Key      string // public nkey, "U…"
	Password string // with Grant.User, if there is no key
}

// AccountsConfig writes accounts in the form of a nats-server configuration file.
func AccountsConfig(accounts []Account) string {
	var b strings.Builder
	b.WriteString("accounts {\n")
	for _, a := range accounts {
		fmt.Fprintf(&b, "  %s {\n    jetstream: enabled\n    users: [\n", a.Name)
		for _, u := range a.Users {
			if u.Key != "" {
				fmt.Fprintf(&b, "      { nkey: %s, permissions: { # %s\n", u.Key, u.Grant.User)
			} else {
				fmt.Fprintf(&b, "      { user: %q, password: %q, permissions: {\n", u.Grant.User, u.Password)
			}
			list := func(what string, subjects []string) {
				fmt.Fprintf(&b, "          %s: { allow: [\n", what)
				for line := range slices.Chunk(subjects, 2) {
					fmt.Fprintf(&b, "            \"%s\"\n", strings.Join(line, `", "`))
				}
				b.WriteString("          ] }\n")
			}
			list("publish", u.Grant.Publish)
			list("subscribe", u.Grant.Subscribe)
			if u.Grant.Respond {
				b.WriteString("          allow_responses: { max: 1, ttl: \"5s\" }\n")
			}
			b.WriteString("      } }\n")
		}
		b.WriteString("    ]\n  }\n")
	}
	b.WriteString("}\n")
	return b.String()
}

// NewUserKey makes an nkey for a user: the seed, which is the secret, and the public key.
func NewUserKey() (seed []byte, public string, err error) {
	pair, err := nkeys.CreateUser()
	if err != nil {
		return nil, "", err
	}
	if seed, err = pair.Seed(); err != nil {
		return nil, "", err
	}
	public, err = pair.PublicKey()
	return seed, public, err
}
