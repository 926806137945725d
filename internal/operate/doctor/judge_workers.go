package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

func judgeWorkers(f *Facts) (list []Finding) {
	l := f.Workers
	if !l.Complete {
		list = append(list, finding(Error, workersMissing, f.Namespace, "answers lack workers",
			cluster.SetOf(l.Missing...).Phrase()+" could not be examined",
			"start the missing nodes: indexer cluster shows the partitions of each node"))
	}
	for i := range l.Expired {
		w := &l.Expired[i]
		list = append(list, finding(Warning, workerExpired, fmt.Sprintf("%s/%d", w.Instance, w.Rank),
			"the worker's lease has expired: its blocks are cleared, and it is not chosen",
			fmt.Sprintf("process %d on %s renewed it last at %s", w.Lease.PID, w.Lease.Host,
				w.Lease.Renewed.UTC().Format(time.RFC3339)),
			"start its worker-shim on "+w.Lease.Host+" again; if it was removed for good: indexer workers remove "+
				escape.Operand(string(w.Instance))))
	}
	if len(l.Workers) == 0 {
		return append(list, finding(Warning, workerNone, f.Namespace, "no worker is registered",
			"no shim has published events",
			"run worker-shim run beside each engine"+namespaceFlag(f.Namespace)+"; docs/engines has a page for each"))
	}
	list = append(list, judgeRecords(l.Workers, f.Records)...)
	for i := range l.Workers {
		w := &l.Workers[i]
		found := func(id Fault, severity Severity, what, evidence, remedy string) {
			key := events.RankKey{Instance: w.Instance, Rank: w.Rank}
			list = append(list, finding(severity, id, key.String(), what, evidence, remedy).about(key, false))
		}
		blocks := fmt.Sprintf("%d blocks count for it", w.Blocks.Device+w.Blocks.Host+w.Blocks.Disk+w.Blocks.External)
		noEvents := w.Record != nil && w.Record.Events == api.EventsNone
		switch {
		case noEvents:
			continue
		case w.Lease == nil:
			found(leaseNone, Warning, "no shim has a lease on the rank: its blocks stay when the worker ends", blocks,
				fmt.Sprintf("run the worker-shim, with permission for the NATS user to write leases (indexer auth create); "+
					"or clear the rank: indexer workers clear %s", escape.Operand(string(w.Instance))))
		case w.Lease.State == string(registry.Expired):
			found(leaseExpired, Error, "the lease has expired",
				fmt.Sprintf("process %d on %s renewed it at %s",
					w.Lease.PID, w.Lease.Host, w.Lease.Renewed.UTC().Format(time.RFC3339)),
				fmt.Sprintf("start its worker-shim on %s again, or clear the worker: indexer workers clear %s", w.Lease.Host,
					escape.Operand(string(w.Instance))))
		}
		since := ""
		if w.EngineSince != nil {
			since = "since " + w.EngineSince.UTC().Format(time.RFC3339) + ": "
		}
		switch w.Engine {
		case api.EngineSilent:
			found(engineSilent, Error, "the engine does not answer its shim", since+w.EngineWhy+"; "+blocks,
				"check whether the process hangs, and restart the engine; worker-shim run --engine-gone-after 1m "+
					"clears such an engine automatically")
		case api.EngineGone:
			found(engineGone, Warning, "the engine has ended", since+w.EngineWhy,
				"restart the engine, or stop its worker-shim too")
		}
		incomplete, useless := w.Record != nil && w.Record.State == api.WorkerIncomplete, false
		evidence, advice := "", "give its worker-shim the missing flags, or run indexer workers change "+
			escape.Operand(string(w.Instance))
		if incomplete { // the shim may report unusable events
			evidence, advice = splitRemedy(strings.Join(w.Record.Reasons, "; "), advice)
			useless = evidence != strings.Join(w.Record.Reasons, "; ")
		}
		if w.Engine == api.EngineConnected && w.Lease != nil && !useless && w.Stored == 0 && w.Blocks == (api.TierCounts{}) {
			found(engineQuiet, Warning, "the engine is connected and has announced no block", "no stored event since its start",
				`send it a prompt longer than a block; if no event arrives: vllm serve --kv-events-config `+
					`'{"enable_kv_cache_events":true,"publisher":"zmq"}' `+
					"with prefix caching on, SGLang without --disable-radix-cache; and worker-shim run without --topic")
		}
		if incomplete {
			found(workerIncomplete, Error, "the worker may not be chosen", evidence, advice)
		}
	}
	return list
}

