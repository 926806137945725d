package hicache

import (
	"encoding/hex"
	"fmt"
	"strings"
)

// modelTail is what of a model's name is in a key: the last element of a path.
func modelTail(name string) string {
	name = strings.TrimRight(name, "/")
	return name[strings.LastIndexByte(name, '/')+1:]
}

// KeyPrefixes are the prefixes under each of which a block of group g must exist to be a hit: one for each rank whose bytes
// differ (MooncakeStoreWorker._init_lookup_key_prefixes). v must have passed Check.
func (v *VLLM) KeyPrefixes(g int) []string {
	pcp, dcp := max(v.PCPSize, 1), max(v.DCPSize, 1)
	shards := v.TPSize
	switch group := v.Groups[g]; {
	case dcp > 1 || group.Kind == Mamba:
	case group.MLA:
		shards = 1
	default:
		shards = v.TPSize / max(1, v.TPSize/v.NumKVHead)
	}
	head := modelTail(v.ModelName) + v.StoreNamespace
	if v.CachePrefix != "" {
		head = v.CachePrefix + "@" + head
	}
	prefixes := make([]string, 0, pcp*shards*v.PPSize)
	for c := range pcp {
		for t := range shards {
			d := 0
			if dcp > 1 {
				d = t % dcp
			}
			for p := range v.PPSize {
				prefixes = append(prefixes, fmt.Sprintf("%s@tp_rank:%d@pcp%d@dcp%d@pp_rank:%d@group:%d@", head, t, c, d, p, g))
			}
		}
	}
	return prefixes
}

// Key is the object's name of a block: a prefix of KeyPrefixes and the whole digest of the block's last hash.
func Key(prefix string, digest []byte) string { return prefix + hex.EncodeToString(digest) }
