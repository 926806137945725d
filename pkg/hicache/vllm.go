package hicache

import (
	"fmt"
	"strings"
)

// modelTail is what of a model's name is in a key: the last element of a path.
func modelTail(name string) string {
	name = strings.TrimRight(name, "/")
	return name[strings.LastIndexByte(name, '/')+1:]
}

// The releases of vLLM in which lookups changed which ranks' objects they ask for (MooncakeStoreWorker.lookup, later
// _init_lookup_key_prefixes, in the published wheels). Blocks of before namesSince are called otherwise.
var (
	namesSince        = version{0, 24, 0}
	contextRanksSince = version{0, 25, 0} // of context-parallel ranks too; before, only of the first
	groupShardsSince  = version{0, 27, 0} // each group by its kind of attention; before, all by the model's heads
)

// shards is how many tensor ranks' objects a lookup asks for in group g where there is no decode context parallelism.
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

// before reports whether the workers said that they are of a release before another.
func (v *VLLM) before(release version) bool {
	return v.EngineVersion != "" && !since(v.EngineVersion, release)
}

// keyPrefixes are the prefixes, followed by the whole digest of its last hash in hexadecimal digits, under each of
// which a block of group g must exist to be a hit: one for each rank whose
// bytes differ, by the rules of the release; without one, by those of 0.27 and later. v must have passed Check.
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
