package main

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/guess"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/choose/selection"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/fleet/regions"
	"github.com/kvatlas/kvatlas/internal/index/node"
	"github.com/kvatlas/kvatlas/internal/operate/capacity"
	"github.com/kvatlas/kvatlas/internal/operate/tenants"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/launch"
	"github.com/kvatlas/kvatlas/internal/serve/server"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// address checks the address of a port. An empty address is valid.
func address(name, value string) error {
	if _, _, err := net.SplitHostPort(value); err != nil && value != "" {
		return fmt.Errorf("--%s %q is not HOST:PORT", name, value)
	}
	return nil
}

// serveRows returns the table of the flags of serve.
func serveRows(s *launch.Process) cli.Flags {
	return slices.Concat(portRows(s), clusterRows(s), storageRows(s), queryRows(s), choiceRows(s), historyRows(s),
		hotRows(s), tenantRows(s), recordRows(s), regionRows(s))
}

// serveSections returns the sections of the help of serve. The flags of most deployments come first.
func serveSections(s *launch.Process) []cli.Section {
	return []cli.Section{
		{Title: "Important flags", Names: []string{"data", "nats", "nats-creds", "node-id", "namespace", "zone",
			"nats-replicas", "partition-replicas", "http-listen", "http-token-file", "grpc-listen", "tokenizers", "policy",
			"log-level"}},
		{Title: "Ports and access", Names: append(portRows(s).Names(), "http-*", "dial-allow", "debug-listen")},
		{Title: "NATS and nodes", Names: append(clusterRows(s).Names(), "nats-*")},
		{Title: "Log, snapshots and index", Names: storageRows(s).Names()},
		{Title: "Queries, engines and shared stores", Names: append(queryRows(s).Names(), "l3-*")},
		{Title: "Choice of workers", Names: choiceRows(s).Names()},
		{Title: "Analysis of requests", Names: slices.Concat(historyRows(s).Names(), hotRows(s).Names(),
			tenantRows(s).Names(), recordRows(s).Names())},
		{Title: "Regions", Names: regionRows(s).Names()},
		{Title: "Logs and traces", Names: []string{"log-format", "log-level", "otlp-*", "trace-sample"}},
	}
}

// portRows returns the flags of the NATS server in the process and of the ports.
func portRows(s *launch.Process) cli.Flags {
	return cli.Flags{
		cli.Var(&s.Data, "data", "kvatlas-data",
			"folder for the log and the snapshots of the NATS server in this process"),
		cli.Var(&s.NATSListen, "nats-listen", "127.0.0.1:4222",
			"listening address of the embedded server; port 0 chooses a free port",
			address),
		cli.Var(&s.NATSConfig, "nats-config", "",
			"nats-server configuration file of the embedded server: users, TLS, leaf nodes",
			cli.Valid(func(file string) error { return (&natsserver.Options{ConfigFile: file}).CheckFile() })),
		cli.Var(&s.HTTPListen, "http-listen", "127.0.0.1:8090",
			"listening address of HTTP; port 0 chooses a free port, empty: no HTTP",
			address),
		cli.Var(&s.MetricsWorkers, "metrics-workers", 0,
			"number of workers with separate load metrics, the first by name; the rest are added up as other",
			cli.NotNegative[int]()),
		cli.Var(&s.SelectListen, "select-listen", "",
			"listening address of an imitation of Dynamo's selection service (there 8092); empty: none",
			address),
		cli.Var(&s.SlotTrackerListen, "slot-tracker-listen", "",
			"listening address of an imitation of Dynamo's slot tracker (there 8091); empty: none",
			address),
		cli.Var(&s.ConductorListen, "conductor-listen", "",
			"listening address of an imitation of Mooncake's conductor (there 13333); empty: none",
			address),
		cli.Var(&s.GRPCListen, "grpc-listen", "",
			"listening address of gRPC, for example 127.0.0.1:9002; empty: none",
			address),
		cli.Var(&s.GRPCInsecure, "grpc-insecure", false,
			"clients of --grpc-listen may have workers chosen without a token, for gateways without tokens such as "+
				"the gateways of an InferencePool. A NetworkPolicy must restrict the port to the gateways"),
		cli.Var(&s.GRPCClientCA, "grpc-client-ca", "",
			"file with the authorities (PEM) of client certificates on --grpc-listen: a gateway with a certificate of theirs "+
				"needs no token (mutual TLS); needs --http-cert and --http-key"),
		cli.Var(&s.ExternalMetrics.Listen, "external-metrics-listen", "",
			"listening address of Kubernetes' external metrics API, for example 0.0.0.0:6443; needs --http-cert and "+
				"--http-key; see docs/scaling.md; empty: none",
			address),
		cli.Var(&s.ExternalMetricsClientCA, "external-metrics-client-ca", "",
			"file with the authorities (PEM) of the API server's client certificate: requestheader-client-ca-file in the "+
				"ConfigMap kube-system/extension-apiserver-authentication").
			With("--external-metrics-listen", func() bool { return s.ExternalMetrics.Listen != "" }),
		cli.Var(&s.ExternalMetrics.Clients, "external-metrics-client", []string{"front-proxy-client"},
			"permitted common name in the certificate: requestheader-allowed-names in the same ConfigMap; may be given again").
			With("--external-metrics-listen", func() bool { return s.ExternalMetrics.Listen != "" }),
	}
}

