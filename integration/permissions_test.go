package integration

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/internal/fleet/peerapi"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// The users of the matrix. Shims and the pool may serve the model m1. The pool is the last in allUsers: it may publish
// on a subject that is a target of all users, and traces of its messages arrive late on a busy machine.
const (
	nodeUser     = "node"
	readerUser   = "reader"
	routerUser   = "router"
	operatorUser = "operator"
	shimUser     = "shim-w1"
	poolUser     = "pool-gpu"
	storeUser    = "store-master=3A9003"
	analystUser  = "analyst-a1"
)

var (
	allUsers = []string{nodeUser, readerUser, routerUser, operatorUser, shimUser, storeUser, analystUser, poolUser}
	analysts = []string{nodeUser, analystUser}
	infos    = []string{nodeUser, shimUser, poolUser, analystUser}
	nodeOnly = []string{nodeUser}
	askers   = []string{nodeUser, readerUser, routerUser, operatorUser}
	routers  = []string{nodeUser, routerUser}
	managers = []string{nodeUser, operatorUser}
	handlers = []string{nodeUser, routerUser, operatorUser}
	shims    = []string{nodeUser, shimUser, poolUser}
	pools    = []string{nodeUser, poolUser}
	stores   = []string{nodeUser, storeUser}
)

// matrixRow lists the users with access to a subject. of is the subject's function, or method of Names, in
// pkg/jetstream/subjects.go, or its constant of pkg/api.
type matrixRow struct {
	of        string
	subject   string
	publish   []string
	subscribe []string
}

