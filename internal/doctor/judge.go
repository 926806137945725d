package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/control"
	"github.com/kvatlas/kvatlas/internal/enginehttp"
	"github.com/kvatlas/kvatlas/internal/escape"
	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// What is too much.
const (
	farAway   = 50 * time.Millisecond // to NATS and back
	clockOff  = 2 * time.Second       // a clock that differs by more is found; by twice a usual lease's beat
	clockBad  = 30 * time.Second      // longer than a usual lease
	nearlyAll = 0.9                   // of a limit
	buckets   = 4                     // of a namespace
)

const natsFlag = "give --nats (or NATS_URL) the address of the NATS servers"

func judgeNATS(f *Facts) (list []Finding) {
	if err := f.ConnectError; err != nil {
		found := Finding{Error, "", natsUnreachable, f.Shown, "NATS is not reached", err.Error(),
			"start `indexer serve --data DIR`, or nats-server -js, there; or " + natsFlag}
		if errors.Is(err, jetstream.ErrDenied) {
			found.ID, found.What, found.Remedy = natsRefused, "NATS refuses this user",
				"give --nats-creds, --nats-nkey, or --nats-user with NATS_PASSWORD; "+
					"indexer auth example prints what each user needs"
		}
		return []Finding{found}
	}
	s := &f.Server
	if s.MaxPayload < jetstream.MessageRoom {
		list = append(list, Finding{Error, "", natsPayload, s.Name, "messages have no room for an indexer's snapshots",
			fmt.Sprintf("max_payload is %d bytes, an indexer needs %d", s.MaxPayload, jetstream.MessageRoom),
			fmt.Sprintf("set max_payload: %d or more in the configuration of each NATS server "+
				"(1048576 is its default), and reload", jetstream.MessageRoom)})
	}
	if s.RoundTrip > farAway {
		list = append(list, Finding{Warning, "", natsFar, s.Name, "NATS is far away from this host",
			fmt.Sprintf("a round trip takes %v", s.RoundTrip.Round(time.Millisecond)),
			"if indexers and shims are as far: " + natsFlag + " in their own site; each event and each answer over NATS " +
				"waits that long"})
	}
	return list
}

func judgeJetStream(f *Facts) (list []Finding) {
	where := f.Server.Name
	switch err := f.AccountError; {
	case errors.Is(err, jetstream.ErrNoJetStream):
		return []Finding{{Error, "", jetStreamOff, where, "there is no JetStream for this account", err.Error(),
			"start nats-server with -js (or jetstream {} in its configuration), and say jetstream: enabled in the account"}}
	case err != nil:
		return []Finding{{Error, "", jetStreamDown, where, "JetStream does not answer", err.Error(),
			"start the NATS servers that are away: more than half of those with JetStream must be up"}}
	}
	a := &f.Account
	if a.Level < jetstream.BatchLevel {
		list = append(list, Finding{Warning, "", jetStreamOld, where, "NATS has no atomic batches",
			fmt.Sprintf("nats-server %s has API level %d, batches begin with %d", f.Server.Version, a.Level,
				jetstream.BatchLevel),
			"run nats-server 2.12 or later on all servers, then restart shims and indexers: " +
				"events are published one by one till then"})
	}
	if a.MaxStorage > 0 && float64(a.Storage) >= nearlyAll*float64(a.MaxStorage) {
		severity := Warning
		if a.Storage >= a.MaxStorage {
			severity = Error
		}
		list = append(list, Finding{severity, "", jetStreamStorage, where, "the account's storage is nearly used up",
			fmt.Sprintf("%d of %d bytes", a.Storage, a.MaxStorage),
			"raise max_file of the account (of the server in an indexer: --store-bytes), or keep less: --log-bytes"})
	}
	return list
}

func judgeNamespace(f *Facts) (list []Finding) {
	record, lost := errors.AsType[*jetstream.RecordError](f.OpenError)
	switch err := f.OpenError; {
	case lost:
		return []Finding{{Error, "", namespaceRecord, f.Namespace, "the namespace's record is missing or unreadable",
			record.Error(), "start one indexer with --restore-namespace: it derives the record from the log's streams"}}
	case errors.Is(err, jetstream.ErrNoNamespace):
		return []Finding{{Error, "", namespaceMissing, f.Namespace, "no indexer has made the namespace", err.Error(),
			"start indexer serve --namespace " + escape.Shell(f.Namespace) + ", or give the right one with --namespace"}}
	case err != nil:
		return []Finding{{Error, "", namespaceVersion, f.Namespace, "the namespace's record is not for this version",
			err.Error(), "use the indexer of the version that runs there"}}
	}
	if need := int(f.Partitions) + buckets; f.Account.MaxStreams > 0 && f.Account.MaxStreams < need {
		list = append(list, Finding{Error, "", namespaceStreams, f.Namespace, "the account has no room for all streams",
			fmt.Sprintf("max_streams is %d, %d partitions and %d buckets need %d", f.Account.MaxStreams, f.Partitions,
				buckets, need),
			fmt.Sprintf("set max_streams: %d or more for the account, or -1", need)})
	}
	return list
}

