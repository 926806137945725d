package hicache

import (
	"fmt"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Limits of a configuration. A larger value is a mistake and would cost memory.
const (
	maxRanks     = 1 << 12 // ranks of each kind, and keys of a page
	maxPageSize  = 1 << 16 // tokens
	maxBlockSize = 1 << 20 // tokens
	maxGroups    = 256
	maxLookahead = 64 // tokens
)

// Supported backends of SGLang's HiCache.
const (
	mooncakeBackend = "mooncake"
	fileBackend     = "file"
)

// defaultTenant is the only tenant of Mooncake's objects that a master's HTTP port serves.
const defaultTenant = "default"

// defaultMetricsPort is the default HTTP port of a Mooncake master.
const defaultMetricsPort = 9003

// Config describes the shared store of a worker, as the worker registers it. At most one field is set. An empty Config
// means that the worker uses no supported store. A Config is immutable.
type Config struct {
	SGLang *SGLang `json:"sglang_hicache_mooncake,omitempty"`
	VLLM   *VLLM   `json:"vllm_mooncake_store,omitempty"`
}

// SGLang is the configuration of SGLang's HiCache with a store. SGLang's workers under NVIDIA Dynamo publish it
// (ai-dynamo/dynamo › components/src/dynamo/sglang/register.py of 1.6.1 and 1.7). Null and absent fields are zero.
type SGLang struct {
	Backend          string `json:"backend"`   // "mooncake" or "file"
	PageSize         int    `json:"page_size"` // tokens
	TPSize           int    `json:"tp_size"`
	PPSize           int    `json:"pp_size"`
	IsMLA            bool   `json:"is_mla_model"`
	IsEagle          bool   `json:"is_eagle"`           // pages consist of pairs of tokens
	TPLCMSize        int    `json:"tp_lcm_size"`        // 0: not set
	ShouldSplitHeads bool   `json:"should_split_heads"` // a key has a share of the heads, 1 of TPLCMSize
	ExtraBackendTag  string `json:"extra_backend_tag"`

	// KeyPrefix is the prefix of Mooncake's keys, before an underscore: the tag and the model's name. It replaces
	// ExtraBackendTag, ModelInKeys and ModelName. null: the prefix consists of these fields.
	KeyPrefix *string `json:"key_prefix,omitempty"`

	// TenantID is the tenant of the objects; "" and "default" mean the default tenant. A master's HTTP port serves only
	// the default tenant, so kvatlas does not query the store of another tenant.
	TenantID string `json:"tenant_id,omitempty"`

	// KVEventsEndpoint is the address of the master's events. It has no use here: a shim of the store forwards the
	// events.
	KVEventsEndpoint string `json:"kv_events_endpoint,omitempty"`

	// ObjectLayout lists the objects of a page, by pool. nil means only the objects of keys and values.
	ObjectLayout *ObjectLayout `json:"hicache_object_layout,omitempty"`

	// Hybrid reports whether a page has objects besides keys and values; see SGLang.bounded. null: unknown.
	Hybrid *bool `json:"hybrid,omitempty"`

	Master

	// EngineVersion is SGLang's release, such as 0.5.23. It determines MLAKeyStyle, Namespaces and ModelInKeys if
	// unset.
	EngineVersion string `json:"engine_version,omitempty"`

	// MLAKeyStyle is the form of a page's key of an MLA model: "rank" (hash__k, from 0.5.8 on, and without a release)
	// or "plain" (hash_k).
	MLAKeyStyle string `json:"mla_key_style,omitempty"`

	// Namespaces defines whether the page hash includes extra keys and cache salts: "hashed" (from 0.5.20 on, and
	// without a release) or "ignored" (before: tenants share the pages in the store).
	Namespaces string `json:"namespaces,omitempty"`

	// PrefetchThreshold is the minimum number of present tokens for a load; 0 means the engine's default, 256. The
	// minimum is at least a page.
	PrefetchThreshold int `json:"prefetch_threshold,omitempty"`

	// PrefetchCapacity is the maximum number of tokens that the engine prefetches, from [SGLang.PrefetchLimit]. 0 means
	// unknown, and no limit applies.
	PrefetchCapacity int `json:"prefetch_capacity_limit,omitempty"`

	// ModelName is part of the file backend's names. It is part of Mooncake's keys if ModelInKeys is set.
	ModelName string `json:"model_name,omitempty"`

	// ModelInKeys reports whether Mooncake's keys have the model's name. null: true from 0.5.17 on; without a release,
	// true if ModelName is set.
	ModelInKeys *bool `json:"model_in_keys,omitempty"`

	// Directory is the folder of the file backend.
	Directory string `json:"directory,omitempty"`
}

// VLLM is the configuration of vLLM's MooncakeStoreConnector
// (vllm-project/vllm › vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store).
type VLLM struct {
	ModelName      string `json:"model_name"` // of a path, only the last element counts
	CachePrefix    string `json:"cache_prefix,omitempty"`
	StoreNamespace string `json:"store_namespace,omitempty"`

	TPSize    int `json:"tp_size"`
	PPSize    int `json:"pp_size"`
	PCPSize   int `json:"pcp_size,omitempty"` // 0 is 1
	DCPSize   int `json:"dcp_size,omitempty"` // 0 is 1
	NumKVHead int `json:"num_kv_heads"`

	Groups             []Group `json:"groups"`
	HashBlockSize      int     `json:"hash_block_size"`      // tokens
	SchedulerBlockSize int     `json:"scheduler_block_size"` // tokens
	UseEagle           bool    `json:"use_eagle,omitempty"`
	Profile            Profile `json:"profile,omitempty"` // "" is safe

	// The following fields determine the name of a block. Without a predictable seed, kvatlas does not query the store.
	// --prefix-caching-hash-algo: sha256 (the default), sha256_cbor, xxhash, xxhash_cbor
	HashAlgo string  `json:"hash_algo,omitempty"`
	HashSeed *string `json:"hash_seed,omitempty"` // the engine's PYTHONHASHSEED; null: not set
	// tokens after a block that the hash includes, from 0.33 on, with some draft models
	HashLookahead int `json:"hash_lookahead_tokens,omitempty"`
	// vLLM's release, such as 0.32.0: determines the seed without HashSeed, and the hashing of adapters and salts
	EngineVersion string `json:"engine_version,omitempty"`

	Master
}

// Kind is the kind of attention of a KV-cache group. Kinds with the same rule for hits in vLLM are a single Kind: MLA
// and sink attention are full, sliding MLA is sliding.
type Kind string

const (
	Full         Kind = "full"
	Sliding      Kind = "swa"
	ChunkedLocal Kind = "chunked"
	Mamba        Kind = "mamba"
)

// Group is a KV-cache group of a hybrid model.
type Group struct {
	Kind      Kind `json:"kind"`
	BlockSize int  `json:"block_size"`       // tokens; under DCP, an attention group has the block size times the DCP size
	Window    int  `json:"window,omitempty"` // tokens: the window of a sliding group, the chunk of a chunked one
	Eagle     bool `json:"eagle,omitempty"`  // a draft model uses the group
	MLA       bool `json:"mla,omitempty"`    // all TP ranks have the same bytes
}

// Profile selects the rules for hits.
type Profile string

const (
	Safe      Profile = "safe"      // vLLM 0.32.0 without partial hits; the default
	Partial   Profile = "partial"   // vLLM 0.32.0, with hits that end within a block (enable_partial_hash_hits)
	Reference Profile = "reference" // vLLM 0.24.0, bit for bit, including two EAGLE defects
)

// Folder returns the folder of the store, or "" for other stores. A caller with a foreign configuration must allow only
// known folders, because a lookup reveals the content of a folder.
func (c *Config) Folder() string {
	if c.SGLang != nil && c.SGLang.Backend == fileBackend {
		return c.SGLang.Directory
	}
	return ""
}

// Where returns the folder, the host:port for HTTP, or the election of the store. It returns "" if the workers
// registered no address.
func (c *Config) Where() string {
	if folder := c.Folder(); folder != "" {
		return folder
	}
	if m := c.master(); m != nil {
		return m.where()
	}
	return ""
}

// Identity identifies the store and the scheme of object names. Under configurations with the same identity, equal
// names mean equal objects. c must have passed Check.
func (c *Config) Identity() string {
	if v := c.VLLM; v != nil {
		return fmt.Sprintf("vllm %q %q %q %q tp%d pp%d pcp%d dcp%d heads%d %v %d", v.where(), v.CachePrefix,
			modelTail(v.ModelName), v.StoreNamespace,
			v.TPSize, v.PPSize, v.PCPSize, v.DCPSize, v.NumKVHead, v.Groups, v.HashBlockSize)
	}
	x := c.SGLang.settled()
	suffixes, trailing, _ := x.objects()
	return fmt.Sprintf("%s %q tp%d pp%d mla:%v%s heads:%v/%d prefix:%q model:%q tenant:%q %q %#v", x.Backend, c.Where(),
		x.TPSize, x.PPSize, x.IsMLA, x.MLAKeyStyle, x.ShouldSplitHeads, x.TPLCMSize, x.keyPrefix(), x.ModelName,
		x.TenantID, suffixes, trailing)
}

// Rule returns the rule by which workers with this configuration load blocks. c must have passed Check.
func (c *Config) Rule() Rule {
	if c.SGLang != nil {
		return c.SGLang.Rule()
	}
	return Rule{most: noBound}
}

// bounded reports whether the computed loads of workers with this configuration are upper bounds.
func (c *Config) bounded() bool { return c.SGLang != nil && c.SGLang.bounded() }

// String describes c in a few words. nil and empty configurations return "".
func (c *Config) String() string {
	switch {
	case c == nil:
		return ""
	case c.SGLang != nil && c.SGLang.Backend == fileBackend:
		return "SGLang's files in " + c.SGLang.Directory
	case c.SGLang != nil:
		return "SGLang's pages in " + c.SGLang.Backend + " at " + c.Where()
	case c.VLLM != nil:
		return "vLLM's blocks in mooncake at " + c.Where()
	}
	return ""
}

// Layout returns the layout for a [Coordinator].
func (v *VLLM) Layout() Layout {
	return Layout{Groups: v.Groups, SchedulerBlockSize: v.SchedulerBlockSize, HashBlockSize: v.HashBlockSize,
		UseEagle: v.UseEagle, Profile: v.Profile}
}

// Usable returns the reason why workers with this configuration get no credit for the store, or "". blockSize is the
// size of the index's blocks, in tokens.
func (c *Config) Usable(blockSize uint32) (reason string) {
	if err := c.Check(); err != nil {
		return err.Error()
	}
	if c.SGLang != nil && c.SGLang.PageSize != int(blockSize) {
		return fmt.Sprintf("the store's pages have %d tokens, the index's blocks %d", c.SGLang.PageSize, blockSize)
	}
	return c.Unasked()
}

// GroupSpecs returns the specs of the worker's KV-cache groups, by number. blockSize is the size of the engine's
// blocks, in tokens. It returns nil if the configuration has no groups. c must have passed Check.
func (c *Config) GroupSpecs(blockSize uint32) (list []events.GroupSpec) {
	if c.VLLM == nil {
		return nil
	}
	flagged := slices.ContainsFunc(c.VLLM.Groups, func(g Group) bool { return g.Eagle })
	for _, g := range c.VLLM.Groups {
		spec := events.GroupSpec{
			Kind: map[Kind]events.Attention{Full: events.AttentionFull, Sliding: events.AttentionSlidingWindow,
				ChunkedLocal: events.AttentionChunkedLocal, Mamba: events.AttentionMamba}[g.Kind],
			// groups with lookahead hashes drop nothing
			Drops: (g.Eagle || c.VLLM.UseEagle && !flagged) && c.VLLM.HashLookahead == 0,
		}
		if uint32(g.BlockSize) == blockSize { // a window in other blocks has no meaning in the index
			spec.Window = uint32(g.Window)
		}
		list = append(list, spec)
	}
	return list
}