// clusterRows returns the flags of the namespace and of the nodes that share it.
func clusterRows(s *launch.Process) cli.Flags {
	return cli.Flags{
		cli.Var(&s.Namespace, "namespace", "default",
			"name of the deployment, with separate subjects, streams and buckets; several may share NATS servers",
			cli.Valid(jetstream.CheckNamespace)),
		cli.Var(&s.ID, "node-id", "",
			"name of this node (default: the host's name)"),
		cli.Var(&s.Zone, "zone", "",
			"failure domain of this node, for example a rack or an availability zone: a partition's replicas are kept in "+
				"different zones (default: a separate zone)",
			cli.Valid(cluster.CheckZone)),
		cli.Var(&s.Partitions, "partitions", 0,
			"shares of the log, fixed at the creation of the namespace (default: the existing number, or 8)"),
		cli.Var(&s.RestoreNamespace, "restore-namespace", false,
			"if the namespace's record is missing or unreadable, write it again with the number of partitions that the log's "+
				"streams show; without the flag, the start fails (a readable record is never changed)"),
		cli.Var(&s.IndexShards, "index-shards", 0,
			"number of indexes for the partitions of this node, with separate writers, at most one per "+
				"partition (default: one per two cores)",
			cli.NotNegative[int]()),
		cli.Var(&s.Replicas, "nats-replicas", 1,
			"number of NATS servers with a copy of each stream and bucket: 1, 3 or 5",
			cli.OneOf("is none of 1, 3, 5", 1, 3, 5)).
			Old("replicas"),
		cli.Var(&s.Replication, "partition-replicas", 0,
			"with --nats: number of nodes with a copy of each partition; the greatest setting of any node counts "+
				"(default: all, or 2 if there are more than three)",
			cli.NotNegative[int]()).
			Old("replication"),
		cli.Var(&s.Drain, "drain-timeout", cluster.DefaultDrain,
			"how long after SIGTERM this node may serve until the cluster has new nodes for all partitions",
			cli.Positive[time.Duration]()),
		cli.Var(&s.NATSWait, "nats-wait", 30*time.Second,
			"with --nats: how long to wait at the start for an absent server",
			cli.NotNegative[time.Duration]()),
	}
}

