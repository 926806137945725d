package natsauth

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Account is a NATS account with users.
//
// A namespace has an account for the nodes, with JetStream, and separate accounts for all further roles, shims, pools
// and stores. A user outside the nodes' account reaches a subject of the nodes only through an import. nats-server then
// replaces the reply subject of a request by a subject of the server. Therefore a request cannot make a node or
// JetStream publish on a subject denied to the sender. Permissions within an account do not cover reply subjects.
type Account struct {
	Name      string
	JetStream bool
	Exports   []Export
	Imports   []Import
	Users     []User
}

// Export opens a subject of an account to other accounts.
type Export struct {
	Subject string
	Stream  bool // other accounts may subscribe; else they may send requests
	Many    bool // a request may have several replies
}

// Import makes another account's export usable under the same subject.
type Import struct {
	From    string // name of the exporting account
	Subject string // covered by an export of that account
	Stream  bool
}

// User is a grant for the holder of a key.
type User struct {
	Grant    Grant
	Keys     []string // public nkeys, "U…"; several during a rotation
	Password string   // with Grant.User, if Keys is empty
}

// nodesAccount is the name of a namespace's account for nodes.
func nodesAccount(ns string) string { return "KVATLAS_" + strings.ReplaceAll(ns, "-", "_") }

// accountOf returns the name of the account for a grant's user.
func accountOf(ns string, g *Grant) string {
	if g.Role == RoleNode {
		return nodesAccount(ns)
	}
	return nodesAccount(ns) + "/" + g.User // no namespace has a '/'
}

// arrange arranges the users of a namespace in accounts, one for each grant. The nodes' account is the first.
func arrange(ns string, users []User) []Account {
	nodes := Account{Name: nodesAccount(ns), JetStream: true, Exports: exports(ns)}
	accounts := []Account{nodes}
	for _, u := range users {
		name := accountOf(ns, &u.Grant)
		i := slices.IndexFunc(accounts, func(a Account) bool { return a.Name == name })
		if i < 0 {
			i = len(accounts)
			accounts = append(accounts, Account{Name: name, Imports: imports(nodes.Name, &u.Grant)})
		}
		accounts[i].Users = append(accounts[i].Users, u)
	}
	return accounts
}

// oneAccount returns the accounts with all users in the nodes' account. Servers that had all users there load this
// configuration first, so that every account exists when the users move.
func oneAccount(ns string, accounts []Account) []Account {
	accounts = slices.Clone(accounts)
	var users []User
	for i, a := range accounts {
		for _, u := range a.Users {
			// Shims claim their models once they may. Until then, nodes accept models without a claim.
			u.Grant.Publish = slices.DeleteFunc(slices.Clone(u.Grant.Publish), func(subject string) bool {
				return subject == jetstream.Names(ns).ClaimsRequired()
			})
			users = append(users, u)
		}
		accounts[i].Users = nil
	}
	accounts[0].Users = users
	return accounts
}

// exports returns the exports of the nodes' account. The exports do not depend on the users, so a new shim changes
// nothing in the nodes' account. Every account imports the needed part.
func exports(ns string) []Export {
	names := jetstream.Names(ns)
	root := names.Root()
	list := []Export{{Subject: root + "ctl.>", Stream: true}, {Subject: discovery, Many: true}}
	for _, subject := range []string{
		root + "q.*", root + "dynamo.*.*", root + "ev.*.*.*", root + "engine.*", root + "store.*", names.StoreSources(),
		names.RecallPrefix() + "*.*.*", names.AnswerPrefix() + "*.*.*.*",
		names.ModelSubject("*"), jetstream.KeySubject(names.WorkersBucket(), "*.*.*"),
		"$JS.API.INFO", "$JS.API.STREAM.INFO.*", "$JS.API.STREAM.MSG.GET." + jetstream.BucketStream(names.MetaBucket()),
		"$JS.API.STREAM.MSG.GET." + names.RecordingStream(), directGet + ">",
	} {
		list = append(list, Export{Subject: subject})
	}
	return list
}

// imports returns the imports from the nodes' account for a grant.
func imports(nodes string, g *Grant) []Import {
	var list []Import
	for _, subject := range g.Requests {
		list = append(list, Import{From: nodes, Subject: subject})
	}
	for _, subject := range g.Imports {
		list = append(list, Import{From: nodes, Subject: subject, Stream: true})
	}
	return list
}

// accountsConfig returns accounts in the form of a nats-server configuration file.
func accountsConfig(accounts []Account) string {
	var b strings.Builder
	b.WriteString("accounts {\n")
	for _, a := range accounts {
		fmt.Fprintf(&b, "  %q {\n", a.Name)
		if a.JetStream {
			b.WriteString("    jetstream: enabled\n")
		}
		section(&b, "exports", len(a.Exports), func(i int) string { return a.Exports[i].config() })
		section(&b, "imports", len(a.Imports), func(i int) string { return a.Imports[i].config() })
		b.WriteString("    users: [\n")
		for _, u := range a.Users {
			u.config(&b)
		}
		b.WriteString("    ]\n  }\n")
	}
	b.WriteString("}\n")
	return b.String()
}

func section(b *strings.Builder, name string, n int, line func(int) string) {
	if n == 0 {
		return
	}
	fmt.Fprintf(b, "    %s: [\n", name)
	for i := range n {
		fmt.Fprintf(b, "      %s\n", line(i))
	}
	b.WriteString("    ]\n")
}

func kindOf(stream bool) string {
	if stream {
		return "stream"
	}
	return "service"
}

func (e Export) config() string {
	more := ""
	if e.Many {
		more = ", response_type: stream"
	}
	return fmt.Sprintf("{ %s: %q%s }", kindOf(e.Stream), e.Subject, more)
}

func (i Import) config() string {
	return fmt.Sprintf("{ %s: { account: %q, subject: %q } }", kindOf(i.Stream), i.From, i.Subject)
}

func (u *User) config(b *strings.Builder) {
	logins := make([]string, 0, 1+len(u.Keys))
	for _, key := range u.Keys {
		logins = append(logins, "nkey: "+key)
	}
	if len(logins) == 0 {
		logins = append(logins, fmt.Sprintf("user: %q, password: %q", u.Grant.User, u.Password))
	}
	for _, login := range logins {
		fmt.Fprintf(b, "      { %s, permissions: { # %s\n", login, u.Grant.User)
		allow(b, "publish", u.Grant.AllowPublish())
		allow(b, "subscribe", u.Grant.AllowSubscribe())
		if u.Grant.Respond {
			fmt.Fprintf(b, "          allow_responses: { max: 1, ttl: %q }\n", ReplyWithin)
		}
		b.WriteString("      } }\n")
	}
}

func allow(b *strings.Builder, what string, subjects []string) {
	fmt.Fprintf(b, "          %s: { allow: [\n", what)
	for line := range slices.Chunk(subjects, 2) {
		fmt.Fprintf(b, "            \"%s\"\n", strings.Join(line, `", "`))
	}
	b.WriteString("          ] }\n")
}
