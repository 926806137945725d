package main

import (
	"io"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/pods"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/internal/ingest/source"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/shimport"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// options are the values of the flags that both commands share.
type options struct {
	shim      *host.Shim
	source    source.Settings
	master    string
	tokenFile string

	flags            *pflag.FlagSet
	table            cli.Flags
	nats, engineNATS *cli.NATS
	worker           *cli.WorkerFlags
	l3Master         func() (hicache.Master, error)
	rule             func() (*dial.Rule, error)
	http             shimport.Port
	traces           *cli.Traces
	debug            *cli.Debug
	logger           func(io.Writer) (*slog.Logger, error)
}

// newOptions adds the flags to a command.
func newOptions(f *pflag.FlagSet) *options {
	o := &options{shim: &host.Shim{Shared: &host.Shared{}}, flags: f}
	o.table = o.rows(&o.shim.Settings)
	o.table.Add(f)
	cli.Renamed(f, map[string]string{"instance": "worker"})
	o.nats = cli.NATSFlags(f, false)
	o.engineNATS = cli.OtherNATSFlags(f, "engine-nats",
		"of dynamo-nats: the NATS server of the Dynamo fleet, if it is another than --nats")
	o.rule = cli.DialFlag(f, "of dynamo-zmq: networks in which the addresses of Dynamo's discovery are dialled")
	o.l3Master = cli.MasterFlags(f)
	o.worker = cli.AddWorkerFlags(f, "serving-endpoint")
	o.http.Security = cli.HTTPSecurityFlags(f, "HTTP")
	o.traces = cli.TraceFlags(f)
	o.debug = cli.DebugFlag(f)
	o.logger = cli.LogFlags(f)
	return o
}

// rows returns the table of the flags.
func (o *options) rows(s *host.Settings) cli.Flags {
	return cli.Flags{
		cli.Var(&s.Namespace, "namespace", "default",
			"namespace of the indexer",
			cli.Valid(jetstream.CheckNamespace)),
		cli.Var(&s.Engine, "engine", "",
			"the engine's event endpoint, tcp://HOST:PORT or ipc://PATH (required); of ndjson - for standard input or "+
				"ipc://PATH to listen at; of dynamo-nats a subject; of dynamo-zmq where Dynamo's discovery is: "+
				"http://HOST:PORT of etcd, ETCD_ENDPOINTS, the folder of files, DYN_FILE_KV, or kubernetes://NAMESPACE"),
		cli.Var(&s.Listen, "listen", false,
			"listen on --engine; the engine dials in. Without --worker any number of engines may: each topic kv@POD@MODEL is "+
				"a worker, and POD its name"),
		cli.Var(&o.source.MaxEngines, "max-engines", source.DefaultEngines,
			"of --listen without --worker: how many ranks are served; the messages of further ones are skipped and counted",
			cli.Between[uint32](1, host.MaxRanks)),
		cli.Var(&s.Replay, "replay", "",
			"the engine's replay endpoint"),
		cli.Var(&s.Source, "source", "auto",
			"how the engine speaks: vllm, sglang, auto (one of the two, told from what it says), or, for many ranks at once, "+
				"ndjson, dynamo-nats or dynamo-zmq; mooncake is no engine but a shared store's master, with --master; "+
				"see docs/l3.md"),
		cli.Var(&o.master, "master", "",
			"of mooncake: HOST:PORT of the master's HTTP, as workers register it"),
		cli.Var(&s.Topic, "topic", "",
			"hear only messages whose topic begins with this; of dynamo-zmq only publishers "+
				"whose NAMESPACE.COMPONENT.ENDPOINT does"),
		cli.Var(&s.Worker, "worker", "",
			"the worker's name: what routers address (required)"),
		cli.Var(&s.Rank, "rank", 0,
			"data-parallel rank, the first one if there are several"),
		cli.Var(&s.Ranks, "ranks", 1,
			"how many data-parallel ranks to shim: each has the ports after those of the one before, as engines number them",
			cli.Between[uint32](1, host.MaxRanks)),
		cli.Var(&s.Model, "model", "",
			"model that the engine serves (required)"),
		cli.Var(&s.BlockSize, "block-size", 0,
			"tokens in one of the engine's blocks (required)"),
		cli.Var(&s.QueueBytes, "queue-bytes", 64<<20,
			"bytes of memory that may wait for NATS before the engine is no longer read",
			cli.AtLeast(1<<20, "1 MiB")),
		cli.Var(&s.ReplayTimeout, "replay-timeout", 2*time.Second,
			"how long the replay endpoint may say nothing"),
		cli.Var(&s.IdleCheck, "idle-check", 30*time.Second,
			"after how long a silence the replay endpoint is asked whether anything was missed"),
		cli.Var(&s.ClaimWait, "claim-wait", 45*time.Second,
			"how long to wait for another shim of the same rank to end, before this one gives up: longer than a predecessor "+
				"may take to stop"),
		cli.Var(&s.Silence, "silence", 30*time.Second,
			"how long a source may publish no first event, or not be reached, before the log, indexer status and doctor report it"),
		cli.Var(&s.Lease, "lease", registry.DefaultLease,
			"after how long without a sign of this shim the worker counts as gone, and what it held is cleared",
			cli.Between(registry.MinLease, registry.MaxLease)),
		cli.Var(&s.L3Config, "l3-config", "",
			"JSON file that says how this worker uses a shared store; it is registered with the lease; see docs/l3.md"),
		cli.Var(&s.KVGroups, "kv-groups", "",
			"of a hybrid model: what the engine's KV-cache groups serve, by number, where its events leave that open: full, "+
				"mla, swa:TOKENS, chunked:TOKENS or mamba, with :eagle behind it if a draft model has the last block of a hit "+
				"computed anew; as in full,chunked:8192. The default is what --l3-config says"),
		cli.Var(&s.OnUnreadable, "on-unreadable", host.UnreadablePass,
			"what an engine's message that cannot be read costs: pass (itself alone) or clear (all that the rank was known to "+
				"hold, since it may have told of removals)",
			cli.OneOf("is neither pass nor clear", host.UnreadablePass, host.UnreadableClear)),
		cli.Var(&s.EngineHTTP, "engine-http", "",
			"http://HOST:PORT of the engine's API, from which is learned what other flags do not say: endpoints, ranks, model, "+
				"block size, room in blocks (SGLang; vLLM from 0.32 on)"),
		cli.Var(&o.tokenFile, "engine-http-token-file", "",
			"file with the API key that the engine wants"),
		cli.Var(&s.EngineCheck, "engine-http-check", 2*time.Second,
			"how often --engine-http is asked whether the engine sleeps, and, at every fifth time, which names and LoRA "+
				"adapters it serves; 0: never",
			cli.Is(func(d time.Duration) bool { return d == 0 || d >= 100*time.Millisecond },
				"is neither 0 nor at least 100ms")),
		cli.Var(&s.EngineLoad, "engine-http-load", time.Second,
			"interval for reading running and waiting requests and used memory from --engine-http (vLLM: /metrics, SGLang: "+
				"/v1/loads), while an indexer chooses workers; 0: never",
			cli.Is(func(d time.Duration) bool { return d == 0 || d >= 100*time.Millisecond },
				"is neither 0 nor at least 100ms")),
		cli.Var(&s.OnRefused, "on-engine-refused", "clear",
			"what follows when the engine's connection has ended and its own ports refuse: clear (its process is gone, and "+
				"the blocks in device and host memory are cleared) or keep (a proxy may refuse)",
			cli.Valid(onRefused)),
		cli.Var(&s.SilentAfter, "engine-silent-after", 10*time.Second,
			"after how long without a sign of life the engine counts as silent, which is said and clears nothing",
			cli.AtLeast(time.Second, "1s")),
		cli.Var(&s.GoneAfter, "engine-gone-after", 0,
			"after how long a silence the engine counts as gone, and what it had in device and host memory is cleared; 0: "+
				"never. Of --listen without --worker: how long after its connection has ended; 0: 2s"),
		cli.Var(&s.StopWait, "stop-wait", 5*time.Second,
			"after SIGTERM, how long to wait for the engine's end, which is then recorded: indexers choose the worker no more. "+
				"If the engine runs on, its registration stays for the next shim; 0: do not wait. Of pods: never waited for",
			cli.NotNegative[time.Duration]()),
		cli.Var(&s.LogRepeat, "log-repeat", 10*time.Second,
			"least time between two log lines about the same trouble"),
		cli.Var(&o.source.Etcd.User, "etcd-user", "",
			"of dynamo-zmq: etcd's user, who may read the keys from v1/event_ on"),
		cli.Var(&o.source.Etcd.Password, "etcd-password", "",
			"password; better given as KVATLAS_ETCD_PASSWORD"),
		cli.Var(&o.source.Etcd.CA, "etcd-ca", "",
			"file with the authorities that vouch for etcd"),
		cli.Var(&o.source.Etcd.Cert, "etcd-cert", "",
			"file with this client's certificate"),
		cli.Var(&o.source.Etcd.Key, "etcd-key", "",
			"file with its key"),
		cli.Var(&o.source.Kube.URL, "kube-api", "",
			"of pods and of dynamo-zmq: https://HOST:PORT of the Kubernetes API server (default: that of this pod)"),
		cli.Var(&o.source.Kube.TokenFile, "kube-token-file", "",
			"file with the token for it (default: that of the service account)"),
		cli.Var(&o.source.Kube.CAFile, "kube-ca", "",
			"file with the authorities that vouch for it (default: that of the service account)"),
		cli.Var(&o.http.Listen, "http-listen", "",
			"HOST:PORT where this process tells how it is: /metrics for Prometheus, /healthz, /readyz; port 0 takes a free one "+
				"(default: nowhere)"),
	}
}

// podRows returns the table of the flags of pods alone.
func podRows(p *pods.Settings) cli.Flags {
	return cli.Flags{
		cli.Var(&p.Selector, "selector", "",
			"labels of the pods, such as app=vllm (required, or --pool)"),
		cli.Var(&p.Pool, "pool", "",
			"InferencePool whose selector and first port are used"),
		cli.Var(&p.Namespace, "pods-namespace", "",
			"Kubernetes namespace of the pods; * for all (default: that of this pod)"),
		cli.Var(&p.Group, "share-as", "",
			"name of a group of replicas that share the pods, by Leases in this pod's namespace (default: this process takes "+
				"all pods)"),
		cli.Var(&p.Replica, "replica", "",
			"name of this replica in the group (default: the host's name)"),
	}
}

func onRefused(text string) error {
	_, err := shim.ParseOnRefused(text)
	return err
}

// byTopic reports whether the topics of engines that dial in name the workers.
func (o *options) byTopic() bool {
	s := o.shim
	return s.Listen && s.Worker == "" && !source.Named(s.Source) && s.EngineHTTP == ""
}

// The flags without a meaning for some sources.
var (
	// oneEngine are the flags of one engine, which sources with many ranks exclude.
	oneEngine = []string{"replay", "on-engine-refused"}

	// ownSocket are further flags of an engine at a socket of its own.
	ownSocket = []string{"listen", "ranks", "on-unreadable", "engine-gone-after"}

	// oneWorker are the facts of one worker.
	oneWorker = []string{"serving-endpoint", "stable-routing-id"}

	// ofStores are the flags of a store's shim. All others are about workers.
	ofStores = []string{"source", "engine", "master", "namespace", "silence", "log-repeat", "log-level", "log-format"}
)

// refuse adds an error with the reason for each of the flags that is given.
func (o *options) refuse(wrong *cli.Complaints, reason string, names ...string) {
	for _, name := range names {
		wrong.When(cli.Given(o.flags, name), "--%s %s", name, reason)
	}
}

// check checks the flags and fills in the settings that several flags make up.
func (o *options) check(wrong *cli.Complaints) {
	s := o.shim
	o.table.Check(wrong)
	if !o.byTopic() {
		o.refuse(wrong, "is for --listen without --worker", "max-engines")
		wrong.When(s.GoneAfter != 0 && s.GoneAfter < s.SilentAfter,
			"--engine-gone-after %v is less than --engine-silent-after %v", s.GoneAfter, s.SilentAfter)
	} else {
		const reason = "is for one engine: give --worker, or leave it out where topics name the workers"
		o.refuse(wrong, reason, oneEngine...)
		o.refuse(wrong, reason, oneWorker...)
	}
	if source.Named(s.Source) {
		reason := "is not for --source " + s.Source
		o.refuse(wrong, reason, oneEngine...)
		o.refuse(wrong, reason, ownSocket...)
		o.refuse(wrong, reason, "engine-http")
		if s.Source != source.ZeroMQ {
			o.refuse(wrong, reason, "topic")
		}
		if s.Worker == "" {
			o.refuse(wrong, reason, oneWorker...)
		}
		o.refuse(wrong, "is for one engine, not for --source "+s.Source, "kv-groups")
	}
	o.refuse(wrong, "is for --source "+source.Mooncake, "master")
	if s.EngineHTTP == "" {
		o.refuse(wrong, "has no effect without --engine-http", "engine-http-token-file")
	}
	wrong.When(o.engineNATS.Said() && (s.Source != source.NATS || o.engineNATS.URL == ""),
		"the flags --engine-nats... are for --source %s, and have no effect without --engine-nats itself", source.NATS)
	o.source.Etcd.Check(wrong, s.Source, s.Engine)

	var errs [4]error
	o.source.Rule, errs[0] = o.rule()
	wrong.About("--dial-allow", errs[0])
	o.source.EngineNATS, errs[1] = o.engineNATS.Options("kvatlas shim")
	s.L3Master, errs[2] = o.l3Master()
	s.Spec, errs[3] = o.worker.Spec()
	if errs[3] != nil {
		s.Spec = &api.WorkerSpec{}
	}
	*wrong = append(*wrong, errs[1:]...)
	wrong.When(s.L3Config == "" && s.L3Master.Address != "", "--l3-master has no effect without --l3-config")
	s.EngineHTTPToken = func() (string, error) { return cli.TokenFile("engine-http-token-file", o.tokenFile) }
}

// checkStore checks the flags of a store's shim.
func (o *options) checkStore() error {
	var wrong cli.Complaints
	o.table.Check(&wrong)
	o.flags.Visit(func(f *pflag.Flag) {
		known := slices.Contains(ofStores, f.Name) || f.Name == "nats" || strings.HasPrefix(f.Name, "nats-")
		wrong.When(!known, "--%s is not for --source %s", f.Name, source.Mooncake)
	})
	return wrong.Usage()
}