// storageRows returns the flags of the log, the snapshots and the index.
func storageRows(s *launch.Process) cli.Flags {
	return cli.Flags{
		cli.Var(&s.SyncInterval, "sync-interval", 0,
			"how long an acknowledged write may wait for the disk; 0: the acknowledgement waits for the disk (server in this "+
				"process)", cli.NotNegative[time.Duration]()),
		cli.Var(&s.LogBytes, "log-bytes", 0,
			"limit of bytes of a partition's log; beyond the limit, the oldest messages go (default: 1 GiB, or less on a "+
				"small disk)",
			cli.Is(func(n int64) bool { return n == 0 || n >= 1<<20 }, "is less than 1 MiB")),
		cli.Var(&s.LogAge, "log-age", 24*time.Hour,
			"age of messages at removal from the log",
			cli.Positive[time.Duration]()),
		cli.Var(&s.SnapshotBytes, "snapshot-bytes", -1,
			"limit of bytes of the snapshot bucket; -1: no limit"),
		cli.Var(&s.StoreBytes, "store-bytes", 0,
			"limit of bytes of all logs and snapshots of the server in this process; at the limit, writes wait "+
				"(default: the room on the disk)",
			cli.NotNegative[int64]()),
		cli.Var(&s.SnapshotInterval, "snapshot-interval", time.Minute,
			"time between snapshots of a changing partition; earlier if the log needs room",
			cli.Positive[time.Duration]()),
		cli.Var(&s.SnapshotBlocks, "snapshot-blocks", 2_000_000,
			"number of stored or removed blocks that makes a snapshot due earlier"),
		cli.Var(&s.Index.MaxPending, "max-pending", radix.DefaultMaxPending,
			"limit of a rank's pending blocks, which wait for parents; beyond the limit, the oldest are dropped").
			Old("max-parked"),
		cli.Var(&s.Index.MaxPendingBytes, "max-pending-bytes", radix.DefaultMaxPendingBytes,
			"memory of a rank's pending blocks, 128 bytes a block and 288 an event; beyond the limit, the oldest are dropped",
			cli.NotNegative[int]()),
		cli.Var(&s.PendingFor, "pending-for", 0,
			"age of a pending block at the drop; 0: never, the block waits for the parent or a removal",
			cli.NotNegative[time.Duration]()).
			Old("park-for"),
		cli.Var(&s.Index.MaxTombstones, "max-tombstones", radix.DefaultMaxTombstones,
			"limit of a rank's tombstones: removals with a place in memory beyond the removing message").
			Old("max-remembered"),
		cli.Var(&s.TombstoneFor, "tombstone-for", time.Duration(radix.DefaultTombstoneFor)*time.Millisecond,
			"how long a tombstone is kept").
			Old("remember-for"),
	}
}

// queryRows returns the flags of engines, queries and shared stores.
func queryRows(s *launch.Process) cli.Flags {
	return cli.Flags{
		cli.Var(&s.OnRefused, "on-engine-refused", "clear",
			"of shims in this process: effect of a lost connection with refusing ports of the engine: "+
				"clear or keep; see worker-shim run"),
		cli.Var(&s.Engines.SilentAfter, "engine-silent-after", 10*time.Second,
			"of shims in this process: time without a sign of life after which an engine is silent",
			cli.AtLeast(time.Second, "1s")),
		cli.Var(&s.Engines.GoneAfter, "engine-gone-after", 0,
			"of shims in this process: time of silence after which an engine is gone, and the blocks in device and host "+
				"memory are cleared; 0: never"),
		cli.Var(&s.QueryWorkers, "query-workers", 0,
			"limit of concurrent queries over NATS (default: 128, or the number of cores if greater)",
			cli.NotNegative[int]()),
		cli.Var(&s.QueryQueue, "query-queue", 0,
			"limit of waiting queries over NATS, and at most 64 MiB in all; further queries are refused as busy "+
				"(default: 512 per core); over HTTP, the limit is the sum of this flag and --query-workers",
			cli.NotNegative[int]()),
		cli.Var(&s.ForwardQueries, "forward-queries", true,
			"with several nodes: let a node with the missing partitions finish a query over NATS and answer the client, "+
				"to save a message; both nodes must have the flag"),
		cli.Var(&s.L3Config, "l3-config", "",
			"JSON file with the shared stores, by model, with precedence over the registrations of workers; "+
				"see docs/l3.md"),
		cli.Var(&s.L3.Timeout, "l3-timeout", node.DefaultL3Timeout,
			"how long an answer waits for the shared store at most",
			cli.Positive[time.Duration]()),
		cli.Var(&s.L3.Cache.HitLife, "l3-hit-life", 2*time.Second,
			"how long a node assumes that a found block stays in the shared store",
			cli.Positive[time.Duration]()),
		cli.Var(&s.L3.Cache.MissLife, "l3-miss-life", 500*time.Millisecond,
			"how long a node assumes that a missing block stays absent",
			cli.Positive[time.Duration]()),
		cli.Var(&s.Screen.Folders, "l3-folder", nil,
			"permitted folder of a shared store in registrations; may be given again (default: none)"),
	}
}

