package server

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/choose/affinity"
	"github.com/kvatlas/kvatlas/internal/choose/guess"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/choose/selection"
	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/edge/rights"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/edge/web"
	"github.com/kvatlas/kvatlas/internal/faces/compat"
	"github.com/kvatlas/kvatlas/internal/faces/compat/conductor"
	"github.com/kvatlas/kvatlas/internal/faces/compat/dynamoselect"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/internal/index/node"
	"github.com/kvatlas/kvatlas/internal/index/scatter"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/operate/capacity"
	"github.com/kvatlas/kvatlas/internal/operate/funnel"
	"github.com/kvatlas/kvatlas/internal/operate/metrics"
	"github.com/kvatlas/kvatlas/internal/operate/recording"
	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/internal/operate/watch"
	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/internal/text/tokenize"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Settings configures a [Server].
type Settings struct {
	ID, Version string
	Conn        *jetstream.Conn

	// Embedded is the NATS server in this process, with its data in the folder Data. The server began at Began. Nil: the
	// NATS server is another process.
	Embedded *natsserver.Server
	Data     string
	Began    time.Time

	Namespace  string
	Zone       string // see [cluster.CheckZone]; empty: a unique zone
	Partitions uint32 // 0: the namespace's number, or the default
	// RestoreNamespace writes the namespace's record again if the record is missing or unreadable; see
	// [jetstream.NamespaceConfig].
	RestoreNamespace bool
	Replicas         int           // of streams and buckets, on the NATS servers
	Replication      int           // number of nodes that keep a partition; 0: the default
	Drain            time.Duration // longest wait of a stopping node for the takeover of its partitions

	// AwayPatience (default 3 s) is how long a stopping node waits for NATS servers that do not answer. Then the node
	// hands over neither partitions nor bookings.
	AwayPatience time.Duration

	LogBytes         int64 // of a partition; 0: the default limit
	LogAge           time.Duration
	SnapshotBytes    int64
	SnapshotInterval time.Duration
	SnapshotBlocks   uint64

	Index       radix.Config
	IndexShards int // of the node: see node.Config; 0: a shard for two cores

	Screen registry.Screen // permitted addresses of clients, leases and registrations

	L3      node.L3Config
	Policy  string         // for the choice of workers; empty: selection.DefaultPolicy
	Routing routing.Config // of all policies
	Guesses guess.Settings
	Sources selection.Sources // KV sources of choices; the server sets Mark
	Engines compat.Engines    // of the shims in this process

	Recording Recording

	Attribution Attribution

	FunnelBlocks int // number of blocks kept for the funnel; 0: the default

	Hot HotPrefixes // the search for hot prefixes

	Regions Regions // the exchange of digests with other regions

	CapacityRefs int // sampled references to blocks, of each model, for capacity curves; 0 disables the curves

	Tokenizers       tokenize.Settings // tokenizers of texts, by model
	RequestTemplates bool              // chat templates of requests are run
	ForwardTokens    bool              // gateways send completions as token ids to engines

	MaxRequests   int           // running requests of a model; 0: [load.DefaultRequests]
	RequestExpiry time.Duration // the time without progress after which a running request expires; 0: [load.DefaultExpiry]

	// QueryWorkers is the number of concurrent queries over NATS; 0: 128, or the number of cores if greater. QueryQueue is
	// the number of waiting queries; 0: 512 for every core. Over HTTP, the sum limits concurrent requests.
	QueryWorkers, QueryQueue int

	NoForwarding bool // disables forwarding queries over NATS to other nodes, and accepting forwarded queries

	HTTPListen string // empty: HTTP is not served

	MetricsWorkers int // number of workers with separate series in the metrics

	// Addresses of Dynamo's selection service and slot tracker; empty disables a service.
	SelectListen, SlotTrackerListen string

	ConductorListen string // address of Mooncake's conductor; empty disables the conductor

	GRPCListen string // empty: gRPC is not served

	// GatewayPrefill is the way in which prefill workers get the requests of gateways: PrefillBySidecar, the default, or
	// PrefillByVLLM.
	GatewayPrefill        string
	GatewayPrefillTimeout time.Duration // of a request to a prefill worker; 0: 60 s

	// GRPCInsecure permits gateways to choose workers over gRPC without a token. Other methods still need a token.
	GRPCInsecure bool

	// GRPCClientCAs are the authorities of client certificates. A client with such a certificate needs no token over gRPC.
	// The field needs HTTPTLS. Nil: certificates give no rights.
	GRPCClientCAs *x509.CertPool

	ExternalMetrics ExternalMetrics

	Tracer *tracing.Tracer // traces requests; nil disables traces

	HTTPTokens *rights.Tokens // required over HTTP and gRPC; nil: no token is required
	HTTPTLS    *tls.Config
	ClearText  []string // flags and addresses where tokens cross the network without TLS

	Ready func() // called once, by Run, when the node answers; nil: nothing is
}

