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
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// options are the values of the flags common to both commands.
type options struct {
	shim      *host.Shim
	source    source.Settings
	master    string
	tokenFile string

	flags            *pflag.FlagSet
	table            cli.Flags
	nats, engineNATS *cli.NATS
	worker           cli.WorkerFlags
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
	o.nats = cli.NATSFlags(f, false)
	o.engineNATS = cli.OtherNATSFlags(f, "engine-nats",
		"of dynamo-nats: the NATS server of the Dynamo fleet, if different from --nats")
	o.rule = cli.DialFlag(f, "of dynamo-zmq: networks of permitted addresses in Dynamo's discovery")
	o.l3Master = cli.MasterFlags(f)
	o.http.Security = cli.HTTPSecurityFlags(f, "HTTP")
	o.traces = cli.TraceFlags(f)
	o.debug = cli.DebugFlag(f)
	o.logger = cli.LogFlags(f)
	return o
}

// sections returns the sections of the help. The flags of most deployments come first.
func (o *options) sections() []cli.Section {
	s := &o.shim.Settings
	return []cli.Section{
		{Title: "Important flags", Names: []string{"engine", "replay", "engine-http", "worker", "model", "block-size",
			"ranks", "serving-endpoint", "role", "nats", "nats-creds", "namespace", "http-listen", "log-level"}},
		{Title: "Source of events", Names: append(o.sourceRows(s).Names(), "engine-nats*")},
		{Title: "Worker", Names: append(workerRows(s).Names(), "l3-*")},
		{Title: "Registration for routers", Names: o.worker.Rows("serving-endpoint").Names()},
		{Title: "Engine", Names: o.engineRows(s).Names()},
		{Title: "Discovery and port of this process", Names: append(o.discoveryRows().Names(), "http-*", "dial-allow",
			"debug-listen")},
		{Title: "Connection to NATS", Names: []string{"nats-*"}},
		{Title: "Logs and traces", Names: []string{"log-format", "log-level", "otlp-*", "trace-sample"}},
	}
}

// rows returns the table of the flags.
func (o *options) rows(s *host.Settings) cli.Flags {
	return slices.Concat(o.sourceRows(s), workerRows(s), o.engineRows(s), o.discoveryRows(),
		o.worker.Rows("serving-endpoint"))
}

// sourceRows returns the flags of the source of events.
func (o *options) sourceRows(s *host.Settings) cli.Flags {
	return cli.Flags{
		cli.Var(&s.Namespace, "namespace", "default",
			"namespace of the indexer",
			cli.Valid(jetstream.CheckNamespace)),
		cli.Var(&s.Engine, "engine", "",
			"the engine's event endpoint, tcp://HOST:PORT or ipc://PATH (required without --engine-http); of ndjson - for "+
				"standard input or ipc://PATH to listen at; of dynamo-nats a subject; of dynamo-zmq where Dynamo's discovery "+
				"is: http://HOST:PORT of etcd, ETCD_ENDPOINTS, the folder of files, DYN_FILE_KV, or kubernetes://NAMESPACE"),
		cli.Var(&s.Listen, "listen", false,
			"listen on --engine; the engine dials in. Without --worker, any number of engines may dial in: a topic "+
				"kv@POD@MODEL is "+
				"a worker with the name POD"),
		cli.Var(&o.source.MaxEngines, "max-engines", source.DefaultEngines,
			"of --listen without --worker: limit of served ranks; messages of further ranks are skipped and counted",
			cli.Between[uint32](1, host.MaxRanks)),
		cli.Var(&s.Replay, "replay", "",
			"the engine's replay endpoint"),
		cli.Var(&s.Source, "source", "auto",
			"format of the engine's events: vllm, sglang, auto (detected from the events), or, for many ranks at once, "+
				"ndjson, dynamo-nats or dynamo-zmq; mooncake is no engine but a shared store's master, with --master; "+
				"see docs/l3.md"),
		cli.Var(&o.master, "master", "",
			"of mooncake: HOST:PORT of the master's HTTP, as in the registrations of workers"),
		cli.Var(&s.Topic, "topic", "",
			"receive only messages with this prefix of the topic; of dynamo-zmq only publishers "+
				"with this prefix of NAMESPACE.COMPONENT.ENDPOINT"),
	}
}