// choiceRows returns the flags of choices and bookings.
func choiceRows(s *launch.Process) cli.Flags {
	return cli.Flags{
		cli.Var(&s.Policy, "policy", selection.DefaultPolicy,
			"policy for requests without a policy: "+strings.Join(routing.Policies(), ", "),
			cli.OneOf("is none of "+strings.Join(routing.Policies(), ", "), routing.Policies()...)),
		cli.Var(&s.RoutingConfig, "routing-config", "",
			"YAML file with constants of the choice, for example router_temperature: 0.5; see docs/routing-settings.md"),
		cli.Var(&s.Sources.MinTokens, "kv-source-tokens", 0,
			"least number of tokens of a prompt that a worker holds beyond the chosen worker, to be the KV source of the choice: "+
				"the worker from which an engine can fetch blocks (kv_source); 0: choices have no KV source",
			cli.Is(func(n uint32) bool { return n <= api.MaxTokens }, "is more than %d", api.MaxTokens)),
		cli.Var((*string)(&s.Sources.Tiers), "kv-source-tiers", "host",
			"tiers from which engines can send blocks to each other, joined by +: host with vLLM's offloading connector, or "+
				"device+host",
			cli.Valid(func(tiers string) error { _, err := api.Tiers(tiers).List(); return err })).
			With("--kv-source-tokens", func() bool { return s.Sources.MinTokens > 0 }),
		cli.Var(&s.TokenizersFile, "tokenizers", "",
			"YAML file with the tokenizers of prompts and messages, by model; see docs/text.md"),
		cli.Var(&s.RequestTemplates, "request-templates", false,
			"run the chat templates of requests (chat_template), in place of the model's template; by default the requests "+
				"are refused, as by vLLM without --trust-request-chat-template").
			With("--tokenizers", func() bool { return s.TokenizersFile != "" }),
		cli.Var(&s.ForwardTokens, "forward-tokens", false,
			"over --grpc-listen, send the token ids of a completion to its engine in place of the text, which the engine then need "+
				"not tokenize: for engines of vLLM and SGLang; see docs/gateways.md"),
		cli.Var(&s.GatewayPrefill, "gateway-prefill", server.PrefillBySidecar,
			"over --grpc-listen, how prefill workers get requests: sidecar (llm-d's routing sidecar or Envoy's mirror sends "+
				"them) or vllm (the indexer sends them, and gives kv_transfer_params to the decode worker); see docs/gateways.md",
			cli.OneOf("is neither sidecar nor vllm", server.PrefillBySidecar, server.PrefillByVLLM)),
		cli.Var(&s.GatewayPrefillTimeout, "gateway-prefill-timeout", time.Minute,
			"with --gateway-prefill vllm: longest time of a request to a prefill worker; then the decode worker computes "+
				"the prompt. The gateway must wait longer for the indexer",
			cli.Positive[time.Duration]()),
		cli.Var(&s.RequestExpiry, "request-expiry", load.DefaultExpiry,
			"time without progress after which a booked request is forgotten; the same on all nodes",
			cli.Positive[time.Duration](),
			cli.Is(func(d time.Duration) bool { return d <= load.MaxExpiry }, "is more than %v", load.MaxExpiry)),
		cli.Var(&s.MaxRequests, "max-requests", load.DefaultRequests,
			"limit of booked requests of a model on all nodes together, with 256 blocks on average; further requests "+
				"are refused as busy. Every node keeps all bookings, some 600 bytes and 8 per block; the same on all nodes",
			cli.Between(1, load.MaxRequests)),
		cli.Var((*string)(&s.Guesses.Policy), "guess-policy", string(guess.TTL),
			"how long workers registered without events count as holders of the blocks sent to them: "+
				"ttl, lru (by total_kv_blocks, as an engine evicts) or off"),
		cli.Var(&s.Guesses.TTL, "guess-ttl", 120*time.Second,
			"with ttl: the time after the last request with a block",
			cli.Is(func(d time.Duration) bool { return d != 0 },
				"is not positive; --guess-policy off turns guesses off")),
		cli.Var(&s.Guesses.PredictTTL, "predict-ttl", 0,
			"how long a worker with events counts as a holder of the sent blocks, until events announce the blocks; "+
				"for example 5s; 0: not at all"),
		cli.Var(&s.Guesses.MaxBlocks, "guess-max-blocks", 0,
			"limit of guessed blocks of a model, counted per rank; beyond the limit, the soonest to expire go "+
				"(default: 2^20, with lru 2^24)"),
		cli.Var(&s.Guesses.PruneRatio, "guess-prune-ratio", 0.8,
			"remaining share of --guess-max-blocks afterwards"),
	}
}