func judgeStreams(f *Facts) (list []Finding) {
	for i := range f.Streams {
		s := &f.Streams[i]
		found := func(id Fault, severity Severity, what, evidence, remedy string) {
			list = append(list, Finding{severity, "", id, s.Name, what, evidence, remedy})
		}
		kind := "the log of a partition"
		if s.Bucket != "" {
			kind = "the bucket of " + s.Usage
		}
		if s.Err != nil {
			found(streamMissing, Error, kind+" is missing", s.Err.Error(),
				"see that an indexer serves this namespace: it makes what is missing within seconds")
			continue
		}
		if len(s.Odd) > 0 {
			remedy := "stop the indexers, delete it with nats stream rm " + escape.Shell(s.Name) + ", start them: they make " +
				"it anew, and shims repeat what engines hold"
			if s.Bucket != "" {
				remedy = "stop the indexers, delete it with nats kv del " + escape.Shell(s.Bucket) + ", and start them: " +
					"they make it anew"
			}
			found(streamChanged, Error, "somebody has changed "+kind+": events could be lost unseen",
				strings.Join(s.Odd, "; "), remedy)
		}
		if s.Refused != nil && errors.Is(s.Refused, jetstream.ErrFull) {
			found(streamUnwritable, Error, kind+" takes no writes", s.Refused.Error(),
				"make room on the disk of NATS server "+s.Server+", then restart that server: it takes nothing more until then")
		}
		if !s.Direct {
			found(streamNoDirect, Warning, kind+" allows no direct gets", "allow_direct is off",
				"restart an indexer: it turns that on")
		}
		if s.Rollups {
			found(streamRollups, Warning, kind+" allows rollups: a message on one key can remove all others",
				"allow_rollup_hdrs is on", "restart an indexer: it turns that off")
		}
		if !s.Batches && f.Account.Level >= jetstream.BatchLevel {
			found(streamNoBatches, Warning, kind+" takes no atomic batches", "allow_atomic is off, and the server has them",
				"restart an indexer: it turns that on")
		}
		if len(s.Behind) > 0 {
			found(streamBehind, Warning, kind+" has replicas that are away or behind", strings.Join(s.Behind, ", "),
				"start these NATS servers, or wait until they have caught up: another loss could stop the log")
		}
		if s.Bucket != "" && s.MaxBytes > 0 && float64(s.Bytes) >= nearlyAll*float64(s.MaxBytes) {
			found(bucketFull, Error, kind+" is full", fmt.Sprintf("%d of %d bytes", s.Bytes, s.MaxBytes),
				"raise --snapshot-bytes of the indexers")
		}
	}
	if servers := oddReplicas(f.Streams); servers != "" {
		list = append(list, Finding{Warning, "", streamReplicas, f.Namespace, "streams have different numbers of replicas",
			servers, "start an indexer with --replicas N: it gives all streams as many"})
	}
	return list
}

// oddReplicas says how many streams have how many replicas, if that differs.
func oddReplicas(streams []jetstream.StreamState) string {
	counts := map[int]int{}
	for i := range streams {
		if streams[i].Err == nil {
			counts[streams[i].Replicas]++
		}
	}
	if len(counts) < 2 {
		return ""
	}
	var said []string
	for _, n := range slices.Sorted(maps.Keys(counts)) {
		said = append(said, fmt.Sprintf("%s with %d", plural(counts[n], "stream"), n))
	}
	return strings.Join(said, ", ")
}

// whatToDo parts a problem, as a status has it, from its remedy.
func whatToDo(problem, otherwise string) (what, remedy string) {
	if what, remedy, ok := strings.Cut(problem, "; what to do: "); ok {
		return what, remedy
	}
	return problem, otherwise
}