// matrix is every kind of subject of namespace "a", with 4 partitions. p and q are the partitions of w1 and w2.
func matrix(p, q events.Partition) []matrixRow {
	own := fmt.Sprintf("%d.w1.0", p)
	other := fmt.Sprintf("%d.w2.0", q)
	wrong := fmt.Sprintf("%d.w1.0", (p+1)%4)
	ownLog, otherLog := fmt.Sprintf("KV_EVENTS_a_%d", p), fmt.Sprintf("KV_EVENTS_a_%d", (p+1)%4)
	control := []string{nodeUser, shimUser, poolUser}
	rows := []matrixRow{
		{"Event", "kv.v1.a.ev." + own, shims, nodeOnly},
		{"Event", "kv.v1.a.ev." + other, pools, nodeOnly},
		{"Event", "kv.v1.a.ev." + wrong, pools, nodeOnly},
		{"streamSubjects", "kv.v1.a.ev.0.>", nil, nodeOnly},
		{"nobodysSubject", "kv.v1.a.ev.0.=.nobody", pools, nodeOnly},
		{"Dynamo", "kv.v1.a.dynamo.m1.generate", routers, nodeOnly},
		{"Dynamo", "kv.v1.a.dynamo.m1.select", routers, nodeOnly},
		{"Dynamo", "kv.v1.a.dynamo.m1.other", nodeOnly, nodeOnly},
		{"Node", "kv.v1.a.node.n1.find", nodeOnly, nodeOnly},
		{"Node", "kv.v1.a.node.n1.forward", nodeOnly, nodeOnly},
		{"Nodes", "kv.v1.a.nodes", nodeOnly, nodeOnly},
		{"RegionDigest", "kv.v1.a.regions.eu.n1", nodeOnly, nodeOnly},
		{"RegionDigests", "kv.v1.a.regions.us.n=2E2", nodeOnly, nodeOnly},
		{"OwnRegion", "kv.v1.a.region", nodeOnly, nodeOnly},
		{"Shared", "kv.v1.a.shared.loads", nodeOnly, nodeOnly},
		{"Shared", "kv.v1.a.shared.sessions.1f", nodeOnly, nodeOnly},
		{"Engine", "kv.v1.a.engine.w1", shims, nodeOnly},
		{"Engines", "kv.v1.a.engine.w2", pools, nodeOnly},
		{"Control", fmt.Sprintf("kv.v1.a.ctl.%d", p), nodeOnly, control},
		{"ControlRank", "kv.v1.a.ctl." + own, shims, control},
		{"ControlRank", "kv.v1.a.ctl." + other, pools, pools},
		{"Answer", "kv.v1.a.answer." + own + ".id", shims, control},
		{"Answer", "kv.v1.a.answer." + other + ".id", pools, pools},
		{"Recall", "kv.v1.a.recall." + own, shims, nodeOnly},
		{"RecallPrefix", "kv.v1.a.recall." + other, pools, nodeOnly},
		{"Store", "kv.v1.a.store.master=3A9003", stores, nodeOnly},
		{"Store", "kv.v1.a.store.other=3A9003", nodeOnly, nodeOnly},
		{"StoreSource", "kv.v1.a.store.master=3A9003.source", stores, nodeOnly},
		{"StoreSources", "kv.v1.a.store.other=3A9003.source", nodeOnly, nodeOnly},
		{"recordPrefix", "kv.v1.a.record.n1", nodeOnly, nodeOnly},
		{"SecretBucket", "$KV.kvatlas_a_secret.recording", nodeOnly, nil},
		{"MetaBucket", "$KV.kvatlas_a.namespace", nodeOnly, nil},
		{"modelKey", "$KV.kvatlas_a.model.m1", shims, nil},
		{"modelKey", "$KV.kvatlas_a.model.m2", nodeOnly, nil},
		{"forgottenKey", "$KV.kvatlas_a.forgotten.m1", nodeOnly, nil},
		{"SnapshotBucket", "$KV.kvatlas_a_snap.p0.manifest", nodeOnly, nil},
		{"NodesBucket", "$KV.kvatlas_a_nodes.n1", nodeOnly, nil},
		{"WorkerKey", "$KV.kvatlas_a_workers." + own, shims, nil},
		{"WorkersBucket", "$KV.kvatlas_a_workers." + other, pools, nil},
		{"ClaimKey", "$KV.kvatlas_a_workers.serves.w1.m1", shims, nil},
		{"ClaimPrefix", "$KV.kvatlas_a_workers.serves.w1.m2", nodeOnly, nil},
		{"ClaimKey", "$KV.kvatlas_a_workers.serves.w2.m1", pools, nil},
		{"ClaimKey", "$KV.kvatlas_a_workers.serves.w2.m2", nodeOnly, nil},
		{"ClaimsRequired", "kv.v1.a.claims.required", nodeOnly, nodeOnly},
		{"OperatorKey", "$KV.kvatlas_a_workers.operator.w1", nodeOnly, nil},
		{"ProbeKey", "$KV.kvatlas_a_workers.probe", nodeOnly, nil},
		{"another namespace", "kv.v1.b.ev." + own, nil, nil},
		{"another namespace", "kv.v1.b.q.find", nil, nil},
		{"another namespace", "$KV.kvatlas_b.namespace", nil, nil},
		{"another namespace", "$KV.kvatlas_b_workers." + own, nil, nil},
		{"JetStream", "$JS.API.INFO", infos, nil},
		{"JetStream", "$JS.API.STREAM.INFO.KV_RECORD_a", analysts, nil},
		{"JetStream", "$JS.API.STREAM.MSG.GET.KV_RECORD_a", analysts, nil},
		{"JetStream", "$JS.API.STREAM.MSG.GET.KV_kvatlas_a_secret", nodeOnly, nil},
		{"JetStream", "$JS.API.STREAM.INFO.KV_kvatlas_a_secret", nodeOnly, nil},
		{"JetStream", "$JS.API.DIRECT.GET.KV_RECORD_a", nodeOnly, nil},
		{"JetStream", "$JS.API.DIRECT.GET.KV_kvatlas_a_secret.$KV.kvatlas_a_secret.recording", nodeOnly, nil},
		{"JetStream", "$JS.API.CONSUMER.CREATE.KV_RECORD_a.x", nodeOnly, nil},
		{"JetStream", "$JS.API.STREAM.PURGE.KV_RECORD_a", nodeOnly, nil},
		{"JetStream", "$JS.API.STREAM.DELETE.KV_RECORD_a", nodeOnly, nil},
		{"JetStream", "$JS.API.STREAM.INFO." + ownLog, shims, nil},
		{"JetStream", "$JS.API.STREAM.INFO." + otherLog, pools, nil},
		{"JetStream", "$JS.API.STREAM.MSG.GET.KV_kvatlas_a", shims, nil},
		{"JetStream", "$JS.API.DIRECT.GET." + ownLog + ".kv.v1.a.ev." + own, shims, nil},
		{"JetStream", "$JS.API.DIRECT.GET.KV_EVENTS_a_" + strings.Split(other, ".")[0] + ".kv.v1.a.ev." + other, pools, nil},
		{"JetStream", "$JS.API.DIRECT.GET.KV_kvatlas_a_workers.$KV.kvatlas_a_workers." + own, shims, nil},
		{"JetStream", "$JS.API.DIRECT.GET.KV_kvatlas_a_workers.$KV.kvatlas_a_workers." + other, pools, nil},
		{"JetStream", "$JS.API.DIRECT.GET." + ownLog, nodeOnly, nil},
		{"JetStream", "$JS.API.DIRECT.GET.KV_kvatlas_a_snap.$KV.kvatlas_a_snap.p0.manifest", nodeOnly, nil},
		{"JetStream", "$JS.API.STREAM.INFO.KV_kvatlas_a_snap", nodeOnly, nil},
		{"JetStream", "$JS.API.STREAM.INFO.KV_kvatlas_a_workers", nodeOnly, nil},
		{"JetStream", "$JS.API.STREAM.NAMES", nodeOnly, nil},
		{"JetStream", "$JS.API.STREAM.LIST", nodeOnly, nil},
		{"another account", "$SYS.REQ.SERVER.PING", nil, nil},
		{"another account", "$SYS.REQ.CLAIMS.UPDATE", nil, nil},
		{"another account", "$SYS.REQ.USER.INFO", nodeOnly, nil},
		{"discovery", "$SRV.PING", []string{operatorUser}, shims},
		{"discovery", "$SRV.INFO.kvatlas-indexer", []string{operatorUser}, shims},
	}
	for _, stream := range []string{ownLog, "KV_kvatlas_a", "KV_kvatlas_a_workers", "KV_kvatlas_a_snap",
		"KV_kvatlas_a_nodes"} {
		for _, verb := range []string{"PURGE", "DELETE", "CREATE", "UPDATE", "MSG.DELETE", "SNAPSHOT", "RESTORE",
			"LEADER.STEPDOWN", "PEER.REMOVE"} {
			rows = append(rows, matrixRow{"JetStream", "$JS.API.STREAM." + verb + "." + stream, nodeOnly, nil})
		}
		rows = append(rows, matrixRow{"JetStream", "$JS.API.CONSUMER.CREATE." + stream + ".x", nodeOnly, nil})
		if stream != "KV_kvatlas_a" {
			rows = append(rows, matrixRow{"JetStream", "$JS.API.STREAM.MSG.GET." + stream, nodeOnly, nil})
		}
	}
	for op, users := range map[string][]string{
		ops.Find: askers, ops.Workers: askers, ops.Status: askers, ops.Loads: askers, ops.PotentialLoads: askers,
		ops.EngineLoads: askers, ops.Funnel: askers, ops.Capacity: askers,
		ops.Select: routers, ops.Book: routers, ops.PrefillComplete: routers, ops.Progress: routers,
		ops.OutputBlock: routers, ops.Free: routers, ops.EngineLoad: routers, ops.Report: routers,
		ops.RemovalOrder: askers, ops.Scaling: askers, ops.RemovalPart: nodeOnly,
		ops.HotPrefixes: askers, ops.HotPart: nodeOnly, ops.Warm: managers, ops.Copied: nodeOnly,
		ops.SessionBlocks: nodeOnly,
		ops.Sessions:      handlers, ops.EndSession: handlers,
		ops.Tenants: managers, ops.TenantsPart: nodeOnly, ops.TenantCharges: nodeOnly,
		ops.RegisterWorker: managers, ops.ChangeWorker: managers, ops.RemoveWorker: managers,
		ops.Verify: nodeOnly, ops.Snapshot: nodeOnly, ops.BlockHistory: nodeOnly, ops.Recorded: nodeOnly,
		ops.Prefixes: nodeOnly, ops.CapacitySamples: nodeOnly,
	} {
		rows = append(rows, matrixRow{op, jetstream.Names("a").Query(op), users, nodeOnly})
	}
	for _, user := range allUsers {
		rows = append(rows, matrixRow{"inbox", "_INBOX_" + user + ".x", onlyShims(user), []string{user}})
	}
	return append(rows, matrixRow{"inbox", "_INBOX.x", nil, nil}, matrixRow{"all", ">", nil, nil},
		matrixRow{"all", "kv.v1.a.>", nodeOnly, nodeOnly}, matrixRow{"all", "$KV.>", nil, nil},
		matrixRow{"all", "$JS.API.>", nodeOnly, nil}, matrixRow{"all", "_INBOX.>", nil, nil})
}