// Defaults of the room for queries.
const (
	// waitingQueries is the number of concurrent queries of a node with shared partitions: such queries wait for other
	// nodes most of the time.
	waitingQueries = 128

	// queuePerCore is the number of waiting queries for every core: about 50 ms of work, at 0.1 ms a query.
	queuePerCore = 512
)

func (s *Settings) setDefaults() {
	cores := runtime.GOMAXPROCS(0)
	if s.QueryWorkers == 0 {
		s.QueryWorkers = max(waitingQueries, cores)
	}
	if s.QueryQueue == 0 {
		s.QueryQueue = queuePerCore * cores
	}
}

// Server is an indexer node.
type Server struct {
	Settings
	log *slog.Logger

	ns       *jetstream.Namespace
	pool     *rpc.Pool
	views    *cluster.Views
	joining  cluster.MemberConfig
	node     *node.Node
	registry *registry.Registry
	models   *jetstream.Models
	scatter  *scatter.Scatter
	loads    *load.Service
	sessions *affinity.Service // nil: sessions are not kept together
	engines  *engines
	guesses  *guess.Service

	funnel   *funnel.Tracker
	capacity *capacity.Tracker // nil: no samples are stored
	curves   *capacity.Board   // for metrics; nil: as capacity

	hots    *hots          // nil: prefixes are not counted
	tenants *tenants.Names // nil: requests are not attributed
	quotas  *quotas        // nil: no tenant has a quota

	regional *regional // nil: the node has no region

	recorder   *recording.Recorder  // nil: requests are not recorded
	recordings *jetstream.Recording // the stream of recorder

	tokenizers  *tokenize.Service // nil: texts are refused
	textWarning sync.Once         // of a text without tokenizers
	announced   *tokenize.Announced
	estimates   fields.Estimator // of prompts without tokens

	selection *selection.Service
	shims     *compat.Shims
	ready     chan struct{} // closed after every kept partition serves

	dumps    chan struct{} // running dumps
	intake   web.Intake    // of all HTTP ports
	outcomes outcomes
	queries  *metrics.Queries
	scrape   http.Handler
	hub      *watch.Hub // of the live page
	trees    trees      // of prefixes in this node's index
	forests  trees      // and of all nodes
}