// workerRows returns the flags of the worker and its place in the log.
func workerRows(s *host.Settings) cli.Flags {
	return cli.Flags{
		cli.Var(&s.Worker, "worker", "",
			"the worker's name in routers (required without --engine-http)").
			Old("instance"),
		cli.Var(&s.Rank, "rank", 0,
			"data-parallel rank, or the first of several ranks"),
		cli.Var(&s.Ranks, "ranks", 1,
			"number of data-parallel ranks; the ports of successive ranks follow each other, as in engines",
			cli.Between[uint32](1, host.MaxRanks)),
		cli.Var(&s.Model, "model", "",
			"the engine's model (required without --engine-http)"),
		cli.Var(&s.BlockSize, "block-size", 0,
			"tokens in a block of the engine (required without --engine-http)"),
		cli.Var(&s.QueueBytes, "queue-bytes", shim.DefaultQueueBytes,
			"bytes of events waiting for NATS; at the limit the shim stops reading the engine",
			cli.AtLeast(1<<20, "1 MiB")),
		cli.Var(&s.ReplayTimeout, "replay-timeout", 2*time.Second,
			"how long the replay endpoint may send nothing"),
		cli.Var(&s.IdleCheck, "idle-check", 30*time.Second,
			"time of silence before a request to the replay endpoint for missed messages"),
		cli.Var(&s.ClaimWait, "claim-wait", 45*time.Second,
			"how long to wait for the end of a second shim of the same rank, before this shim exits: longer than a predecessor "+
				"may take to stop"),
		cli.Var(&s.Silence, "silence", 30*time.Second,
			"time without a first event, or without a connection to a source, before the log, indexer status and doctor "+
				"report the source"),
		cli.Var(&s.Lease, "lease", registry.DefaultLease,
			"time without a sign of this shim after which the worker is gone and the worker's blocks are cleared",
			cli.Between(registry.MinLease, registry.MaxLease)),
		cli.Var(&s.L3Config, "l3-config", "",
			"JSON file with this worker's use of a shared store, registered with the lease; see docs/l3.md"),
		cli.Var(&s.KVGroups, "kv-groups", "",
			"of a hybrid model: kinds of the engine's KV-cache groups, by number, if missing in events: full, "+
				"mla, swa:TOKENS, chunked:TOKENS or mamba, with the suffix :eagle if a draft model requires that the last block "+
				"of a hit is computed again; for example full,chunked:8192 (default: the groups of --l3-config)"),
	}
}

// engineRows returns the flags of the engine's API and life.
func (o *options) engineRows(s *host.Settings) cli.Flags {
	return cli.Flags{
		cli.Var(&s.OnUnreadable, "on-unreadable", host.UnreadablePass,
			"effect of an unreadable engine message: pass (skip the message) or clear (clear all blocks of the rank, "+
				"since the message may contain removals)",
			cli.OneOf("is neither pass nor clear", host.UnreadablePass, host.UnreadableClear)),
		cli.Var(&s.EngineHTTP, "engine-http", "",
			"http://HOST:PORT of the engine's API, the source of all settings without a flag: endpoints, ranks, model, "+
				"block size, room in blocks (SGLang; vLLM from 0.32 on)"),
		cli.Var(&o.tokenFile, "engine-http-token-file", "",
			"file with the API key of the engine"),
		cli.Var(&s.EngineCheck, "engine-http-check", 2*time.Second,
			"interval of requests to --engine-http for the engine's sleep and, at every fifth time, for names and LoRA "+
				"adapters it serves; 0: never",
			cli.Is(func(d time.Duration) bool { return d == 0 || d >= 100*time.Millisecond },
				"is neither 0 nor at least 100ms")),
		cli.Var(&s.EngineLoad, "engine-http-load", time.Second,
			"interval for reading running and waiting requests and used memory from --engine-http (vLLM and TensorRT-LLM: "+
				"/metrics, SGLang: /v1/loads or its load socket), while an indexer chooses workers; 0: never",
			cli.Is(func(d time.Duration) bool { return d == 0 || d >= 100*time.Millisecond },
				"is neither 0 nor at least 100ms")),
		cli.Var(&s.OnRefused, "on-engine-refused", "clear",
			"effect of a lost connection with refusing ports of the engine: clear (the process is gone, and "+
				"the blocks in device and host memory are cleared) or keep (a proxy may refuse)",
			cli.Valid(onRefused)),
		cli.Var(&s.SilentAfter, "engine-silent-after", 10*time.Second,
			"time without a sign of life after which the engine is silent; silence is reported and clears nothing",
			cli.AtLeast(time.Second, "1s")),
		cli.Var(&s.GoneAfter, "engine-gone-after", 0,
			"time of silence after which the engine is gone, and the blocks in device and host memory are cleared; 0: "+
				"never. Of --listen without --worker: the time after the end of the connection; 0: 2s"),
		cli.Var(&s.StopWait, "stop-wait", 5*time.Second,
			"maximum wait for the engine's exit after SIGTERM. The shim records the exit, and indexers stop choosing the "+
				"worker. If the engine runs on, the registration stays for the next shim; 0: do not wait. Of pods: always 0",
			cli.NotNegative[time.Duration]()),
		cli.Var(&s.LogRepeat, "log-repeat", 10*time.Second,
			"least time between two log lines about the same trouble"),
	}
}