// onlyShims returns the users that may reply within their own account.
func onlyShims(user string) []string {
	if slices.Contains(shims, user) {
		return []string{user}
	}
	return nil
}

func parseDir(t *testing.T, dir string) (files []*ast.File) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	return files
}

// subjectFunctions returns the functions of pkg/jetstream, and the methods of Names, that name a subject, a bucket or a
// key.
func subjectFunctions(t *testing.T) (names []string) {
	t.Helper()
	for _, f := range parseDir(t, "../pkg/jetstream") {
		for _, d := range f.Decls {
			fn, is := d.(*ast.FuncDecl)
			if !is || fn.Recv != nil && fmt.Sprint(fn.Recv.List[0].Type) != "Names" ||
				strings.HasPrefix(strings.ToLower(fn.Name.Name), "parse") {
				continue
			}
			uses := strings.HasSuffix(fn.Name.Name, "Key") || strings.HasSuffix(fn.Name.Name, "Bucket")
			ast.Inspect(fn, func(n ast.Node) bool {
				id, is := n.(*ast.Ident)
				uses = uses || is && id.Name == "subjectRoot"
				return true
			})
			returnsText := fn.Type.Results != nil && len(fn.Type.Results.List) > 0
			if returnsText {
				id, is := fn.Type.Results.List[0].Type.(*ast.Ident)
				list, isList := fn.Type.Results.List[0].Type.(*ast.ArrayType)
				returnsText = is && id.Name == "string" || isList && fmt.Sprint(list.Elt) == "string"
			}
			if uses && returnsText {
				names = append(names, fn.Name.Name)
			}
		}
	}
	return names
}