// New opens the namespace and assembles a node. It waits for JetStream. Other nodes do not see the node before Run.
func New(ctx context.Context, settings Settings, log *slog.Logger) (*Server, error) {
	settings.setDefaults()
	st, err := openStore(ctx, &settings, log)
	if err != nil {
		return nil, err
	}
	s := &Server{Settings: settings, log: log, ns: st.ns, ready: make(chan struct{}), trees: newTrees(),
		forests: newTrees(), dumps: make(chan struct{}, compat.MaxDumps), intake: web.Intake{Most: maxBodies}}
	if s.pool, err = rpc.NewPool(s.Conn.NATS()); err != nil {
		return nil, err
	}
	cfg, err := s.clusterConfig(ctx)
	if err != nil {
		return nil, err
	}
	s.views = cluster.NewViews(cfg.Config)
	s.models = jetstream.NewModels(s.ns, log, func() { s.registry.ModelsChanged() })
	s.registry = s.newRegistry(st)
	s.L3.Registered, s.L3.Listen = s.registry.Sharing, s.listenStore
	s.L3.Dial = dial.Quick(s.Screen.Rule).DialContext
	s.scrape, s.queries = metrics.New(metrics.Config{Figures: s.figures, Workers: s.MetricsWorkers,
		Tenants: s.Attribution.Metrics})
	if err := s.openTenants(ctx); err != nil {
		return nil, err
	}
	s.capacity = s.newCapacity()
	s.curves = s.newBoard()
	s.funnel = s.newFunnel()
	s.node = s.newNode(st)
	s.registry.RequireClaims(st.claimsRequired)
	s.scatter = s.newScatter()
	if s.guesses, err = guess.New(guess.Config{Settings: s.Guesses, Pool: s.registry.Pool}); err != nil {
		return nil, err
	}
	s.announced = s.newAnnounced()
	s.engines = newEngines(s.Conn, s.Namespace, log)
	s.loads = load.New(load.Config{Conn: s.Conn, Namespace: s.Namespace,
		Limits: load.Limits{Requests: s.MaxRequests, Expiry: s.RequestExpiry},
		Log:    log, Watch: s.observe, Past: s.guesses.Past, Recall: s.guesses.Recall,
		Memories: []shared.Memory{s.engines.memory()}})
	s.engines.loads, s.engines.want = s.loads, s.wantLoads
	if s.recorder, err = s.newRecorder(st); err != nil {
		return nil, err
	}
	s.recordings, s.hots = st.recording, s.newHots()
	if s.regional, err = s.newRegional(); err != nil {
		return nil, err
	}
	s.tokenizers = s.newTokenizers()
	s.sessions = s.newSessions()
	s.Sources.Mark = s.registry.MarkAnswer
	s.selection, err = s.newSelection()
	if err != nil {
		return nil, err
	}
	s.hub = watch.New(watch.Config{Self: s.ID, Source: watched{s}})
	s.Engines.Tracer, s.Engines.Screen = s.Tracer, s.Screen
	s.shims = compat.NewShims(s.ns, st.workers, s.ID, s.Engines, log)
	cfg.Keeper, cfg.Views = s.node, s.views
	s.joining = cfg
	return s, nil
}

// newRegistry returns the registry of workers.
func (s *Server) newRegistry(st *store) *registry.Registry {
	return registry.New(registry.Config{
		BlockSize: s.models.BlockSize,
		Namespace: s.ns, Bucket: st.workers, Recreate: st.recreateWorkers, Began: s.Began,
		ClaimsChanged: func() { s.node.ClaimsChanged() }, Log: s.log,
		Screen: s.Screen, Master: s.L3.Master,
		Mine:      func(p events.Partition) bool { return s.views.Now().Writes(p) },
		ShimsWait: func(p events.Partition) bool { return s.node.ShimsWait(p) },
		Absent: func(ctx context.Context, ranks []events.RankKey) ([]events.RankKey, error) {
			return control.Absent(ctx, s.ns, ranks)
		},
		Holds: func(ctx context.Context, w events.WorkerID) (bool, error) { return s.node.Holds(ctx, w) },
		Clear: func(ctx context.Context, r registry.Record, still func(context.Context) (bool, error)) error {
			id := shim.Identity{Model: r.Model, BlockSize: r.BlockSize}
			return shim.Clear(ctx, s.ns, r.Key(), id, events.ReasonLeaseExpiry, still)
		},
	})
}

// newNode returns the node that applies the log and answers from the index.
func (s *Server) newNode(st *store) *node.Node {
	cfg := node.Config{
		ID: s.ID, Version: s.Version, Namespace: s.ns, Snapshots: st.snapshots, Index: s.Index,
		Shards: cmp.Or(s.IndexShards, runtime.GOMAXPROCS(0)/2), L3: s.L3,
		SnapshotInterval: s.SnapshotInterval, SnapshotBlocks: s.SnapshotBlocks, Recreate: st.mendLog,
		RecreateSnapshots: st.recreateSnapshots,
		Shared:            true, View: s.views.Now, Source: s.registry.Source, Claimed: s.registry.Claimed,
		BlockSize: s.models.BlockSize, Decoded: s.funnel.Applying, Traced: s.Tracer.On(),
		Ready: func() { close(s.ready) }, Log: s.log, Metrics: measured{s.queries, s},
	}
	if s.Embedded != nil {
		cfg.StoreLimit, cfg.Health = s.Embedded.Limit, s.Embedded.Health
	}
	return node.New(cfg)
}