// historyRows returns the flags of recent requests.
func historyRows(s *launch.Process) cli.Flags {
	return cli.Flags{
		cli.Var(&s.FunnelBlocks, "funnel-blocks", 0,
			"number of blocks in memory for the causes of lost tokens in indexer funnel; some 120 bytes a block (default: "+
				"four per "+
				"block in the index, from 65,536 to 524,288)",
			cli.NotNegative[int]()),
		cli.Var(&s.CapacityRefs, "capacity-samples", capacity.MaxSamples,
			"limit of sampled references to blocks in memory, for indexer capacity: 32 bytes each, for each model; fewer make "+
				"the curves less exact. 0: no curves",
			cli.Between(0, capacity.MaxSamples)),
	}
}

// hotRows returns the flags of hot prefixes.
func hotRows(s *launch.Process) cli.Flags {
	return cli.Flags{
		cli.Var(&s.Hot.Entries, "hot-prefixes", 0,
			"counted prefixes of each model, for indexer prefixes hot, 200 bytes each (default: 0, none; with --warm-up 1,024)",
			cli.Between(0, 1<<16)),
		cli.Var(&s.Hot.PerMinute, "warm-up", 0,
			"most copies of hot prefixes in a minute that nodes make on further workers; see docs/hot-prefixes.md. 0: none",
			cli.Between(0, 1000)),
		cli.Var(&s.Hot.PromptBytes, "warm-up-memory", 0,
			"bytes of memory for the tokens of hot prefixes, for copies (default: 0, with --warm-up 64 MiB)",
			cli.NotNegative[int]()).
			With("--hot-prefixes or --warm-up", func() bool { return s.Hot.Entries > 0 || s.Hot.PerMinute > 0 }),
	}
}

