package main

import (
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/guess"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/choose/selection"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/launch"
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
	return cli.Flags{
		cli.Var(&s.Data, "data", "kvatlas-data",
			"folder for the log and the snapshots of the NATS server in this process"),
		cli.Var(&s.NATSListen, "nats-listen", "127.0.0.1:4222",
			"where that server listens; port 0 takes a free one",
			address),
		cli.Var(&s.NATSConfig, "nats-config", "",
			"nats-server configuration file for that server: users, TLS, leaf nodes",
			cli.Valid(func(file string) error { return (&natsserver.Options{ConfigFile: file}).CheckFile() })),
		cli.Var(&s.HTTPListen, "http-listen", "127.0.0.1:8090",
			"where HTTP is served; port 0 takes a free one, empty serves none",
			address),
		cli.Var(&s.MetricsWorkers, "metrics-workers", 0,
			"how many workers have load metrics of their own, the first by name; the rest are added up as other",
			cli.NotNegative[int]()),
		cli.Var(&s.SelectListen, "select-listen", "",
			"where requests are answered as by Dynamo's selection service, which listens on 8092; empty: nowhere",
			address),
		cli.Var(&s.SlotTrackerListen, "slot-tracker-listen", "",
			"where requests are answered as by Dynamo's slot tracker, which listens on 8091; empty: nowhere",
			address),
		cli.Var(&s.ConductorListen, "conductor-listen", "",
			"where requests are answered as by Mooncake's conductor, which listens on 13333; empty: nowhere",
			address),
		cli.Var(&s.GRPCListen, "grpc-listen", "",
			"where gRPC is served, such as 127.0.0.1:9002; empty: nowhere",
			address),
		cli.Var(&s.GRPCInsecure, "grpc-insecure", false,
			"whoever reaches --grpc-listen may have workers chosen without a token: for gateways that cannot send one, such as "+
				"those of an InferencePool. A NetworkPolicy must let only these reach the port"),
		cli.Var(&s.GRPCClientCA, "grpc-client-ca", "",
			"file with the authorities (PEM) of client certificates on --grpc-listen: a gateway with a certificate of theirs "+
				"needs no token (mutual TLS); needs --http-cert and --http-key"),
		cli.Var(&s.Namespace, "namespace", "default",
			"name of the deployment, which has subjects, streams and buckets of its own; several may share NATS servers",
			cli.Valid(jetstream.CheckNamespace)),
		cli.Var(&s.ID, "node-id", "",
			"how this node calls itself (default: the host's name)"),
		cli.Var(&s.Zone, "zone", "",
			"what this node fails together with, such as a rack or an availability zone: a partition's replicas are kept in "+
				"different zones (default: a zone of its own)",
			cli.Valid(cluster.CheckZone)),
		cli.Var(&s.Partitions, "partitions", 0,
			"shares of the log, fixed when the namespace is created (default: what is there, or 8)"),
		cli.Var(&s.RestoreNamespace, "restore-namespace", false,
			"if the namespace's record is missing or unreadable, write it again with the number of partitions that the log's "+
				"streams show; without it such a start is refused (a readable record is never changed)"),
		cli.Var(&s.IndexShards, "index-shards", 0,
			"indexes of this node among which its partitions are dealt out, each with a writer of its own, at most one for each "+
				"partition (default: one for two cores)",
			cli.NotNegative[int]()),
		cli.Var(&s.Replicas, "replicas", 1,
			"copies of streams and buckets on the NATS servers: 1, 3 or 5",
			cli.OneOf("is none of 1, 3, 5", 1, 3, 5)),
		cli.Var(&s.Replication, "replication", 0,
			"with --nats: how many nodes keep each partition; the greatest setting of any node counts "+
				"(default: all, or 2 if there are more than three)",
			cli.NotNegative[int]()),
		cli.Var(&s.Drain, "drain-timeout", 20*time.Second,
			"how long after SIGTERM this node may serve until others have taken over its partitions",
			cli.Positive[time.Duration]()),
		cli.Var(&s.NATSWait, "nats-wait", 30*time.Second,
			"with --nats: how long to wait at the start for a server that is not there yet",
			cli.NotNegative[time.Duration]()),
		cli.Var(&s.SyncInterval, "sync-interval", 0,
			"how long what was acknowledged may wait for the disk; 0 waits for it each time (server in this process)",
			cli.NotNegative[time.Duration]()),
		cli.Var(&s.LogBytes, "log-bytes", 0,
			"bytes that each partition's log may take; beyond, the oldest goes (default: 1 GiB, or less on a small disk)",
			cli.Is(func(n int64) bool { return n == 0 || n >= 1<<20 }, "is less than 1 MiB")),
		cli.Var(&s.LogAge, "log-age", 24*time.Hour,
			"age at which messages leave the log",
			cli.Positive[time.Duration]()),
		cli.Var(&s.SnapshotBytes, "snapshot-bytes", -1,
			"bytes that the snapshot bucket may take; -1 sets no bound"),
		cli.Var(&s.StoreBytes, "store-bytes", 0,
			"bytes that all logs and snapshots of the server in this process may take; beyond, writing waits "+
				"(default: what the disk has)",
			cli.NotNegative[int64]()),
		cli.Var(&s.SnapshotInterval, "snapshot-interval", time.Minute,
			"time between snapshots of a partition that changes; sooner if its log needs room",
			cli.Positive[time.Duration]()),
		cli.Var(&s.SnapshotBlocks, "snapshot-blocks", 2_000_000,
			"blocks stored or removed after which a snapshot is due earlier"),
		cli.Var(&s.Index.MaxPending, "max-pending", radix.DefaultMaxPending,
			"pending blocks of one rank: blocks that wait for their parents; beyond, the oldest are dropped"),
		cli.Var(&s.Index.MaxPendingBytes, "max-pending-bytes", radix.DefaultMaxPendingBytes,
			"memory of one rank's pending blocks, 128 bytes a block and 288 an event; beyond, the oldest are dropped",
			cli.NotNegative[int]()),
		cli.Var(&s.PendingFor, "pending-for", 0,
			"age at which a pending block is dropped; 0: never, it waits until its parent is announced or it is removed",
			cli.NotNegative[time.Duration]()),
		cli.Var(&s.Index.MaxTombstones, "max-tombstones", radix.DefaultMaxTombstones,
			"tombstones of one rank: removals whose place is remembered beyond the message that has them"),
		cli.Var(&s.TombstoneFor, "tombstone-for", time.Duration(radix.DefaultTombstoneFor)*time.Millisecond,
			"how long a tombstone is kept"),
		cli.Var(&s.OnRefused, "on-engine-refused", "clear",
			"of shims in this process: what follows when an engine's connection has ended and its own ports refuse: "+
				"clear or keep; see worker-shim run"),
		cli.Var(&s.Engines.SilentAfter, "engine-silent-after", 10*time.Second,
			"of shims in this process: after how long without a sign of life an engine counts as silent",
			cli.AtLeast(time.Second, "1s")),
		cli.Var(&s.Engines.GoneAfter, "engine-gone-after", 0,
			"of shims in this process: after how long a silence an engine counts as gone, and what it had in device and host "+
				"memory is cleared; 0: never"),
		cli.Var(&s.QueryWorkers, "query-workers", 0,
			"queries over NATS that are answered at once (default: 128, or one for each core if there are more)",
			cli.NotNegative[int]()),
		cli.Var(&s.QueryQueue, "query-queue", 0,
			"queries over NATS that may wait for a worker, 64 MiB of them at most; more are refused as busy "+
				"(default: 512 for each core); over HTTP so many and --query-workers more may be under way",
			cli.NotNegative[int]()),
		cli.Var(&s.ForwardQueries, "forward-queries", true,
			"with several nodes: have a query over NATS finished, and its client answered, by a node that has what this one "+
				"lacks, which saves a message; both nodes must say so"),
		cli.Var(&s.L3Config, "l3-config", "",
			"JSON file with the shared store of each model; it overrides the registrations of workers; "+
				"see docs/l3.md"),
		cli.Var(&s.L3.Timeout, "l3-timeout", 20*time.Millisecond,
			"how long an answer waits for the shared store at most",
			cli.Positive[time.Duration]()),
		cli.Var(&s.L3.Cache.HitLife, "l3-hit-life", 2*time.Second,
			"how long a block that was in the shared store is taken to be there",
			cli.Positive[time.Duration]()),
		cli.Var(&s.L3.Cache.MissLife, "l3-miss-life", 500*time.Millisecond,
			"how long one that was not is taken not to be",
			cli.Positive[time.Duration]()),
		cli.Var(&s.Screen.Folders, "l3-folder", nil,
			"folder of a shared store that registrations may name; may be given again (default: none)"),
		cli.Var(&s.Policy, "policy", selection.DefaultPolicy,
			"how workers are chosen where a request does not say: "+strings.Join(routing.Policies(), ", "),
			cli.OneOf("is none of "+strings.Join(routing.Policies(), ", "), routing.Policies()...)),
		cli.Var(&s.RoutingConfig, "routing-config", "",
			"YAML file with constants of the choice, such as router_temperature: 0.5; see docs/routing-reference.md"),
		cli.Var(&s.Sources.MinTokens, "kv-source-tokens", 0,
			"least number of tokens of a prompt that a worker holds beyond the chosen worker, to be the KV source of the choice: "+
				"the worker from which an engine can fetch blocks (kv_source); 0: choices have no KV source",
			cli.Is(func(n uint32) bool { return n <= api.MaxTokens }, "is more than %d", api.MaxTokens)),
		cli.Var((*string)(&s.Sources.Tiers), "kv-source-tiers", "host",
			"tiers from which engines can send blocks to each other, joined by +: host with vLLM's offloading connector, or "+
				"device+host",
			cli.Valid(func(tiers string) error { _, err := api.Tiers(tiers).List(); return err })),
		cli.Var(&s.TokenizersFile, "tokenizers", "",
			"YAML file that says for each model what makes tokens of prompts and messages; see docs/text.md"),
		cli.Var(&s.RequestTemplates, "request-templates", false,
			"run the chat templates that requests bring (chat_template), in place of the model's own; by default such requests "+
				"are refused, as by vLLM without --trust-request-chat-template"),
		cli.Var(&s.RequestExpiry, "request-expiry", 300*time.Second,
			"time without progress after which a booked request is forgotten; the same on all nodes",
			cli.Positive[time.Duration](),
			cli.Is(func(d time.Duration) bool { return d <= load.MaxExpiry }, "is more than %v", load.MaxExpiry)),
		cli.Var(&s.MaxRequests, "max-requests", load.DefaultRequests,
			"booked requests of one model that may be under way on all nodes together, with 256 blocks each on average; more "+
				"are refused as busy. Each node keeps them all, some 600 bytes and 8 for each block; the same on all nodes",
			cli.Between(1, load.MaxRequests)),
		cli.Var((*string)(&s.Guesses.Policy), "guess-policy", string(guess.TTL),
			"for how long workers registered without events are taken to hold what they were sent: "+
				"ttl, lru (by total_kv_blocks, as an engine evicts) or off"),
		cli.Var(&s.Guesses.TTL, "guess-ttl", 120*time.Second,
			"with ttl: how long after the last request that was sent there with a block",
			cli.Is(func(d time.Duration) bool { return d != 0 },
				"is not positive; --guess-policy off turns guesses off")),
		cli.Var(&s.Guesses.PredictTTL, "predict-ttl", 0,
			"how long a worker with events counts as a holder of the blocks sent to it, until its events announce them; "+
				"such as 5s; 0: not at all"),
		cli.Var(&s.Guesses.MaxBlocks, "guess-max-blocks", 0,
			"blocks of guesses for each model, counted for each rank; beyond, the soonest to expire go "+
				"(default: 2^20, with lru 2^24)"),
		cli.Var(&s.FunnelBlocks, "funnel-blocks", 0,
			"blocks that indexer funnel remembers to name the causes of lost tokens; some 120 bytes each (default: four for "+
				"each block in the index, from 65,536 to 524,288)",
			cli.NotNegative[int]()),
		cli.Var(&s.Recording.On, "record", false,
			"record requests as keyed hashes, with choice, reuse and latency, in a stream of JetStream; see docs/recording.md"),
		cli.Var(&s.Recording.Bytes, "record-bytes", 0,
			"with --record: bytes of the stream; beyond, the oldest records go "+
				"(default: 1 GiB, or an eighth of a small disk; the last started node decides)",
			cli.Is(func(n int64) bool { return n == 0 || n >= 1<<20 }, "is less than 1 MiB")),
		cli.Var(&s.Recording.Age, "record-age", 24*time.Hour,
			"with --record: age at which records go",
			cli.AtLeast(time.Minute, "1m")),
		cli.Var(&s.Recording.Span, "record-span", 512,
			"with --record: tokens of a prompt that one hash stands for; fewer tokens show shorter common prefixes and cost more "+
				"(rounded down to whole blocks, at least one)",
			cli.Between[uint32](1, 1<<20)),
		cli.Var(&s.Guesses.PruneRatio, "guess-prune-ratio", 0.8,
			"share of --guess-max-blocks that is left then"),
	}
}