func judgeNodes(f *Facts) (list []Finding) {
	if f.NodesError != nil {
		return []Finding{{Error, "", nodeNone, f.Namespace, "no indexer node answers", f.NodesError.Error(),
			"start indexer serve" + namespaceFlag(f.Namespace) + " with the same --nats"}}
	}
	versions := map[string][]string{}
	unserved := map[events.Partition]bool{}
	for _, n := range f.Nodes.Nodes {
		where := "node " + n.Node
		if n.Status == nil {
			list = append(list, Finding{Error, "", nodeSilent, where, "the node does not answer", n.Error,
				"start indexer serve --node-id " + escape.Shell(n.Node) + " again, with its --data; a node that is gone for " +
					"good is forgotten ten minutes after its end"})
			continue
		}
		s := n.Status
		versions[s.Version] = append(versions[s.Version], n.Node)
		if !s.Ready {
			list = append(list, Finding{Error, "", nodeNotReady, where, "the node is not ready",
				"it restores, or catches up with the log",
				"wait; indexer status --node " + escape.Shell(n.Node) + " shows how far it is"})
		}
		quiet := map[string]bool{}
		for i := range s.QuietSources {
			q := &s.QuietSources[i]
			quiet[q.Line()] = true
			list = append(list, judgeSource(q))
		}
		for _, p := range s.Problems {
			if saidElsewhere(p) || quiet[p] {
				continue
			}
			what, remedy := whatToDo(p, "see indexer status --node "+escape.Shell(n.Node))
			list = append(list, Finding{Error, "", nodeProblem, where, "the node reports a problem", what, remedy})
		}
		for _, p := range s.Warnings {
			if strings.HasPrefix(p, registry.QuietWarning) || quiet[p] {
				continue // judgeWorkers reports each engine, judgeSource each source
			}
			what, remedy := whatToDo(p, "see indexer status --node "+n.Node)
			list = append(list, Finding{Warning, "", nodeWarning, where, "the node warns", what, remedy})
		}
		list = append(list, judgeClaims(s.Claims)...)
		if s.Cluster != nil {
			for _, p := range s.Cluster.Unserved {
				unserved[p] = true
			}
		}
	}
	if len(unserved) > 0 {
		parts := slices.Sorted(maps.Keys(unserved))
		list = append(list, Finding{Error, "", partitionsUnserved, f.Namespace, "partitions are served by no node",
			fmt.Sprint("partitions ", parts), "start more nodes, or those that are gone: indexer cluster shows who serves what"})
	}
	if len(versions) > 1 {
		var said []string
		for _, v := range slices.Sorted(maps.Keys(versions)) {
			said = append(said, v+": "+registry.First(versions[v]))
		}
		list = append(list, Finding{Warning, "", nodeVersions, f.Namespace, "nodes are of different versions",
			strings.Join(said, "; "), "end the upgrade: restart the nodes of the older version with the newer program"})
	}
	for _, n := range f.Nodes.Nodes {
		if n.Status != nil && n.Status.Cluster != nil {
			return append(list, judgeZones(f.Namespace, n.Status.Cluster)...) // any node knows all others
		}
	}
	return list
}

// judgeClaims finds workers that a node ignores under a model that they have not claimed. One node reports a rank.
func judgeClaims(c *api.ClaimStatus) (list []Finding) {
	if c == nil {
		return nil
	}
	for _, u := range c.Unclaimed {
		what := "the worker has not claimed the model that it names: its lease is ignored"
		if !u.Lease {
			what = "the worker has not claimed the model that it names: answers leave out the blocks that it announces"
		}
		list = append(list, Finding{Error, "", modelUnclaimed, events.RankKey{Instance: u.Instance, Rank: u.Rank}.String(),
			what, fmt.Sprintf("model %q, and the NATS user of the indexers requires model claims", u.Model),
			registry.ClaimRemedy})
	}
	return list
}

// judgeZones finds partitions whose ready replicas could be in more zones, if nodes say zones.
func judgeZones(namespace string, c *api.ClusterStatus) (list []Finding) {
	zones, without := map[string]bool{}, []string(nil)
	replicas, of := map[events.Partition]int{}, map[events.Partition]map[string]bool{}
	for _, n := range c.Nodes {
		zone := n.Zone
		if zone == "" {
			without, zone = append(without, n.Node), "node "+n.Node
		}
		zones[zone] = true
		for _, p := range n.Ready {
			if replicas[p]++; of[p] == nil {
				of[p] = map[string]bool{}
			}
			of[p][zone] = true
		}
	}
	if len(without) == len(c.Nodes) {
		return nil
	}
	if len(without) > 0 {
		list = append(list, Finding{Warning, "", nodeZone, namespace, "nodes say no zone, while others do",
			registry.First(without), "restart them with --zone: each counts as a zone of its own"})
	}
	var shared []events.Partition
	for p, in := range of {
		if replicas[p] >= c.Copies && len(in) < min(c.Copies, len(zones)) {
			shared = append(shared, p)
		}
	}
	if len(shared) > 0 {
		slices.Sort(shared)
		list = append(list, Finding{Warning, "", zoneShared, namespace, "partitions have replicas in one zone",
			fmt.Sprint("partitions ", shared), "wait until they have moved; nodes of earlier versions know no zones: " +
				"upgrade them"})
	}
	return list
}