// newScatter returns the part that sends queries to the nodes with the partitions.
func (s *Server) newScatter() *scatter.Scatter {
	return scatter.New(scatter.Config{
		Self: s.ID, Partitions: s.ns.Partitions(), PartitionOf: s.ns.PartitionOf, Local: s.node, View: s.view,
		Store:     func(q *api.Query, blockSize uint32) scatter.Question { return s.node.BeginL3(q, blockSize) },
		Transport: &peers{s.pool, s.Namespace}, Hedges: &s.pool.Hedges, Forward: s.forward,
		Metrics: measured{s.queries, s},
	})
}

// newSelection returns the part that chooses workers.
func (s *Server) newSelection() (*selection.Service, error) {
	return selection.New(selection.Config{
		Find: s.find, Pool: s.registry.Pool, Loads: s.loads, Guesses: s.guesses, Engines: s.engines.read,
		Penalties: s.engines.penalties, Stage: s.selectionStageHook(), Sessions: s.sessions, Observe: s.observeHook(),
		Policy: s.Policy, Routing: s.Routing, Sources: s.Sources,
	})
}

// Run serves until ctx ends, and then hands over the partitions of this node. It returns early with an error if a port
// is not available, before the node joins the cluster, and if another process has or takes the name of the node. It
// waits until no other process has the name.
func (s *Server) Run(ctx context.Context) error {
	defer s.pool.Close()
	ports, err := s.listen()
	defer func() { stopAll(ports) }()
	if err != nil {
		return err
	}
	member, err := cluster.Join(ctx, s.joining)
	if err != nil {
		return err
	}
	service := s.newService()
	if err := errors.Join(service.serveStatus(), service.serveOwn(), service.serveForwards()); err != nil {
		return err
	}
	recallStop, err := shim.ServeRecall(s.ns)
	if err != nil {
		return err
	}
	working, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	if s.Embedded == nil {
		context.AfterFunc(ctx, func() {
			patience := cmp.Or(s.AwayPatience, awayPatience)
			if s.Conn.CloseWhenAway(working, patience) {
				s.log.Warn("NATS does not answer; this node stops without handing over", "after", patience, "what_to_do",
					"nothing: other nodes, and this one when it starts again, take the last snapshots and the log after them")
				giveUp()
			}
		})
	}
	running, end := context.WithCancel(working)
	defer end()
	parts := s.runParts(running)
	left := make(chan error, 1) // receives when this node has left the cluster: after the end of ctx, or after a failure
	go func() { left <- member.Run(ctx) }()
	select {
	case <-s.ready:
		if err = s.serveReady(ctx, member, service); err == nil {
			err = s.drain(ctx, working, left, service)
		}
	case <-ctx.Done():
		err = s.drain(ctx, working, left, service)
	case err = <-left:
	}
	s.log.Info("stopping")
	stopping, cancel := context.WithTimeout(running, 5*time.Second)
	service.stop(stopping)
	recallStop(stopping)
	cancel()
	stopAll(ports) // before the last step of bookings, which sends the changes of the last requests to other nodes
	end()
	parts.Wait()
	return err
}

// listen serves the HTTP and gRPC ports until the returned functions are called. With an error, it returns the
// functions of the open ports.
func (s *Server) listen() (stops []func(), err error) {
	for _, face := range s.faces() {
		stop, err := web.Serve(face, s.log)
		if err != nil {
			return stops, err
		}
		stops = append(stops, stop)
	}
	if s.GRPCListen != "" {
		stop, err := s.serveGRPC()
		if err != nil {
			return stops, err
		}
		stops = append(stops, stop)
	}
	return stops, nil
}

// stopAll calls functions concurrently and waits. A repeated call is harmless.
func stopAll(stops []func()) {
	var all sync.WaitGroup
	for _, stop := range stops {
		all.Go(stop)
	}
	all.Wait()
}

