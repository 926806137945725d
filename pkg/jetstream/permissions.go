package jetstream

import (
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Role names a kind of NATS user.
type Role string

// The roles. Each has a NATS account of its own; each shim, pool and store too. See [Account].
const (
	RoleNode     Role = "node"     // an indexer node
	RoleReader   Role = "reader"   // queries
	RoleRouter   Role = "router"   // queries, choices, bookings
	RoleOperator Role = "operator" // queries, changes of workers
	RoleShim     Role = "shim"     // the shim of one worker
	RolePool     Role = "pool"     // shims that trust each other, of any worker
	RoleStore    Role = "store"    // the shim of a shared store
)

// Grant lists the subjects of one NATS user. The server refuses all other subjects.
type Grant struct {
	Role Role
	User string // a name for people, unique in the namespace

	// Inbox is the first token of the user's reply subjects; its connections must use it ([ConnOptions.InboxPrefix]).
	Inbox string

	// Requests are subjects that the user publishes to and that nodes or JetStream serve. A user outside the nodes'
	// account imports each of them as a service: the server then replaces the reply subject by one of its own.
	Requests []string

	// Hears are subjects of the nodes' account that the user subscribes to; it imports each of them as a stream.
	Hears []string

	// Publish and Subscribe are further subjects, within the user's own account.
	Publish   []string
	Subscribe []string

	// Respond lets the user publish one reply on the reply subject of each request that it receives.
	Respond bool
}

// ReplyWithin is how long a user with [Grant.Respond] may take for a reply.
const ReplyWithin = 5 * time.Minute

// AllowPublish returns the complete publish allow list.
func (g *Grant) AllowPublish() []string {
	return slices.Concat(g.Requests, g.Publish)
}

// AllowSubscribe returns the complete subscribe allow list.
func (g *Grant) AllowSubscribe() []string {
	return slices.Concat([]string{g.Inbox + ".>"}, g.Hears, g.Subscribe)
}

// NodeGrant is for indexer nodes: the whole namespace, and JetStream in their account. Only nodes are in that account,
// so requests from elsewhere have reply subjects of the server's making.
func NodeGrant(ns string) Grant {
	g := Grant{Role: RoleNode, User: string(RoleNode), Inbox: "_INBOX_node", Respond: true}
	g.Publish = []string{"$JS.API.>", subjectRoot + ns + ".>", userInfo, responses + ">", g.Inbox + ".>",
		ClaimsRequiredSubject(ns)}
	for _, bucket := range []string{metaBucket(ns), snapshotBucket(ns), nodesBucket(ns), workersBucket(ns)} {
		g.Publish = append(g.Publish, keySubject(bucket, ">"))
	}
	g.Subscribe = []string{subjectRoot + ns + ".>", discovery}
	return g
}

// userInfo is where the server tells a user its account and permissions.
const userInfo = "$SYS.REQ.USER.INFO"

// discovery covers the subjects of NATS service discovery (ADR-32).
const discovery = "$SRV.>"

// ReaderGrant is for queries.
func ReaderGrant(ns string) Grant {
	return askerGrant(ns, RoleReader, api.AccessRead)
}

// RouterGrant is for programs that choose workers, book requests on them, end these, and report how full engines are:
// a reader's rights and these.
func RouterGrant(ns string) Grant {
	g := askerGrant(ns, RoleRouter, api.AccessRead, api.AccessRoute)
	g.Requests = append(g.Requests, subjectRoot+ns+".dynamo.*.generate", subjectRoot+ns+".dynamo.*.select")
	return g
}

// OperatorGrant is for changing, draining, registering and removing workers, and for listing services: a reader's
// rights and these.
func OperatorGrant(ns string) Grant {
	g := askerGrant(ns, RoleOperator, api.AccessRead, api.AccessOperate)
	for _, verb := range []string{"PING", "INFO", "STATS"} {
		g.Requests = append(g.Requests, "$SRV."+verb, "$SRV."+verb+".>")
	}
	return g
}

// Named returns the grant for a further user of the same role, who has an account and an inbox of its own: users of one
// account can read each other's replies.
func (g Grant) Named(name string) (Grant, error) {
	token, err := EscapeToken(name)
	if err != nil {
		return g, err
	}
	g.User += "-" + token
	g.Inbox = InboxRoot + "_" + g.User
	return g, nil
}

// askerGrant is for clients of nodes: it lists the granted operations of each of the accesses.
func askerGrant(ns string, role Role, accesses ...api.Access) Grant {
	g := Grant{Role: role, User: string(role), Inbox: InboxRoot + "_" + string(role)}
	for _, access := range accesses {
		for _, o := range api.Operations {
			if o.Granted && natsAccess(o) == access {
				g.Requests = append(g.Requests, QuerySubject(ns, o.Name))
			}
		}
	}
	return g
}

// natsAccess returns the access of an operation over NATS. A NATS user who may register workers may operate too.
func natsAccess(o *api.Operation) api.Access {
	for _, access := range []api.Access{api.AccessRead, api.AccessRoute} {
		if o.Access&access != 0 {
			return access
		}
	}
	return api.AccessOperate
}

// ShimGrant is for the shim of one worker, with any ranks; partitions is the namespace's. The shim may publish this
// worker's events, its lease and how full it is, answer for it, and read the last event and lease. It may register the
// models alone, or any model if there are none.
func ShimGrant(ns string, partitions uint32, instance events.WorkerID, models ...string) (Grant, error) {
	token, err := EscapeToken(string(instance))
	if err != nil {
		return Grant{}, err
	}
	return shimGrant(ns, RoleShim, "shim-"+token, token, []events.Partition{partitionOfToken(token, partitions)}, models)
}

// PoolGrant is for shims of any worker that trust each other, where workers come and go too often for a key each. An
// empty pool is the default one, of the user "shim", which may stand for shared stores too.
func PoolGrant(ns string, partitions uint32, pool string, models ...string) (Grant, error) {
	all := make([]events.Partition, partitions)
	for i := range all {
		all[i] = events.Partition(i)
	}
	user := "shim"
	if pool != "" {
		token, err := EscapeToken(pool)
		if err != nil {
			return Grant{}, err
		}
		user = "pool-" + token
	}
	g, err := shimGrant(ns, RolePool, user, "*", all, models)
	if pool == "" {
		g.Requests = append(g.Requests, subjectRoot+ns+".store.*", StoreSourceSubjects(ns))
	}
	return g, err
}

// directGet begins the subjects of direct gets; the stream's name and the subject whose last message is wanted follow.
const directGet = "$JS.API.DIRECT.GET."

// shimGrant is for shims of the worker with this token, or of all if it is "*".
func shimGrant(
	ns string, role Role, user, token string, partitions []events.Partition, models []string,
) (Grant, error) {
	g := Grant{Role: role, User: user, Inbox: "_INBOX_" + user}
	ranks := "*." + token + ".*"
	if len(partitions) == 1 {
		ranks = decimal(uint64(partitions[0])) + "." + token + ".*"
	}
	g.Requests = []string{"$JS.API.INFO", "$JS.API.STREAM.MSG.GET." + bucketStream(metaBucket(ns)),
		subjectRoot + ns + ".ev." + ranks, RecallPrefix(ns) + ranks, answerPrefix(ns) + ranks + ".*",
		subjectRoot + ns + ".engine." + token}
	models = slices.Clone(models)
	for i, model := range models {
		m, err := EscapeToken(model)
		if err != nil {
			return Grant{}, err
		}
		models[i] = m
	}
	if len(models) == 0 {
		models = []string{"*"}
	}
	for _, m := range models {
		g.Requests = append(g.Requests, keySubject(metaBucket(ns), "model."+m),
			keySubject(workersBucket(ns), claimPrefix+token+"."+m))
	}
	for _, p := range partitions {
		place := decimal(uint64(p)) + "." + token + ".*"
		lease := keySubject(workersBucket(ns), place) // one for each partition: not all keys of the bucket are leases
		g.Requests = append(g.Requests, lease, directGet+bucketStream(workersBucket(ns))+"."+lease,
			"$JS.API.STREAM.INFO."+StreamName(ns, p), directGet+StreamName(ns, p)+"."+subjectRoot+ns+".ev."+place)
		g.Hears = append(g.Hears, ControlSubject(ns, p))
	}
	control := subjectRoot + ns + ".ctl." + ranks
	g.Hears = append(g.Hears, control)
	// A shim looks for another shim of its rank, and is looked for, within its account.
	g.Publish = []string{control, g.Inbox + ".>"}
	g.Subscribe = []string{answerPrefix(ns) + ranks + ".*", discovery}
	return g, nil
}

// StoreGrant is for the shim of one shared store, whose master has this HTTP address. The shim may pass on what the
// master publishes, may report that it does not hear the master, and reads nothing.
func StoreGrant(ns, store string) (Grant, error) {
	subject, err := StoreSubject(ns, store)
	if err != nil {
		return Grant{}, err
	}
	token, _ := EscapeToken(store) // StoreSubject has checked it
	user := "store-" + token
	return Grant{Role: RoleStore, User: user, Inbox: "_INBOX_" + user, Requests: []string{subject,
		subject + storeSource}}, nil
}