// saidElsewhere reports whether a node's problem is of engines or claims: those are judged one by one.
func saidElsewhere(problem string) bool {
	return strings.HasPrefix(problem, registry.UnclaimedProblem) ||
		strings.HasPrefix(problem, "engines of ") || strings.HasPrefix(problem, "what engines of ") ||
		strings.HasPrefix(problem, "the log takes nothing from the shims of ")
}

func namespaceFlag(ns string) string {
	if ns == "default" {
		return ""
	}
	return " --namespace " + escape.Shell(ns)
}

func judgeClocks(f *Facts) (list []Finding) {
	for _, c := range f.Clocks {
		off, way := c.Ahead, "ahead of"
		if off < 0 {
			off, way = -off, "behind"
		}
		if off < clockOff {
			continue
		}
		severity := Warning
		if off >= clockBad {
			severity = Error
		}
		list = append(list, Finding{severity, "", clockOffset, c.Of, "clocks differ",
			fmt.Sprintf("its clock is at least %v %s this host's", off.Round(time.Millisecond), way),
			"run chrony or systemd-timesyncd (timedatectl set-ntp true) on both hosts; ages, leases and times of " +
				"snapshots are shown wrong till then"})
	}
	return list
}

func judgeReplicas(f *Facts) (list []Finding) {
	for i := range f.Replicas {
		r := &f.Replicas[i]
		if r.Equal {
			continue
		}
		var said []string
		sums := map[string]bool{}
		for _, c := range r.Replicas {
			sums[c.Checksum] = true
			said = append(said, fmt.Sprintf("%s has %s at %d", c.Node, c.Checksum, c.Seq))
		}
		found := Finding{Error, "", replicasUnequal, fmt.Sprintf("partition %d", r.Partition), "replicas are not equal",
			strings.Join(said, ", "),
			"restart the node that differs from the others, which reads the partition anew; then indexer status --verify. " +
				"Please report it with indexer dump of both: it is a bug"}
		if slices.ContainsFunc(r.Replicas, func(c api.ReplicaSum) bool { return c.Seq != r.Replicas[0].Seq }) {
			found.ID, found.Severity, found.What = replicasApart, Warning, "replicas did not come to one place in the log"
			found.Remedy = "run indexer doctor again; if it stays, see the node's LAG in indexer status"
		}
		list = append(list, found)
	}
	return list
}