// Functions without a separate subject.
var noRowOf = []string{"Root", "AnswerPrefix", "validKey", "oddBucket"}

// TestEverySubjectHasARow: a new subject, bucket, key or operation needs a row in the matrix.
func TestEverySubjectHasARow(t *testing.T) {
	t.Parallel()
	rows := map[string]bool{"Query": true}
	for _, r := range matrix(0, 1) {
		rows[r.of] = true
	}
	functions := subjectFunctions(t)
	for _, name := range functions {
		if !rows[name] && !slices.Contains(noRowOf, name) {
			t.Errorf("%s of pkg/jetstream has no row in the matrix of permissions: add the users of the subject", name)
		}
	}
	operations := peerapi.Names()
	for _, o := range api.Operations {
		operations = append(operations, o.Name)
	}
	for _, name := range operations {
		if !rows[name] {
			t.Errorf("the operation %s has no row in the matrix of permissions: add the permitted users", name)
		}
	}
	if len(functions) < 20 {
		t.Errorf("the test finds too little: %v", functions)
	}
}

// matrixServer is a NATS server with the accounts of a ring, and another user in the nodes' account with access to all
// subjects.
type matrixServer struct {
	addr string
	ring *natsauth.Ring
	dir  string
	kind string
}

// startMatrix runs an indexer of namespace "a" with a NATS server: embedded, separate, or separate with signed
// accounts.
func startMatrix(t *testing.T, kind string, amend func(config string) string) *matrixServer {
	t.Helper()
	s := &matrixServer{addr: loopback.Reserve(t), dir: t.TempDir(), kind: kind}
	mode := natsauth.Static
	if kind == "jwt" {
		mode = natsauth.JWT
	}
	var err error
	if s.ring, err = natsauth.Create(s.dir, mode); err != nil {
		t.Fatal(err)
	}
	if err := s.ring.AddNamespace("a", 4); err != nil {
		t.Fatal(err)
	}
	for _, m := range []natsauth.Member{{Role: natsauth.RoleShim, Worker: "w1", Models: []string{"m1"}},
		{Role: natsauth.RolePool, Pool: "gpu", Models: []string{"m1"}}, {Role: natsauth.RoleStore, Store: "master:9003"},
		{Role: natsauth.RoleAnalyst, Name: "a1"}} {
		m.Namespace = "a"
		if _, err := s.ring.Add(m); err != nil {
			t.Fatal(err)
		}
	}
	config, err := s.ring.ServerConfig(filepath.Join(s.dir, "jwt"))
	if err != nil {
		t.Fatal(err)
	}
	if mode == natsauth.Static {
		config = strings.Replace(config, "    users: [\n", "    users: [\n      { user: watcher, password: x }\n", 1)
	}
	if amend != nil {
		config = amend(config)
	}
	path := filepath.Join(s.dir, "nats.conf")
	if kind != "embedded" {
		config = fmt.Sprintf("listen: %q\njetstream { store_dir: %q, max_file_store: 1TB }\n%s", s.addr,
			filepath.Join(s.dir, "js"), config)
	}
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"serve", "--namespace", "a", "--partitions", "4", "--http-listen", "", "--nats-inbox-prefix",
		"_INBOX_node"}
	if kind == "embedded" {
		args = append(args, "--data", filepath.Join(s.dir, "data"), "--nats-listen", s.addr, "--nats-config", path)
	} else {
		harness.Start(t, "nats-server", "-c", path).WaitFor(`Server is ready`)
		args = append(args, "--nats", s.addr)
	}
	flag, file := s.login(nodeUser)
	harness.Start(t, "indexer", append(args, flag, file)...).WaitFor(`msg=ready`)
	if mode == natsauth.JWT {
		conn, err := jetstream.Connect(t.Context(), jetstream.ConnOptions{URLs: []string{"nats://" + s.addr}, Core: true,
			CredsFile: s.ring.SystemCreds()})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if n, err := s.ring.Push(t.Context(), conn); err != nil || n != 8 {
			t.Fatal(n, err)
		}
	}
	return s
}