// runParts runs the parts of the node until ctx ends.
func (s *Server) runParts(ctx context.Context) *sync.WaitGroup {
	if s.Embedded != nil {
		go s.Embedded.Supervise(ctx, s.log)
	}
	var parts sync.WaitGroup
	parts.Go(func() {
		if s.registry.ClaimsRequired() {
			s.registry.Await(ctx) // otherwise answers lack all workers until the claims are read
		}
		s.node.Run(ctx)
	})
	parts.Go(func() {
		s.registry.Await(ctx) // otherwise guesses of other nodes could be about unregistered ranks
		s.loads.Run(ctx)
	})
	run := []func(context.Context){s.models.Run, s.registry.Run, s.shims.Run, s.guesses.Run, s.announced.Run,
		s.funnel.Run, s.removeGone, s.engines.listen, s.engines.listenStores, s.engines.demand, s.hub.Run}
	if s.sessions != nil {
		run = append(run, s.sessions.Run)
	}
	if s.recorder != nil {
		run = append(run, s.recorder.Run)
	}
	if s.hots != nil && s.Hot.PerMinute > 0 {
		run = append(run, s.warmUp)
	}
	if s.curves != nil {
		run = append(run, s.curves.Run)
	}
	if s.quotas != nil {
		run = append(run, s.exchangeCharges)
	}
	if s.regional != nil {
		run = append(run, s.exchangeDigests)
	}
	for _, part := range run {
		parts.Go(func() { part(ctx) })
	}
	parts.Go(func() { s.HTTPTokens.Watch(ctx, s.HTTPTokens.LogChanges(s.log)) })
	parts.Go(func() { logRefusals(ctx, &s.outcomes, s.log) })
	return &parts
}

// serveReady announces all partitions of this node, reads the state for choices from other nodes, and serves queries.
func (s *Server) serveReady(ctx context.Context, member *cluster.Member, service *service) error {
	announcing, cancel := context.WithTimeout(ctx, memberBeat)
	member.Announce(announcing) // otherwise other nodes and the status lag by a heartbeat
	cancel()
	s.waitLoads(ctx)
	s.models.Await(ctx) // otherwise an unregistered block size could make a query ambiguous
	if err := service.serveQueries(); err != nil {
		return err
	}
	s.log.Info("ready", "namespace", s.Namespace, "partitions", s.ns.Partitions())
	if s.Ready != nil {
		s.Ready()
	}
	return nil
}

// awayPatience is the default of [Settings.AwayPatience].
const awayPatience = 3 * time.Second

// drain waits until ctx ends, and then serves the node's own subjects until other nodes have taken over, or until
// working has ended too.
func (s *Server) drain(ctx, working context.Context, left <-chan error, service *service) error {
	select {
	case err := <-left:
		return err
	case <-ctx.Done():
	}
	s.log.Info("draining", "timeout", s.Drain)
	leaving, cancel := context.WithTimeout(working, s.Drain/4)
	service.leave(leaving)
	cancel()
	return <-left
}

// httpPorts lists all HTTP ports. mux makes the paths of a port.
func (s *Server) httpPorts() []httpPort {
	return []httpPort{
		{s.HTTPListen, "--http-listen", "HTTP", denyAsAPI, s.paths},
		{s.SelectListen, "--select-listen", "the selection service", denyAsDynamo,
			func() *web.Mux { return dynamoselect.Selection(s.dynamo()) }},
		{s.SlotTrackerListen, "--slot-tracker-listen", "the slot tracker", denyAsDynamo,
			func() *web.Mux { return dynamoselect.Tracker(s.dynamo()) }},
		{s.ConductorListen, "--conductor-listen", "Mooncake's conductor", denyAsDynamo,
			func() *web.Mux { return conductor.Handler(s.conductor()) }},
	}
}

type httpPort struct {
	listen, flag, what string // listen is empty where nothing is to be served
	deny               denial
	mux                func() *web.Mux
}

// faces lists the HTTP servers.
func (s *Server) faces() (list []web.Face) {
	for _, p := range s.httpPorts() {
		if p.listen != "" {
			list = append(list, web.Face{Listen: p.listen, Flag: p.flag, What: p.what,
				Handler: s.guarded(p.mux(), p.deny), TLS: s.HTTPTLS})
		}
	}
	if s.ExternalMetrics.Listen != "" {
		list = append(list, s.externalMetrics())
	}
	return list
}