func judgeWorkers(f *Facts) (list []Finding) {
	l := f.Workers
	if !l.Complete {
		list = append(list, Finding{Error, "", workersMissing, f.Namespace, "answers lack workers",
			fmt.Sprint("partitions ", l.Missing, " could not be looked at"), "see indexer cluster and indexer status"})
	}
	for i := range l.Expired {
		w := &l.Expired[i]
		list = append(list, Finding{Warning, "", workerExpired, fmt.Sprintf("%s/%d", w.Instance, w.Rank),
			"the worker's lease has expired: what it held is cleared, and it is not chosen",
			fmt.Sprintf("process %d on %s renewed it last at %s", w.Lease.PID, w.Lease.Host,
				w.Lease.Renewed.UTC().Format(time.RFC3339)),
			"start its worker-shim on " + w.Lease.Host + " again; if it is gone for good: indexer workers remove " +
				escape.Operand(string(w.Instance))})
	}
	if len(l.Workers) == 0 {
		return append(list, Finding{Warning, "", workerNone, f.Namespace, "no worker is known",
			"no shim has announced anything",
			"run worker-shim run beside each engine" + namespaceFlag(f.Namespace) + "; docs/engines has a page for each"})
	}
	for i := range l.Workers {
		w := &l.Workers[i]
		found := func(id Fault, severity Severity, what, evidence, remedy string) {
			list = append(list, Finding{severity, "", id, fmt.Sprintf("%s/%d", w.Instance, w.Rank), what, evidence, remedy})
		}
		blocks := fmt.Sprintf("it is credited with %d blocks", w.Blocks.Device+w.Blocks.Host+w.Blocks.Disk+w.Blocks.External)
		noEvents := w.Record != nil && w.Record.Events == api.EventsNone
		switch {
		case noEvents:
			continue
		case w.Lease == nil:
			found(leaseNone, Warning, "nobody holds a lease on the rank: it is not cleared when it is gone", blocks,
				fmt.Sprintf("run its worker-shim, with a NATS user that may write leases (indexer auth example); "+
					"or clear it: indexer forget %s", escape.Operand(string(w.Instance))))
		case w.Lease.State == string(registry.Expired):
			found(leaseExpired, Error, "the lease has expired",
				fmt.Sprintf("process %d on %s renewed it at %s",
					w.Lease.PID, w.Lease.Host, w.Lease.Renewed.UTC().Format(time.RFC3339)),
				fmt.Sprintf("start its worker-shim on %s again, or forget it: indexer forget %s", w.Lease.Host,
					escape.Operand(string(w.Instance))))
		}
		since := ""
		if w.EngineSince != nil {
			since = "since " + w.EngineSince.UTC().Format(time.RFC3339) + ": "
		}
		switch w.Engine {
		case api.EngineSilent:
			found(engineSilent, Error, "the engine does not answer its shim", since+w.EngineWhy+"; "+blocks,
				"see whether its process hangs, and restart it; worker-shim run --engine-gone-after 1m "+
					"has such an engine cleared by itself")
		case api.EngineGone:
			found(engineGone, Warning, "the engine has ended", since+w.EngineWhy,
				"start it again, or stop its worker-shim too")
		}
		if w.Engine == api.EngineConnected && w.Lease != nil && w.Stored == 0 && w.Blocks == (api.TierCounts{}) {
			found(engineQuiet, Warning, "the engine is connected and has announced no block", "no stored event since it began",
				`send it a prompt longer than a block; if nothing comes: vllm serve --kv-events-config `+
					`'{"enable_kv_cache_events":true,"publisher":"zmq"}' `+
					"with prefix caching on, for SGLang without --disable-radix-cache; and worker-shim run without --topic")
		}
		if w.Record != nil && w.Record.State == api.WorkerIncomplete {
			found(workerIncomplete, Error, "the worker may not be chosen", strings.Join(w.Record.Reasons, "; "),
				"give its worker-shim the flags that are missing, or indexer workers change "+escape.Operand(string(w.Instance)))
		}
	}
	return list
}

func judgeModels(f *Facts) (list []Finding) {
	sizes := map[string]map[uint32][]string{}
	for i := range f.Workers.Workers {
		w := &f.Workers.Workers[i]
		if sizes[w.Model] == nil {
			sizes[w.Model] = map[uint32][]string{}
		}
		sizes[w.Model][w.BlockSize] = append(sizes[w.Model][w.BlockSize], fmt.Sprintf("%s/%d", w.Instance, w.Rank))
	}
	for _, model := range slices.Sorted(maps.Keys(sizes)) {
		if of := sizes[model]; len(of) > 1 {
			var said []string
			for _, size := range slices.Sorted(maps.Keys(of)) {
				said = append(said, fmt.Sprintf("%d tokens: %s", size, registry.First(of[size])))
			}
			list = append(list, Finding{Error, "", blockSizes, "model " + model,
				"the model's workers have different block sizes",
				strings.Join(said, "; "),
				"start the engines with one size (vLLM: --block-size, SGLang: --page-size) and their worker-shim with the same " +
					"--block-size; or give each size a model name of its own: --model"})
		}
	}
	return append(list, judgeHashes(f.Records)...)
}

// judgeHashes finds workers of one model and store that would never find each other's objects.
func judgeHashes(records []registry.Record) (list []Finding) {
	type place struct{ model, store string }
	type named struct {
		identity, config string
		ranks            []string
	}
	stores := map[place][]*named{}
	for i := range records {
		r := &records[i]
		if r.L3 == nil || r.L3.Check() != nil {
			continue
		}
		rank := r.Key().String()
		name, err := sampleName(r.L3)
		why := r.L3.Usable(r.BlockSize)
		if err != nil {
			why = err.Error()
		}
		if why != "" {
			list = append(list, Finding{Error, "", storeUncredited, rank,
				"nothing of the shared store can be credited to the worker", why,
				hashRemedy})
			continue
		}
		at := place{r.Model, r.L3.Where()}
		i := slices.IndexFunc(stores[at], func(n *named) bool { return n.identity == name })
		if i < 0 {
			i = len(stores[at])
			stores[at] = append(stores[at], &named{identity: name, config: naming(r.L3)})
		}
		stores[at][i].ranks = append(stores[at][i].ranks, rank)
	}
	for _, at := range slices.SortedFunc(maps.Keys(stores), func(a, b place) int {
		return cmp.Or(strings.Compare(a.model, b.model), strings.Compare(a.store, b.store))
	}) {
		if len(stores[at]) < 2 {
			continue
		}
		var said []string
		for _, n := range stores[at] {
			said = append(said, fmt.Sprintf("%s: %s", n.config, registry.First(n.ranks)))
		}
		list = append(list, Finding{Error, "", storeNames, "model " + at.model,
			"workers call the same blocks differently in store " + at.store + ", so that none finds another's",
			strings.Join(said, "; "), hashRemedy})
	}
	return list
}

