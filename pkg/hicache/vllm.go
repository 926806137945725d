package hicache

import (
	"fmt"
	"strings"
)

// modelTail returns the part of a model's name in a key: the last element of a path.
func modelTail(name string) string {
	name = strings.TrimRight(name, "/")
	return name[strings.LastIndexByte(name, '/')+1:]
}

// Releases of vLLM that changed the ranks in the lookup of objects (MooncakeStoreWorker.lookup, later
// _init_lookup_key_prefixes, in the published wheels). Releases before namesSince have other block names.
var (
	namesSince        = version{0, 24, 0}
	contextRanksSince = version{0, 25, 0} // keys of all context-parallel ranks; before, only of the first
	groupShardsSince  = version{0, 27, 0} // ranks by the attention of each group; before, by the model's heads
)

// shards returns the number of tensor ranks in a lookup of group g without decode context parallelism.
func (v *VLLM) shards(g int) int {
	switch group := v.Groups[g]; {
	case v.before(groupShardsSince) && anyGroup(v.Groups, func(g *Group) bool { return g.MLA }):
		return 1
	case v.before(groupShardsSince):
		return min(v.TPSize, v.NumKVHead)
	case group.Kind == Mamba:
		return v.TPSize
	case group.MLA:
		return 1
	}
	return v.TPSize / max(1, v.TPSize/v.NumKVHead)
}

// before reports whether the registered release is before another release.
func (v *VLLM) before(release version) bool {
	return v.EngineVersion != "" && !since(v.EngineVersion, release)
}

// keyPrefixes returns the key prefixes of a block of group g. The digest of the block's last hash follows in
// hexadecimal. A block is a hit only if the store has it under every prefix: a prefix for each rank with different
// bytes, by the rules of the release. Without a release, the rules of 0.27 and later apply. v must have passed Check.
func (v *VLLM) keyPrefixes(g int) []string {
	pcp, dcp, shards := max(v.PCPSize, 1), max(v.DCPSize, 1), v.shards(g)
	switch {
	case v.before(contextRanksSince):
		pcp, dcp = 1, 1
	case dcp > 1:
		shards = v.TPSize
	}
	head := modelTail(v.ModelName) + v.StoreNamespace
	if v.CachePrefix != "" {
		head = v.CachePrefix + "@" + head
	}
	prefixes := make([]string, 0, pcp*shards*v.PPSize)
	for c := range pcp {
		for t := range shards {
			for p := range v.PPSize {
				prefixes = append(prefixes, fmt.Sprintf("%s@tp_rank:%d@pcp%d@dcp%d@pp_rank:%d@group:%d@", head, t, c,
					t%dcp, p, g))
			}
		}
	}
	return prefixes
}