// store has the NATS objects of a namespace.
type store struct {
	ns        *jetstream.Namespace
	snapshots *jetstream.Bucket
	workers   *jetstream.Bucket

	recording *jetstream.Recording // nil: requests are not recorded
	secret    []byte               // of the names in the recording

	claimsRequired bool // see [jetstream.Namespace.ClaimsRequired]

	mendLog, recreateWorkers, recreateSnapshots func(context.Context) error // recreate missing objects
}

// claimsPatience is the longest wait of a start for the NATS server's setting of required model claims.
const claimsPatience = 3 * time.Second

// openPatience is the time after which a slow start of JetStream is logged.
const openPatience = 10 * time.Second

// openStore opens a namespace and creates missing objects, with retries while JetStream is unavailable.
func openStore(ctx context.Context, s *Settings, log *slog.Logger) (*store, error) {
	for {
		trying, cancel := context.WithTimeout(ctx, openPatience)
		st, err := openOnce(trying, s)
		cancel()
		if err == nil || ctx.Err() != nil || !errors.Is(err, jetstream.ErrUnavailable) {
			return st, err
		}
		what, todo := natsauth.NoJetStream()
		log.Warn(what, "error", err, "what_to_do", todo)
		loop.Wait(ctx, time.Second)
	}
}

func openOnce(ctx context.Context, s *Settings) (*store, error) {
	ns, err := jetstream.JoinNamespace(ctx, s.Conn, jetstream.NamespaceConfig{
		Name: s.Namespace, Partitions: s.Partitions, Replicas: s.Replicas, Restore: s.RestoreNamespace,
	})
	if err != nil {
		return nil, err
	}
	logs := jetstream.LogConfig{
		MaxBytes: s.LogBytes, Usual: usualLog(s.Embedded, ns.Partitions()), MaxAge: s.LogAge, Replicas: s.Replicas,
	}
	if err := ns.EnsureStreams(ctx, logs); err != nil {
		return nil, err
	}
	st := &store{ns: ns}
	asking, cancel := context.WithTimeout(ctx, claimsPatience)
	defer cancel()
	// if the server does not respond in time, the registry repeats the request
	if st.claimsRequired, err = ns.ClaimsRequired(asking); err != nil && !errors.Is(err, jetstream.ErrUnavailable) {
		return nil, err
	}
	snapshots := jetstream.BucketConfig{MaxBytes: s.SnapshotBytes, Replicas: s.Replicas}
	if st.snapshots, err = ns.EnsureSnapshots(ctx, snapshots); err != nil {
		return nil, err
	}
	st.recreateSnapshots = func(ctx context.Context) error {
		_, err := ns.EnsureSnapshots(ctx, snapshots)
		return err
	}
	workers := jetstream.BucketConfig{Replicas: s.Replicas}
	if st.workers, err = ns.EnsureWorkers(ctx, workers); err != nil {
		return nil, err
	}
	st.recreateWorkers = func(ctx context.Context) error {
		_, err := ns.EnsureWorkers(ctx, workers)
		return err
	}
	st.mendLog = func(ctx context.Context) error {
		// as with a bucket (jetstream.Bucket.Gone): not while the server is still removing the old stream
		loop.Wait(ctx, time.Second)
		return ns.EnsureStreams(ctx, logs)
	}
	if s.Recording.On {
		err = st.openRecording(ctx, s)
	}
	return st, err
}

// usualLog returns the default size of a partition's log. The server reserves the bytes, so all logs get half of the
// server's storage. The default applies only to new streams. A fuller disk at a later start does not affect existing
// streams.
func usualLog(server *natsserver.Server, partitions uint32) int64 {
	const usual = 1 << 30
	if server == nil {
		return usual
	}
	return max(1<<20, min(usual, server.MaxStore()/2/int64(partitions)))
}

// listenStore passes the messages of a store's shim to receive, until ctx ends. Without the messages the store is
// polled.
func (s *Server) listenStore(ctx context.Context, store string, receive func([]byte)) {
	subject, err := jetstream.Names(s.Namespace).Store(store)
	if err == nil {
		err = s.Conn.Listen(ctx, subject, receive)
	}
	if ctx.Err() == nil {
		s.log.Warn("cannot subscribe to the shared store's events; the store is polled", "store", store, "error", err,
			"what_to_do", "grant the subject to this user: indexer auth create prints the permissions of every user")
	}
}