// sampleName is what a sample prompt is called in the store: workers that call it differently never match.
func sampleName(c *hicache.Config) (string, error) {
	if c.VLLM == nil {
		return c.Identity(), nil
	}
	names, err := c.VLLM.Digests(nil, make([]uint32, 2*c.VLLM.HashBlockSize+c.VLLM.HashLookahead), "", "")
	return fmt.Sprintf("%s %x", c.Identity(), names), err
}

const hashRemedy = "start all engines of the model with one PYTHONHASHSEED, one --prefix-caching-hash-algo and " +
	"one release, and say so in worker-shim run --l3-config (hash_seed, hash_algo, engine_version)"

// naming says on what names in a store depend.
func naming(c *hicache.Config) string {
	switch {
	case c.VLLM != nil:
		seed := "no hash_seed"
		if c.VLLM.HashSeed != nil {
			seed = "hash_seed " + *c.VLLM.HashSeed
		}
		return fmt.Sprintf("%s, hash_algo %s, vLLM %s, blocks of %d", seed, cmp.Or(c.VLLM.HashAlgo, "sha256"),
			cmp.Or(c.VLLM.EngineVersion, "unknown"), c.VLLM.HashBlockSize)
	case c.SGLang != nil:
		return fmt.Sprintf("pages of %d, tp_size %d, namespaces %s, tag %q, SGLang %s", c.SGLang.PageSize, c.SGLang.TPSize,
			cmp.Or(c.SGLang.Namespaces, "by release"), c.SGLang.ExtraBackendTag, cmp.Or(c.SGLang.EngineVersion, "unknown"))
	}
	return "no store"
}

func judgeShims(f *Facts) (list []Finding) {
	answered := map[events.RankKey]bool{}
	slices.SortFunc(f.Shims, func(a, b control.Shim) int { return a.Key().Compare(b.Key()) })
	for i := range f.Shims {
		answered[f.Shims[i].Key()] = true
		list = append(list, judgeShim(&f.Shims[i])...)
	}
	if f.Workers == nil {
		return list
	}
	for i := range f.Workers.Workers {
		w := &f.Workers.Workers[i]
		key := events.RankKey{Instance: w.Instance, Rank: w.Rank}
		if w.Lease == nil || w.Lease.State != string(registry.Held) || answered[key] {
			continue
		}
		if w.Lease.Stopped != nil {
			list = append(list, Finding{Warning, "", shimStopped, key.String(), "the shim was stopped while its engine ran",
				fmt.Sprintf("process %d on %s stopped at %s; what the engine announces is not known until a shim runs again",
					w.Lease.PID, w.Lease.Host, w.Lease.Stopped.UTC().Format(time.RFC3339)),
				fmt.Sprintf("start its worker-shim again before the lease expires at %s; then the rank is cleared",
					w.Lease.Expires.UTC().Format(time.RFC3339))})
			continue
		}
		list = append(list, Finding{Warning, "", shimSilent, key.String(), "the shim has a lease and does not answer",
			fmt.Sprintf("process %d on %s renewed the lease at %s; nothing within two seconds on the control subject",
				w.Lease.PID, w.Lease.Host, w.Lease.Renewed.UTC().Format(time.RFC3339)),
			"see that its process runs and does not hang, and that its NATS user may subscribe to the control subjects: " +
				"indexer auth example --shim " + escape.Shell(string(w.Instance))})
	}
	for _, r := range f.Records {
		if r.Shim != nil && r.Shim.Unusable != "" {
			what, remedy := whatToDo(r.Shim.Unusable, "see its log")
			list = append(list, Finding{Error, "", engineUnusable, r.Key().String(),
				"what the engine announces is passed over", what, remedy})
		}
		if r.Shim != nil && r.Shim.Several != "" {
			what, remedy := whatToDo(r.Shim.Several, "see its log")
			list = append(list, Finding{Error, "", severalEngines, r.Key().String(),
				"several engines publish to one shim", what, remedy})
		}
	}
	return list
}