// tenantRows returns the flags of tenants.
func tenantRows(s *launch.Process) cli.Flags {
	attributed := func() bool { return len(s.Attribution.Sources) > 0 }
	return cli.Flags{
		cli.Var(&s.Attribution.Sources, "tenants", nil,
			"sources of the tenants in indexer tenants; the first with a value counts: salt, adapter, api-key (always hashed) "+
				"or header=NAME; may be given again; the same on all nodes (default: none)",
			cli.Valid(tenants.CheckSources)),
		cli.Var(&s.Attribution.Limit, "tenant-limit", 1000,
			"with --tenants: number of tenants with separate sums; a new tenant beyond replaces the "+
				"smallest, and the replaced tokens count as other",
			cli.Between(1, api.MaxTenants)).
			With("--tenants", attributed),
		cli.Var(&s.Attribution.Hashed, "tenant-hash", false,
			"with --tenants: hash the names of all tenants with a key of the namespace; the same on all nodes").
			With("--tenants", attributed),
		cli.Var(&s.Attribution.Metrics, "metrics-tenants", 0,
			"with --tenants: number of tenants with separate series in the metrics, in the order of their first requests; the "+
				"rest are added up as other",
			cli.Between(0, api.MaxTenants)).
			With("--tenants", attributed),
		cli.Var(&s.QuotasFile, "tenant-quotas", "",
			"with --tenants: YAML file with tokens per minute of tenants; see docs/tenants.md; the same on all nodes").
			With("--tenants", attributed),
	}
}

// regionRows returns the flags of regions.
func regionRows(s *launch.Process) cli.Flags {
	regional := func() bool { return s.Regions.Name != "" }
	return cli.Flags{
		cli.Var(&s.Regions.Name, "region", "",
			"name of this node's region: exchange digests of blocks with other regions, for find and select with regions; "+
				"the same on all nodes of a cluster; see docs/regions.md. Empty: no exchange",
			cli.Is(func(name string) bool { return name == "" || regions.CheckName(name) == nil },
				"does not have 1 to 32 of a-z, 0-9 and '-', first a letter or digit")),
		cli.Var(&s.Regions.Prices, "region-price", nil,
			"REGION=MS: milliseconds that a request in another region adds to the time to first token; answers report the "+
				"price, and list the region also without a digest; may be given again",
			cli.Valid(func(list []string) error {
				_, err := regions.ParsePrices(list)
				return err
			})).
			With("--region", regional),
		cli.Var(&s.Regions.DigestBytes, "region-digest-bytes", 1<<20,
			"bytes of this node's digest, about 9 bits a block; beyond, runs with few blocks and holders are left out",
			cli.Between(1<<10, regions.MaxDigestBytes)).
			With("--region", regional),
		cli.Var(&s.Regions.Interval, "region-interval", 10*time.Second,
			"time between digests of this node; longer if a digest takes more than a twentieth of it",
			cli.AtLeast(100*time.Millisecond, "100ms")).
			With("--region", regional),
		cli.Var(&s.Regions.MaxAge, "region-max-age", time.Minute,
			"age after which a digest of another region counts as unknown",
			cli.AtLeast(time.Second, "1s")).
			With("--region", regional),
	}
}

// recordRows returns the flags of the recording of requests.
func recordRows(s *launch.Process) cli.Flags {
	recorded := func() bool { return s.Recording.On }
	return cli.Flags{
		cli.Var(&s.Recording.On, "record", false,
			"record requests as keyed hashes, with choice, reuse and latency, in a stream of JetStream; see docs/recording.md"),
		cli.Var(&s.Recording.Bytes, "record-bytes", 0,
			"with --record: bytes of the stream; beyond, the oldest records go "+
				"(default: 1 GiB, or an eighth of a small disk; the last started node decides)",
			cli.Is(func(n int64) bool { return n == 0 || n >= 1<<20 }, "is less than 1 MiB")).
			With("--record", recorded),
		cli.Var(&s.Recording.Age, "record-age", 24*time.Hour,
			"with --record: age at which records go",
			cli.AtLeast(time.Minute, "1m")).
			With("--record", recorded),
		cli.Var(&s.Recording.Span, "record-span", 512,
			"with --record: tokens of a prompt that one hash stands for; fewer tokens show shorter common prefixes and cost more "+
				"(rounded down to whole blocks, at least one)",
			cli.Between[uint32](1, 1<<20)).
			With("--record", recorded),
	}
}