// judgeRecords reports ranks with unusable engine events, from the records of their shims. Records of shims without a
// lease are outdated and skipped.
func judgeRecords(workers []api.WorkerInfo, records []registry.Record) (list []Finding) {
	held := map[events.RankKey]bool{}
	for i := range workers {
		if w := &workers[i]; w.Lease != nil && w.Lease.State == string(registry.Held) {
			held[events.RankKey{Instance: w.Instance, Rank: w.Rank}] = true
		}
	}
	for i := range records {
		r := &records[i]
		if r.Shim == nil || !held[r.Key()] {
			continue
		}
		found := func(id Fault, what, problem string) {
			evidence, remedy := splitRemedy(problem, "see its log")
			list = append(list, finding(Error, id, r.Key().String(), what, evidence, remedy).about(r.Key(), false))
		}
		if r.Shim.Several != "" {
			found(severalEngines, "several engines publish to one shim", r.Shim.Several)
		}
		if r.Shim.Unusable != "" {
			found(engineUnusable, "the engine's events are skipped", r.Shim.Unusable)
		}
	}
	return list
}

func judgeModels(f *Facts) (list []Finding) {
	unusable := map[events.RankKey]bool{} // ranks with a wrong block size, a separate finding
	for i := range f.Records {
		if r := &f.Records[i]; r.Shim != nil && r.Shim.Unusable != "" {
			unusable[r.Key()] = true
		}
	}
	sizes := map[string]map[uint32][]string{}
	for i := range f.Workers.Workers {
		w := &f.Workers.Workers[i]
		if unusable[events.RankKey{Instance: w.Instance, Rank: w.Rank}] {
			continue
		}
		if sizes[w.Model] == nil {
			sizes[w.Model] = map[uint32][]string{}
		}
		sizes[w.Model][w.BlockSize] = append(sizes[w.Model][w.BlockSize], fmt.Sprintf("%s/%d", w.Instance, w.Rank))
	}
	for _, model := range slices.Sorted(maps.Keys(sizes)) {
		if of := sizes[model]; len(of) > 1 {
			var parts []string
			for _, size := range slices.Sorted(maps.Keys(of)) {
				parts = append(parts, fmt.Sprintf("%d tokens: %s", size, registry.First(of[size])))
			}
			list = append(list, finding(Error, blockSizes, "model "+model,
				"the model's workers have different block sizes",
				strings.Join(parts, "; "),
				"start the engines with one size (vLLM: --block-size, SGLang: --page-size) and their worker-shim with the same "+
					"--block-size; or give each size a separate model name: --model"))
		}
	}
	return append(list, judgeHashes(f.Records)...)
}

// judgeHashes reports workers of one model and store with different names for the same objects.
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
			list = append(list, finding(Error, storeUncredited, rank,
				"no block of the shared store can count for the worker", why,
				hashRemedy))
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
		var parts []string
		for _, n := range stores[at] {
			parts = append(parts, fmt.Sprintf("%s: %s", n.config, registry.First(n.ranks)))
		}
		list = append(list, finding(Error, storeNames, "model "+at.model,
			"workers name the same blocks differently in store "+at.store+", so they cannot share blocks",
			strings.Join(parts, "; "), hashRemedy))
	}
	return list
}

// sampleName returns a worker's name for a sample prompt in the store. Workers with different names never share blocks.
func sampleName(c *hicache.Config) (string, error) {
	if c.VLLM == nil {
		return c.Identity(), nil
	}
	names, err := c.VLLM.Digests(nil, make([]uint32, 2*c.VLLM.HashBlockSize+c.VLLM.HashLookahead), "", "")
	return fmt.Sprintf("%s %x", c.Identity(), names), err
}

const hashRemedy = "start all engines of the model with the same PYTHONHASHSEED, --prefix-caching-hash-algo and " +
	"release, and set the values in worker-shim run --l3-config (hash_seed, hash_algo, engine_version)"

// naming lists the settings that determine names in a store.
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