func judgeShim(s *control.Shim) (list []Finding) {
	where := s.Key().String()
	found := func(id Fault, severity Severity, what, evidence, remedy string) {
		list = append(list, Finding{severity, "", id, where, what, evidence, remedy})
	}
	if w := s.Waiting; w != nil {
		found(shimWaiting, Error, "the log takes nothing from the shim",
			fmt.Sprintf("since %s: %s",
				w.Since.UTC().Format(time.RFC3339), w.Why), w.Do)
	}
	if !s.Replay && s.Endpoint != "" { // where an engine is heard otherwise, no flag mends it
		found(shimNoReplay, Warning, "the shim has no replay endpoint: what the engine said before is not known, "+
			"and each gap clears the rank",
			fmt.Sprint(s), `start the engine with "replay_endpoint":"tcp://*:5657" in --kv-events-config, and give `+
				"worker-shim run --replay tcp://HOST:5657")
	}
	h := s.Heard
	if h == nil {
		return list
	}
	if h.ReplayFailed != "" {
		found(replayDead, Error, "the replay endpoint does not answer", s.ReplayEndpoint+": "+h.ReplayFailed,
			"see that --replay is the engine's replay_endpoint, and that this port of the engine can be reached from "+s.Host)
	}
	if h.Unreadable > 0 {
		found(messagesUnreadable, Error, "messages of the engine cannot be read", fmt.Sprintf("%d of %d since the shim began",
			h.Unreadable, h.Messages), "give worker-shim run the right --source; see its log for what is odd. If the engine is newer than "+
			"docs/engines says, report it: --on-unreadable clear has answers right, and lower, till then")
	}
	skipped := maps.Clone(h.Skipped)
	if n := skipped[events.SkipCopySize.String()]; n > 0 {
		delete(skipped, events.SkipCopySize.String())
		found(copiesSkipped, Warning,
			"copies below the device are not whole blocks, and are not credited; the device's blocks are right",
			fmt.Sprintf("%s %d", events.SkipCopySize, n),
			"make the chunk of the engine's connector (LMCache: chunk_size) a multiple of the engine's block size; "+
				"leave --block-size as it is. LMCache's save_unfull_chunk keeps such copies too")
	}
	if len(skipped) > 0 {
		var said []string
		for _, reason := range slices.Sorted(maps.Keys(skipped)) {
			said = append(said, fmt.Sprintf("%s %d", reason, skipped[reason]))
		}
		remedy := "see worker-shim's log, and docs/engines for what this release of the engine lacks"
		if skipped[events.SkipBlockSize.String()] > 0 {
			remedy = "if engine_unusable names the rank too, start its shim with the --block-size said there; otherwise " +
				"the device's blocks have the shim's --block-size, and what is passed over is another group's"
		}
		if h.Skipped[events.SkipAdapter.String()] > 0 {
			remedy = enginehttp.NameAdapters
		}
		found(eventsSkipped, Error, "events of the engine are passed over", strings.Join(said, ", "), remedy)
	}
	if h.Gaps > 0 {
		found(messagesLost, Warning, "messages of the engine were lost, and what the rank held was cleared", plural(int(h.Gaps), "time")+
			" since the shim began at "+s.Since.UTC().Format(time.RFC3339),
			`raise "buffer_steps" (and "hwm") in the engine's --kv-events-config, and give worker-shim run --replay`)
	}
	if h.JoinedLate > 0 {
		found(joinedLate, Warning, "the engine had spoken before its shim came, and could not say it again",
			plural(int(h.JoinedLate), "time"),
			`start the shim before the engine; raise "buffer_steps" in --kv-events-config; `+
				`or empty the engine's cache: POST /reset_prefix_cache`)
	}
	return list
}

