package natsauth

import (
	"slices"
	"strconv"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Role is a kind of NATS user.
type Role string

// The roles. Each has a separate NATS account, and so has each shim, pool and store. See [Account].
const (
	RoleNode     Role = "node"     // an indexer node
	RoleReader   Role = "reader"   // queries
	RoleRouter   Role = "router"   // queries, choices, bookings
	RoleOperator Role = "operator" // queries, changes of workers
	RoleShim     Role = "shim"     // the shim of one worker
	RolePool     Role = "pool"     // shims of any workers that trust each other
	RoleStore    Role = "store"    // the shim of a shared store
	RoleAnalyst  Role = "analyst"  // reads recorded requests
)

// Grant lists the subjects of one NATS user. The server refuses all other subjects.
type Grant struct {
	Role Role
	User string // a name for people, unique in the namespace

	// Inbox is the first token of the user's reply subjects. Its connections must use it
	// ([jetstream.ConnOptions.InboxPrefix]).
	Inbox string

	// Requests are subjects on which the user publishes requests to nodes or JetStream. A user outside the nodes'
	// account imports the subjects as services: the server then replaces the reply subject of a request by a subject of
	// the server. A subject that no pattern in the function exports of accounts.go includes needs an entry
	// there. One pattern includes all operations.
	Requests []string

	// Imports are subjects of the nodes' account to which the user subscribes. The user's account imports them as
	// streams.
	Imports []string

	// Publish and Subscribe are further subjects, within the user's own account.
	Publish   []string
	Subscribe []string

	// Respond lets the user publish one reply on the reply subject of a received request.
	Respond bool
}

// ReplyWithin is the longest time for a reply of a user with [Grant.Respond].
const ReplyWithin = 5 * time.Minute

// AllowPublish returns the complete publish allow list.
func (g *Grant) AllowPublish() []string {
	return slices.Concat(g.Requests, g.Publish)
}

// AllowSubscribe returns the complete subscribe allow list.
func (g *Grant) AllowSubscribe() []string {
	return slices.Concat([]string{g.Inbox + ".>"}, g.Imports, g.Subscribe)
}

// NodeGrant is for indexer nodes: the whole namespace, and JetStream in their account. Only nodes are in that account,
// so requests from other accounts have reply subjects of the server.
func NodeGrant(ns string) Grant {
	names := jetstream.Names(ns)
	g := Grant{Role: RoleNode, User: string(RoleNode), Inbox: "_INBOX_node", Respond: true}
	g.Publish = []string{"$JS.API.>", names.Root() + ">", userInfo, crossReplies, g.Inbox + ".>", names.ClaimsRequired()}
	for _, bucket := range []string{names.MetaBucket(), names.SnapshotBucket(), names.NodesBucket(),
		names.WorkersBucket(), names.SecretBucket()} {
		g.Publish = append(g.Publish, jetstream.KeySubject(bucket, ">"))
	}
	g.Subscribe = []string{names.Root() + ">", discovery}
	return g
}

// Subjects of nats-server.
const (
	userInfo     = "$SYS.REQ.USER.INFO" // a request for a user's account and permissions
	crossReplies = "_R_.>"              // covers the reply subjects of requests from another account
	discovery    = "$SRV.>"             // covers the subjects of service discovery (ADR-32)
)

// ReaderGrant is for queries.
func ReaderGrant(ns string) Grant {
	return askerGrant(ns, RoleReader, api.AccessRead)
}

// RouterGrant is for programs that choose workers, book and end requests, and report the used memory of engines. It
// includes a reader's rights.
func RouterGrant(ns string) Grant {
	g := askerGrant(ns, RoleRouter, api.AccessRead, api.AccessRoute)
	root := jetstream.Names(ns).Root()
	g.Requests = append(g.Requests, root+"dynamo.*.generate", root+"dynamo.*.select")
	return g
}

// OperatorGrant is for programs that change, drain, register and remove workers, and list services. It includes a
// reader's rights.
func OperatorGrant(ns string) Grant {
	g := askerGrant(ns, RoleOperator, api.AccessRead, api.AccessOperate)
	for _, verb := range []string{"PING", "INFO", "STATS"} {
		g.Requests = append(g.Requests, "$SRV."+verb, "$SRV."+verb+".>")
	}
	return g
}

// AnalystGrant is for programs that read recorded requests. It excludes the secret of the names, and queries.
func AnalystGrant(ns string) Grant {
	stream := jetstream.Names(ns).RecordingStream()
	return Grant{Role: RoleAnalyst, User: string(RoleAnalyst), Inbox: jetstream.InboxRoot + "_" + string(RoleAnalyst),
		Requests: []string{"$JS.API.INFO", "$JS.API.STREAM.INFO." + stream, "$JS.API.STREAM.MSG.GET." + stream}}
}

// Named returns the grant for a further user of the same role with a separate account and inbox, since users of one
// account can read each other's replies.
func (g Grant) Named(name string) (Grant, error) {
	token, err := jetstream.EscapeToken(name)
	if err != nil {
		return g, err
	}
	g.User += "-" + token
	g.Inbox = jetstream.InboxRoot + "_" + g.User
	return g, nil
}

// askerGrant is for clients of nodes: it has the granted operations of the accesses.
func askerGrant(ns string, role Role, accesses ...api.Access) Grant {
	g := Grant{Role: role, User: string(role), Inbox: jetstream.InboxRoot + "_" + string(role)}
	for _, access := range accesses {
		for _, o := range api.Operations {
			if o.Granted && natsAccess(o)&access != 0 {
				g.Requests = append(g.Requests, jetstream.Names(ns).Query(o.Name))
			}
		}
	}
	return g
}

// natsAccess returns the accesses of an operation over NATS. A NATS user with AccessRegister has AccessOperate too, for
// the operations without AccessRead and AccessRoute.
func natsAccess(o *api.Operation) api.Access {
	if o.Access&(api.AccessRead|api.AccessRoute) == 0 {
		return api.AccessOperate
	}
	return o.Access
}

// ShimGrant is for the shim of one worker, with any ranks, in a namespace with this number of partitions. The shim may
// publish the worker's events, lease and used memory, answer requests for the worker, and read the last event and
// lease. The shim may register these models only, or any model if there are none.
func ShimGrant(ns string, partitions uint32, instance events.WorkerID, models ...string) (Grant, error) {
	token, err := jetstream.EscapeToken(string(instance))
	if err != nil {
		return Grant{}, err
	}
	p, err := jetstream.PartitionOf(instance, partitions)
	if err != nil {
		return Grant{}, err
	}
	return shimGrant(ns, RoleShim, "shim-"+token, token, []events.Partition{p}, models)
}

// PoolGrant is for shims of any workers with mutual trust, in fleets with too many changes for separate keys. An empty
// pool is the default pool of the user "shim", which may also serve shared stores.
func PoolGrant(ns string, partitions uint32, pool string, models ...string) (Grant, error) {
	all := make([]events.Partition, partitions)
	for i := range all {
		all[i] = events.Partition(i)
	}
	user := "shim"
	if pool != "" {
		token, err := jetstream.EscapeToken(pool)
		if err != nil {
			return Grant{}, err
		}
		user = "pool-" + token
	}
	g, err := shimGrant(ns, RolePool, user, "*", all, models)
	if pool == "" {
		names := jetstream.Names(ns)
		g.Requests = append(g.Requests, names.Root()+"store.*", names.StoreSources())
	}
	return g, err
}

// directGet begins the subjects of direct gets. The stream's name and the subject of the message follow.
const directGet = "$JS.API.DIRECT.GET."

// shimGrant is for shims of the worker with this token, or of all workers if the token is "*".
func shimGrant(
	ns string, role Role, user, token string, partitions []events.Partition, models []string,
) (Grant, error) {
	names := jetstream.Names(ns)
	g := Grant{Role: role, User: user, Inbox: "_INBOX_" + user}
	ranksOf := func(partition string) string { return partition + "." + token + ".*" }
	ranks := ranksOf("*")
	if len(partitions) == 1 {
		ranks = ranksOf(decimal(partitions[0]))
	}
	g.Requests = []string{"$JS.API.INFO", "$JS.API.STREAM.MSG.GET." + jetstream.BucketStream(names.MetaBucket()),
		names.Root() + "ev." + ranks, names.RecallPrefix() + ranks, names.AnswerPrefix() + ranks + ".*",
		names.Root() + "engine." + token}
	models = slices.Clone(models)
	for i, model := range models {
		m, err := jetstream.EscapeToken(model)
		if err != nil {
			return Grant{}, err
		}
		models[i] = m
	}
	if len(models) == 0 {
		models = []string{"*"}
	}
	for _, m := range models {
		g.Requests = append(g.Requests, names.ModelSubject(m), names.ClaimSubject(token, m))
	}
	for _, p := range partitions {
		place := ranksOf(decimal(p))
		// one lease for each partition: not all keys of the bucket are leases
		lease := jetstream.KeySubject(names.WorkersBucket(), place)
		g.Requests = append(g.Requests, lease, directGet+jetstream.BucketStream(names.WorkersBucket())+"."+lease,
			"$JS.API.STREAM.INFO."+names.Stream(p), directGet+names.Stream(p)+"."+names.Root()+"ev."+place)
		g.Imports = append(g.Imports, names.Control(p))
	}
	control := names.Root() + "ctl." + ranks
	g.Imports = append(g.Imports, control)
	// A shim and a second shim of the rank find each other within their account.
	g.Publish = []string{control, g.Inbox + ".>"}
	g.Subscribe = []string{names.AnswerPrefix() + ranks + ".*", discovery}
	return g, nil
}

func decimal(p events.Partition) string { return strconv.FormatUint(uint64(p), 10) }

// StoreGrant is for the shim of a shared store with a master at this HTTP address. The shim may forward the master's
// events and report missing events. Reads are not granted.
func StoreGrant(ns, store string) (Grant, error) {
	subject, err := jetstream.Names(ns).Store(store)
	if err != nil {
		return Grant{}, err
	}
	source, err := jetstream.Names(ns).StoreSource(store)
	if err != nil {
		return Grant{}, err
	}
	token, err := jetstream.EscapeToken(store)
	if err != nil {
		return Grant{}, err
	}
	user := "store-" + token
	return Grant{Role: RoleStore, User: user, Inbox: "_INBOX_" + user, Requests: []string{subject, source}}, nil
}