func (s *matrixServer) login(user string) (flag, file string) {
	if s.kind == "jwt" {
		return "--nats-creds", filepath.Join(s.dir, "a-"+user+".creds")
	}
	return "--nats-nkey", filepath.Join(s.dir, "a-"+user+".nk")
}

// connect connects as a user of the matrix.
func (s *matrixServer) connect(t *testing.T, user string) *nats.Conn {
	t.Helper()
	_, file := s.login(user)
	as := nats.UserCredentials(file)
	if s.kind != "jwt" {
		var err error
		if as, err = nats.NkeyOptionFromSeed(file); err != nil {
			t.Fatal(err)
		}
	}
	return s.dial(t, as, nats.CustomInboxPrefix("_INBOX_"+user))
}

func (s *matrixServer) dial(t *testing.T, o ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect("nats://"+s.addr, append(o, nats.Timeout(harness.Patience),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// watcher connects as a user of the nodes' account without any limits.
func (s *matrixServer) watcher(t *testing.T) *nats.Conn {
	t.Helper()
	if s.kind != "jwt" {
		return s.dial(t, nats.UserInfo("watcher", "x"))
	}
	seed, err := os.ReadFile(filepath.Join(s.dir, "a-node.account.nk"))
	if err != nil {
		t.Fatal(err)
	}
	account, err := nkeys.ParseDecoratedNKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	user, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	public, err := user.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	text, err := jwt.NewUserClaims(public).Encode(account)
	if err != nil {
		t.Fatal(err)
	}
	return s.dial(t, nats.UserJWT(func() (string, error) { return text, nil }, user.Sign))
}

// refused reports whether the server refused the last message.
func refused(t *testing.T, nc *nats.Conn, before error, kind, subject string) bool {
	t.Helper()
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	last := nc.LastError()
	return last != nil && last != before &&
		strings.Contains(last.Error(), "ermissions Violation for "+kind+` to "`+subject+`"`)
}

var serverKinds = []string{"embedded", "standalone", "jwt"}

// TestPermissionMatrix tests every subject with every user, on every kind of server.
func TestPermissionMatrix(t *testing.T) {
	t.Parallel()
	var subtests testkit.Group
	defer subtests.Wait()
	for _, kind := range serverKinds {
		subtests.Run(t, kind, func(t *testing.T) {
			s := startMatrix(t, kind, nil)
			p, q := partitionIn4(t, "w1"), partitionIn4(t, "w2")
			for _, user := range allUsers {
				nc := s.connect(t, user)
				for _, row := range matrix(p, q) {
					subject := row.subject
					if may := slices.Contains(row.subscribe, user); !strings.HasPrefix(subject, "$JS.") || may {
						before := nc.LastError()
						sub, err := nc.SubscribeSync(subject)
						if err != nil {
							t.Fatal(err)
						}
						if refused(t, nc, before, "Subscription", subject) == may {
							t.Errorf("%s may subscribe to %s: %v; want %v", user, subject, !may, may)
						}
						_ = sub.Unsubscribe() // fails after a refusal
					}
					if strings.ContainsAny(subject, "*>") || user == nodeUser && strings.HasPrefix(subject, "$JS.API.STREAM.") {
						continue // nodes have permissions that would end this test
					}
					before := nc.LastError()
					if err := nc.Publish(subject, []byte("{")); err != nil {
						t.Fatal(err)
					}
					if may := slices.Contains(row.publish, user); refused(t, nc, before, "Publish", subject) == may {
						t.Errorf("%s may publish to %s: %v; want %v", user, subject, !may, may)
					}
				}
			}
		})
	}
}

func partitionIn4(t *testing.T, worker events.WorkerID) events.Partition {
	t.Helper()
	p, err := jetstream.PartitionOf(worker, 4)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// targets returns the subjects of the nodes' account that must never be a reply subject. No program uses the subjects
// here. Most contain the user's name, because the effects of a user's requests may arrive during the test of the next
// user.
func targets(p events.Partition, user string) []string {
	subjects := []string{
		fmt.Sprintf("kv.v1.a.ev.%d.VICTIM.0", p), "kv.v1.a.ev.0.=.nobody", "kv.v1.a.nodes.VICTIM", "kv.v1.a.shared.VICTIM",
		"kv.v1.a.node.VICTIM.forward", "kv.v1.a.ctl.0.VICTIM.0", "kv.v1.a.engine.VICTIM", "kv.v1.a.store.VICTIM",
		"kv.v1.a.answer.0.VICTIM.0.abcdefgh", "kv.v1.a.q.VICTIM", "kv.v1.a.recall.0.VICTIM.0",
		"$KV.kvatlas_a_workers.0.VICTIM.0", "$KV.kvatlas_a_workers.operator.VICTIM", "$KV.kvatlas_a.namespace",
		"$KV.kvatlas_a.model.VICTIM", "$KV.kvatlas_a_snap.p0.VICTIM", "$KV.kvatlas_a_nodes.VICTIM",
		"kv.v1.a.record.VICTIM", "$KV.kvatlas_a_secret.VICTIM",
		"$JS.API.STREAM.PURGE.VICTIM", "$JS.API.STREAM.DELETE.KV_kvatlas_a_snap",
		"$JS.API.CONSUMER.DELETE.KV_EVENTS_a_0.VICTIM", "_INBOX_node.VICTIM", "_INBOX_reader.VICTIM", "$SRV.PING.VICTIM",
	}
	victim := fmt.Sprintf("victim%d", slices.Index(allUsers, user))
	for i := range subjects {
		subjects[i] = strings.Replace(subjects[i], "VICTIM", victim, 1)
	}
	return subjects
}

// settle returns after every stream has processed all earlier messages. A stream processes messages in order, and it
// refuses the messages of settle, which expect an unreachable sequence.
func (s *matrixServer) settle(t *testing.T, node *nats.Conn) {
	t.Helper()
	subjects := []string{"$KV.kvatlas_a.model.none", "$KV.kvatlas_a_workers.probe", "$KV.kvatlas_a_snap.p0.none",
		"$KV.kvatlas_a_nodes.none"}
	for p := range 4 {
		subjects = append(subjects, fmt.Sprintf("kv.v1.a.ev.%d.settled.0", p))
	}
	for _, subject := range subjects {
		m := &nats.Msg{Subject: subject, Header: nats.Header{"Nats-Expected-Last-Sequence": {"4000000000"}}}
		reply, err := node.RequestMsg(m, harness.Patience)
		if err != nil || !strings.Contains(string(reply.Data), "wrong last sequence") {
			t.Fatalf("the stream of %s does not refuse a message: %v, %v", subject, reply, err)
		}
	}
}

// aim sends all permitted requests of a user with every target as the reply subject, as the destination of a trace, and
// in the reply headers. It returns the targets with a received message in the nodes' account.
func (s *matrixServer) aim(t *testing.T, user string) (hit []string) {
	t.Helper()
	p, q := partitionIn4(t, "w1"), partitionIn4(t, "w2")
	watcher := s.watcher(t)
	seen := map[string]bool{}
	all, err := watcher.SubscribeSync(">")
	if err != nil {
		t.Fatal(err)
	}
	if err := all.SetPendingLimits(-1, -1); err != nil {
		t.Fatal(err)
	}
	if err := watcher.Flush(); err != nil {
		t.Fatal(err)
	}
	nc := s.connect(t, user)
	aims := targets(p, user)
	own := map[string]bool{} // targets with a publish permission of the user
	for _, target := range aims {
		before := nc.LastError()
		if err := nc.Publish(target, nil); err != nil {
			t.Fatal(err)
		}
		own[target] = !refused(t, nc, before, "Publish", target)
	}
	for _, row := range matrix(p, q) {
		subject := row.subject
		if !slices.Contains(row.publish, user) || strings.ContainsAny(subject, "*>") {
			continue
		}
		for _, target := range aims {
			for _, m := range []*nats.Msg{
				{Subject: subject, Reply: target, Data: []byte(`{"model":"none","tokens":[1]}`)},
				{Subject: subject, Reply: target, Data: []byte("\x81\xa5model\xa4none"),
					Header: nats.Header{"Content-Type": {"application/msgpack"}}},
				{Subject: subject, Reply: "_INBOX_" + user + ".x", Header: nats.Header{"Nats-Trace-Dest": {target}}},
				{Subject: subject, Reply: "_INBOX_" + user + ".x", Header: nats.Header{"Kv-Reply-To": {target}}},
				{Subject: subject, Reply: target, Header: nats.Header{"Kv-Answer-Id": {"x." + target}}},
			} {
				if err := nc.PublishMsg(m); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	node := s.connect(t, nodeUser)
	s.settle(t, node)
	// The indexer answers these requests after all requests in progress.
	for range 20 {
		if _, err := node.Request("kv.v1.a.q.status", nil, harness.Patience); err != nil {
			t.Fatal(err)
		}
	}
	if err := watcher.Flush(); err != nil {
		t.Fatal(err)
	}
	for {
		m, err := all.NextMsg(200 * time.Millisecond)
		if err != nil {
			break
		}
		// An empty message is the user's own, from the test of permissions.
		if slices.Contains(aims, m.Subject) && !own[m.Subject] && !seen[m.Subject] && len(m.Data)+len(m.Header) > 0 {
			seen[m.Subject] = true
			hit = append(hit, fmt.Sprintf("%s: %.200q %v", m.Subject, m.Data, m.Header))
		}
	}
	return hit
}

// TestNoReplyLeavesItsAccount: no request makes a node or JetStream publish where the requester may not.
func TestNoReplyLeavesItsAccount(t *testing.T) {
	t.Parallel()
	var subtests testkit.Group
	defer subtests.Wait()
	for _, kind := range serverKinds {
		subtests.Run(t, kind, func(t *testing.T) {
			s := startMatrix(t, kind, nil)
			for _, user := range allUsers[1:] {
				if hit := s.aim(t, user); len(hit) > 0 {
					t.Errorf("%s had messages published on %q", user, hit)
				}
			}
		})
	}
}

// TestOneAccountIsNotEnough checks that, with the same permissions in a single account, JetStream replies to a shim's
// reply subject. The test above would detect this.
func TestOneAccountIsNotEnough(t *testing.T) {
	t.Parallel()
	s := startMatrix(t, "standalone", func(config string) string {
		i := strings.Index(config, "\n  }\n  \"KVATLAS_a/reader\"")
		if i < 0 {
			t.Fatal(config)
		}
		// The users of the other accounts move to the first account.
		nodes, users := config[:i], ""
		for _, block := range strings.Split(config[i:], "    users: [\n")[1:] {
			users += block[:strings.Index(block, "\n    ]")] + "\n"
		}
		return strings.TrimSuffix(nodes, "    ]") + users + "    ]\n  }\n}\n"
	})
	if hit := s.aim(t, shimUser); len(hit) < 5 {
		t.Errorf("a shim in the nodes' account reached only %q", hit)
	}
	// Nodes reply only to inboxes, in all accounts; a node cannot identify the owner of an inbox.
	hit := s.aim(t, readerUser)
	if hit = slices.DeleteFunc(hit, func(s string) bool { return strings.HasPrefix(s, "_INBOX_") }); len(hit) > 0 {
		t.Errorf("a reader in the nodes' account had a node publish on %q", hit)
	}
}
