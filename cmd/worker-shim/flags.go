package main

import (
	"io"
	"log/slog"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/kube"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// settings are the values of the flags of worker-shim run.
type settings struct {
	nats       *cli.NATS
	namespace  string
	engineNATS *cli.NATS
	etcd       *etcdFlags
	kube       kube.Config
	makeRule   func() (*dial.Rule, error)

	engine, replay, engineSnapshot, source, topic, master string
	listen                                                bool
	maxEngines                                            uint32 // of engines that dial in, where topics name the workers

	instance, model        string
	rank, ranks, blockSize uint32
	worker                 *cli.WorkerFlags
	kvGroups, l3Config     string
	l3Master               func() (hicache.Master, error)

	engineHTTP, engineHTTPToken string
	engineCheck                 time.Duration

	queueBytes                                            int
	replayTimeout, idleCheck, logWindow, lease, claimWait time.Duration
	silence, silentAfter, goneAfter, stopWait             time.Duration
	onUnreadable, onRefused                               string
}

// addFlags adds the flags of worker-shim run. logger makes the logger that they describe.
func (r *running) addFlags(f *pflag.FlagSet) (logger func(io.Writer) (*slog.Logger, error)) {
	r.nats = cli.NATSFlags(f, false)
	f.StringVar(&r.namespace, "namespace", "default", "namespace of the indexer")
	f.StringVar(&r.engine, "engine", "",
		"the engine's event endpoint, tcp://HOST:PORT or ipc://PATH (required); of ndjson - for standard input or "+
			"ipc://PATH to listen at; of dynamo-nats a subject; of dynamo-zmq where Dynamo's discovery is: "+
			"http://HOST:PORT of etcd, ETCD_ENDPOINTS, the folder of files, DYN_FILE_KV, or kubernetes://NAMESPACE")
	r.engineNATS = cli.OtherNATSFlags(f, "engine-nats",
		"of dynamo-nats: the NATS server of the Dynamo fleet, if it is another than --nats")
	r.etcd = addEtcdFlags(f)
	addKubeFlags(f, &r.kube)
	r.makeRule = cli.DialFlag(f, "of dynamo-zmq: networks in which the addresses of Dynamo's discovery are dialled")
	f.BoolVar(&r.listen, "listen", false,
		"listen on --engine; the engine dials in. Without --worker any number of engines may: each topic kv@POD@MODEL is "+
			"a worker, and POD its name")
	f.Uint32Var(&r.maxEngines, "max-engines", defaultEngines,
		"of --listen without --worker: how many ranks are served; the messages of further ones are skipped and counted")
	f.StringVar(&r.replay, "replay", "", "the engine's replay endpoint")
	f.StringVar(&r.engineSnapshot, "engine-snapshot", "",
		"where the engine can be asked for all that it holds, as proposed for vLLM: its snapshot_endpoint, "+
			"or --replay's endpoint again")
	f.StringVar(&r.source, "source", "auto",
		"how the engine speaks: vllm, sglang, auto (one of the two, told from what it says), or, for many ranks at once, "+
			"ndjson, dynamo-nats or dynamo-zmq; mooncake is no engine but a shared store's master, with --master; "+
			"see docs/l3.md")
	f.StringVar(&r.master, "master", "", "of mooncake: HOST:PORT of the master's HTTP, as workers register it")
	f.StringVar(&r.topic, "topic", "", "hear only messages whose topic begins with this; of dynamo-zmq only publishers "+
		"whose NAMESPACE.COMPONENT.ENDPOINT does")
	f.StringVar(&r.instance, "worker", "", "the worker's name: what routers address (required)")
	cli.Renamed(f, map[string]string{"instance": "worker"})
	f.Uint32Var(&r.rank, "rank", 0, "data-parallel rank, the first one if there are several")
	f.Uint32Var(&r.ranks, "ranks", 1,
		"how many data-parallel ranks to shim: each has the ports after those of the one before, as engines number them")
	f.StringVar(&r.model, "model", "", "model that the engine serves (required)")
	f.Uint32Var(&r.blockSize, "block-size", 0, "tokens in one of the engine's blocks (required)")
	f.IntVar(&r.queueBytes, "queue-bytes", 64<<20,
		"bytes of memory that may wait for NATS before the engine is no longer read")
	f.DurationVar(&r.replayTimeout, "replay-timeout", 2*time.Second, "how long the replay endpoint may say nothing")
	f.DurationVar(&r.idleCheck, "idle-check", 30*time.Second,
		"after how long a silence the replay endpoint is asked whether anything was missed")
	f.DurationVar(&r.claimWait, "claim-wait", 45*time.Second,
		"how long to wait for another shim of the same rank to end, before this one gives up: longer than a predecessor "+
			"may take to stop")
	f.DurationVar(&r.silence, "silence", 30*time.Second,
		"how long a source may publish no first event, or not be reached, before the log, indexer status and doctor report it")
	f.DurationVar(&r.lease, "lease", registry.DefaultLease,
		"after how long without a sign of this shim the worker counts as gone, and what it held is cleared")
	f.StringVar(&r.l3Config, "l3-config", "",
		"JSON file that says how this worker uses a shared store; it is registered with the lease; see docs/l3.md")
	r.l3Master = cli.MasterFlags(f)
	r.worker = cli.AddWorkerFlags(f, "serving-endpoint")
	f.StringVar(&r.kvGroups, "kv-groups", "",
		"of a hybrid model: what the engine's KV-cache groups serve, by number, where its events leave that open: full, "+
			"mla, swa:TOKENS, chunked:TOKENS or mamba, with :eagle behind it if a draft model has the last block of a hit "+
			"computed anew; as in full,chunked:8192. The default is what --l3-config says")
	f.StringVar(&r.onUnreadable, "on-unreadable", unreadablePass,
		"what an engine's message that cannot be read costs: pass (itself alone) or clear (all that the rank was known to "+
			"hold, since it may have told of removals)")
	f.StringVar(&r.engineHTTP, "engine-http", "",
		"http://HOST:PORT of the engine's API, from which is learned what other flags do not say: endpoints, ranks, model, "+
			"block size, room in blocks (SGLang; vLLM from 0.32 on)")
	f.StringVar(&r.engineHTTPToken, "engine-http-token-file", "", "file with the API key that the engine wants")
	f.DurationVar(&r.engineCheck, "engine-http-check", 2*time.Second,
		"how often --engine-http is asked whether the engine sleeps, and, at every fifth time, which names and LoRA "+
			"adapters it serves; 0: never")
	f.StringVar(&r.onRefused, "on-engine-refused", "clear",
		"what follows when the engine's connection has ended and its own ports refuse: clear (its process is gone, and "+
			"what it had in device and host memory is cleared) or keep (a proxy may refuse)")
	f.DurationVar(&r.silentAfter, "engine-silent-after", 10*time.Second,
		"after how long without a sign of life the engine counts as silent, which is said and clears nothing")
	f.DurationVar(&r.goneAfter, "engine-gone-after", 0,
		"after how long a silence the engine counts as gone, and what it had in device and host memory is cleared; 0: "+
			"never. Of --listen without --worker: how long after its connection has ended; 0: 2s")
	f.DurationVar(&r.stopWait, "stop-wait", 5*time.Second,
		"after SIGTERM, how long to wait for the engine's end, which is then recorded: indexers choose the worker no more. "+
			"If the engine runs on, its registration stays for the next shim; 0: do not wait. Of pods: never waited for")
	f.DurationVar(&r.logWindow, "log-repeat", 10*time.Second, "least time between two log lines about the same trouble")
	r.http = httpFlags(f)
	r.traces = cli.TraceFlags(f)
	r.debug = cli.DebugFlag(f)
	return cli.LogFlags(f)
}