func judgeEngines(f *Facts) (list []Finding) {
	for i := range f.Engines {
		e := &f.Engines[i]
		where := fmt.Sprintf("%s at %s", e.Worker, e.URL)
		found := func(id Fault, severity Severity, what, evidence, remedy string) {
			list = append(list, Finding{severity, "", id, where, what, evidence, remedy})
		}
		switch {
		case errors.Is(e.Err, enginehttp.ErrNoEvents):
			found(engineNoEvents, Error, "the engine publishes no events that its shim could hear", e.Err.Error(),
				`restart it with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",`+
					`"replay_endpoint":"tcp://*:5657"}'`)
			continue
		case errors.Is(e.Err, enginehttp.ErrNotReady):
			found(engineUnreachable, Warning, "the engine does not answer over HTTP from this host", e.Err.Error(),
				"see that it runs and that its port can be reached from here; change a wrong address with indexer workers change "+
					"--endpoint URL "+escape.Operand(string(e.Worker)))
			continue
		case e.Err != nil:
			found(engineUnknown, Warning, "what answers does not say how it publishes", e.Err.Error(),
				"give --engine-http-token-file and --engine-address if it wants an API key; if this is no engine's own port, nothing is wrong")
			continue
		}
		said := e.Said
		if said.BlockSize != 0 && said.BlockSize != e.BlockSize {
			found(engineBlockSize, Error, "the engine's blocks have another size than its shim says",
				fmt.Sprintf("%s %s has %d tokens, the shim %d", said.Kind, said.Version, said.BlockSize, e.BlockSize),
				fmt.Sprintf("start worker-shim run with --block-size %d, or without: --engine-http learns it; "+
					"then indexer forget --model %s if it refuses", said.BlockSize, escape.Shell(e.Model)))
		}
		if said.Model != "" && said.Model != e.Model {
			found(engineModel, Warning, "the engine serves the model under another name",
				fmt.Sprintf("the engine says %q, the shim %q", said.Model, e.Model),
				"if routers ask for the engine's name: worker-shim run --model "+escape.Shell(said.Model))
		}
		if said.UnnamedAdapters {
			found(engineAdapters, Error, "the engine's events do not name adapters",
				fmt.Sprintf("%s %s serves adapters; a block may be an adapter's or the base model's, so its shim skips them",
					said.Kind, said.Version), enginehttp.NameAdapters)
		}
		for _, r := range said.Ranks {
			if r.Replay == "" {
				found(engineNoReplay, Warning, "the engine has no replay endpoint",
					fmt.Sprintf("rank %d publishes at %s alone", r.Rank, r.Endpoint),
					`add "replay_endpoint":"tcp://*:5657" to --kv-events-config`)
			}
		}
		if len(said.Ranks) > e.Ranks {
			found(ranksUnserved, Error, "ranks of the engine have no shim",
				fmt.Sprintf("it has %d ranks, %d are registered", len(said.Ranks), e.Ranks),
				fmt.Sprintf("worker-shim run --ranks %d, or --engine-http %s, which finds all", len(said.Ranks),
					escape.Shell(e.URL)))
		}
	}
	return list
}

func judgeStores(f *Facts) (list []Finding) {
	for _, n := range f.Nodes.Nodes {
		if n.Status == nil {
			continue
		}
		for i := range n.Status.L3 {
			s := &n.Status.L3[i]
			found := func(id Fault, severity Severity, what, evidence, remedy string) {
				where := fmt.Sprintf("node %s, store %s", n.Node, s.Store)
				list = append(list, Finding{severity, "", id, where, what, evidence, remedy})
			}
			if s.Down != "" {
				found(storeDown, Error, "the node does not ask the store: its blocks count for nobody", s.Down,
					"see that the store's master runs, and that its HTTP port can be reached from the node's host; the address is "+
						"that of worker-shim's --l3-config")
			}
			if s.Busy > 0 {
				found(storeBusy, Warning, "queries went without the store, as too many questions were under way",
					fmt.Sprintf("%d of %d", s.Busy, s.Busy+s.Questions),
					"give the store's master more room, or have its events heard: worker-shim run --source mooncake")
			}
			if s.Set != nil && (!s.Set.Whole || s.Set.Overflows > 0) {
				found(storeEvents, Warning, "what the store's events say is not whole",
					fmt.Sprintf("gaps %d, overflows %d, lists %d", s.Set.Gaps, s.Set.Overflows, s.Set.Lists),
					"see that worker-shim run --source mooncake runs for this store")
			}
		}
	}
	return list
}

func judgeTokenizers(f *Facts) (list []Finding) {
	slices.SortFunc(f.Tokenizers, func(a, b TokenizerFacts) int { return strings.Compare(a.Model, b.Model) })
	for _, t := range f.Tokenizers {
		if t.Error != "" {
			list = append(list, Finding{Error, "", tokenizerFailed, "model " + t.Model,
				"texts are not tokenized: requests that bring text find nothing", t.Error,
				"mend the model's entry in the file of indexer serve --tokenizers; " +
					"indexer tokenizer check compares it with the engine"})
		}
	}
	return list
}