// discoveryRows returns the flags of etcd, Kubernetes and the port of this process.
func (o *options) discoveryRows() cli.Flags {
	return cli.Flags{
		cli.Var(&o.source.Etcd.User, "etcd-user", "",
			"of dynamo-zmq: etcd's user with read access to the keys that begin with v1/event_, and v1/mdc/ for roles"),
		cli.Var(&o.source.Etcd.Password, "etcd-password", "",
			"password; better given as KVATLAS_ETCD_PASSWORD"),
		cli.Var(&o.source.Etcd.CA, "etcd-ca", "",
			"file with the certificate authorities of etcd"),
		cli.Var(&o.source.Etcd.Cert, "etcd-cert", "",
			"file with this client's certificate"),
		cli.Var(&o.source.Etcd.Key, "etcd-key", "",
			"file with its key"),
		cli.Var(&o.source.Kube.URL, "kube-api", "",
			"of pods and of dynamo-zmq: https://HOST:PORT of the Kubernetes API server (default: the server of this pod)"),
		cli.Var(&o.source.Kube.TokenFile, "kube-token-file", "",
			"file with the token for --kube-api (default: the token of the service account)"),
		cli.Var(&o.source.Kube.CAFile, "kube-ca", "",
			"file with the certificate authorities of --kube-api (default: the file of the service account)"),
		cli.Var(&o.http.Listen, "http-listen", "",
			"HOST:PORT of this process's /metrics for Prometheus, /healthz and /readyz; port 0 chooses a free port "+
				"(default: nowhere)"),
	}
}

// podRows returns the table of the flags of pods alone.
func podRows(p *pods.Settings) cli.Flags {
	return cli.Flags{
		cli.Var(&p.Selector, "selector", "",
			"labels of the pods, such as app=vllm (required, or --inference-pool)"),
		cli.Var(&p.Pool, "inference-pool", "",
			"InferencePool for the selector and the first port").
			Old("pool"),
		cli.Var(&p.Namespace, "pods-namespace", "",
			"Kubernetes namespace of the pods; * for all (default: the namespace of this pod)"),
		cli.Var(&p.Group, "share-as", "",
			"name of a group of replicas that share the pods, by Leases in this pod's namespace (default: this process serves "+
				"all pods)"),
		cli.Var(&p.Replica, "replica", "",
			"name of this replica in the group (default: the host's name)").
			With("--share-as", func() bool { return p.Group != "" }),
	}
}

func onRefused(text string) error {
	_, err := shim.ParseOnRefused(text)
	return err
}

// byTopic reports whether the workers' names come from the topics of engines that dial in.
func (o *options) byTopic() bool {
	s := o.shim
	return s.Listen && s.Worker == "" && !source.Named(s.Source) && s.EngineHTTP == ""
}

// The flags without a meaning for some sources.
var (
	// oneEngine are the flags of a single engine, excluded for sources with many ranks.
	oneEngine = []string{"replay", "on-engine-refused"}

	// ownSocket are further flags of an engine with a separate socket.
	ownSocket = []string{"listen", "ranks", "on-unreadable", "engine-gone-after"}

	// oneWorker are the facts of a single worker.
	oneWorker = []string{"serving-endpoint", "stable-routing-id"}

	// ofStores are the flags of a store's shim. All further flags are about workers.
	ofStores = []string{"source", "engine", "master", "namespace", "silence", "log-repeat", "log-level", "log-format"}
)

// refuse adds an error with the reason for every given flag among names.
func (o *options) refuse(wrong *cli.Complaints, reason string, names ...string) {
	for _, name := range names {
		wrong.When(cli.Given(o.flags, name), "--%s %s", name, reason)
	}
}

// check checks the flags and fills in the settings from several flags.
func (o *options) check(wrong *cli.Complaints) {
	s := o.shim
	o.table.Check(wrong)
	if !o.byTopic() {
		o.refuse(wrong, "is for --listen without --worker", "max-engines")
		wrong.When(s.GoneAfter != 0 && s.GoneAfter < s.SilentAfter,
			"--engine-gone-after %v is less than --engine-silent-after %v", s.GoneAfter, s.SilentAfter)
	} else {
		const reason = "is for a single engine: give --worker, or omit the flag if topics name the workers"
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
		o.refuse(wrong, "is for a single engine, not for --source "+s.Source, "kv-groups")
	}
	o.refuse(wrong, "is for --source "+source.Mooncake, "master")
	if s.EngineHTTP == "" {
		o.refuse(wrong, "has no effect without --engine-http: give --engine-http, or omit the flag", "engine-http-token-file",
			"engine-http-check", "engine-http-load")
	}
	wrong.When(o.engineNATS.Said() && (s.Source != source.NATS || o.engineNATS.URL == ""),
		"the flags --engine-nats... are for --source %s, and have no effect without --engine-nats itself", source.NATS)
	o.source.Etcd.Check(wrong, s.Source, s.Engine)

	var errs [4]error
	o.source.Rule, errs[0] = o.rule()
	wrong.About("--dial-allow", errs[0])
	o.source.EngineNATS, errs[1] = o.engineNATS.Options("kvatlas shim")
	s.L3Master, errs[2] = o.l3Master()
	spec, err := o.worker.Spec()
	s.Spec, errs[3] = &spec, err
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
