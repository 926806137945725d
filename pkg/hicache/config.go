package hicache

import (
	"fmt"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Bounds of what a configuration may say; what lies beyond is a mistake and would cost memory.
const (
	maxRanks     = 1 << 12 // of each kind, and keys of one page in all
	maxPageSize  = 1 << 16 // tokens
	maxBlockSize = 1 << 20 // tokens
	maxGroups    = 256
	maxLookahead = 64 // tokens
)

// The backends of SGLang's HiCache that are known here.
const (
	mooncakeBackend = "mooncake"
	fileBackend     = "file"
)

// defaultTenant is the tenant of Mooncake's objects for which a master's HTTP answers.
const defaultTenant = events.DefaultTenant

// defaultMetricsPort is where a Mooncake master answers HTTP unless told otherwise.
const defaultMetricsPort = 9003

// Config is what a worker registers of the shared store it uses. At most one of its fields is set; none means that the
// worker uses no store that is known here. Configs are values: nothing here changes one.
type Config struct {
	SGLang *SGLang `json:"sglang_hicache_mooncake,omitempty"`
	VLLM   *VLLM   `json:"vllm_mooncake_store,omitempty"`
}

// SGLang is the configuration of SGLang's HiCache with a store behind it, as SGLang's workers under NVIDIA Dynamo
// publish it (ai-dynamo/dynamo › components/src/dynamo/sglang/register.py of 1.6.1 and 1.7). Null and absent fields
// are zero.
type SGLang struct {
	Backend          string `json:"backend"`   // "mooncake" or "file"
	PageSize         int    `json:"page_size"` // tokens
	TPSize           int    `json:"tp_size"`
	PPSize           int    `json:"pp_size"`
	IsMLA            bool   `json:"is_mla_model"`
	IsEagle          bool   `json:"is_eagle"`           // pages are of pairs of tokens
	TPLCMSize        int    `json:"tp_lcm_size"`        // 0: not set
	ShouldSplitHeads bool   `json:"should_split_heads"` // keys are of shares of heads, TPLCMSize of them
	ExtraBackendTag  string `json:"extra_backend_tag"`

	// KeyPrefix is what Mooncake's keys begin with, before an underscore: the tag and the model's name. It takes the
	// place of ExtraBackendTag, ModelInKeys and ModelName. null: it is made of these.
	KeyPrefix *string `json:"key_prefix,omitempty"`

	// TenantID is the tenant of the objects; "" and "default" are the default one. A master's HTTP answers for that
	// alone, so a store with another is not asked.
	TenantID string `json:"tenant_id,omitempty"`

	// KVEventsEndpoint is where the master publishes its events. It is not used here: a shim of the store passes them on.
	KVEventsEndpoint string `json:"kv_events_endpoint,omitempty"`

	// ObjectLayout lists the objects of a page, by pool; nil: those of keys and values alone.
	ObjectLayout *ObjectLayout `json:"hicache_object_layout,omitempty"`

	// Hybrid is whether a page has more objects than those of keys and values; see [SGLang.Bounded]. null: not known.
	Hybrid *bool `json:"hybrid,omitempty"`

	Master

	// EngineVersion is SGLang's release, such as 0.5.23. It decides what is left open of MLAKeyStyle, Namespaces and
	// ModelInKeys.
	EngineVersion string `json:"engine_version,omitempty"`

	// MLAKeyStyle is how a page of an MLA model is called: "rank" (hash__k, from 0.5.8 on, and without a release) or
	// "plain" (hash_k).
	MLAKeyStyle string `json:"mla_key_style,omitempty"`

	// Namespaces is whether extra keys and cache salts are part of the page hash: "hashed" (from 0.5.20 on, and without
	// a release) or "ignored" (before: tenants are not told apart in the store).
	Namespaces string `json:"namespaces,omitempty"`

	// PrefetchThreshold is how many tokens must be there for the engine to load them; 0 is the engine's own default,
	// 256. A page is the least in any case.
	PrefetchThreshold int `json:"prefetch_threshold,omitempty"`

	// PrefetchCapacity is how many tokens the engine loads ahead at most, as [PrefetchLimit] computes it of the engine's
	// sizes; 0 is not known, and then no limit is applied.
	PrefetchCapacity int `json:"prefetch_capacity_limit,omitempty"`

	// ModelName is part of the file backend's names, and of Mooncake's keys where ModelInKeys says so.
	ModelName string `json:"model_name,omitempty"`

	// ModelInKeys is whether Mooncake's keys have the model's name. null: they do from 0.5.17 on; without a release, if
	// there is a ModelName.
	ModelInKeys *bool `json:"model_in_keys,omitempty"`

	// Directory is where the file backend keeps its pages.
	Directory string `json:"directory,omitempty"`
}

// VLLM is the configuration of vLLM's MooncakeStoreConnector
// (vllm-project/vllm › vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store).
type VLLM struct {
	ModelName      string `json:"model_name"` // of a path, its last element is used
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

	// What a block is called depends on these. Without a seed that can be known the store is not asked.
	// --prefix-caching-hash-algo: sha256 (the default), sha256_cbor, xxhash, xxhash_cbor
	HashAlgo string  `json:"hash_algo,omitempty"`
	HashSeed *string `json:"hash_seed,omitempty"` // the engine's PYTHONHASHSEED; null: not set
	// tokens after a block that are hashed with it, from 0.33 on, with some draft models
	HashLookahead int `json:"hash_lookahead_tokens,omitempty"`
	// vLLM's release, such as 0.32.0: decides what HashSeed leaves open, and how adapters and salts are hashed
	EngineVersion string `json:"engine_version,omitempty"`

	Master
}

// Kind is the kind of attention of a KV-cache group, as the coordinator tells them apart. Kinds that vLLM finds hits
// for in the same way are one: MLA and sink attention are full, sliding MLA is sliding.
type Kind string

const (
	Full         Kind = "full"
	Sliding      Kind = "swa"
	ChunkedLocal Kind = "chunked"
	Mamba        Kind = "mamba"
)

// Group is one KV-cache group of a hybrid model.
type Group struct {
	Kind      Kind `json:"kind"`
	BlockSize int  `json:"block_size"`       // tokens; of an attention group under DCP, times its size
	Window    int  `json:"window,omitempty"` // tokens: the window of a sliding group, the chunk of a chunked one
	Eagle     bool `json:"eagle,omitempty"`  // a draft model's
	MLA       bool `json:"mla,omitempty"`    // every TP rank has the same bytes
}

// Profile is whose rule decides what a hit is.
type Profile string

const (
	Safe      Profile = "safe"      // vLLM 0.32.0 without partial hits; the default
	Partial   Profile = "partial"   // vLLM 0.32.0 with hits that end within a block (enable_partial_hash_hits)
	Reference Profile = "reference" // vLLM 0.24.0, bit for bit, its two EAGLE defects included
)

// Folder is the folder of the store; "" if it is none. Who reads a configuration of somebody else must know the folder:
// to look into it says what is there.
func (c *Config) Folder() string {
	if c.SGLang != nil && c.SGLang.Backend == fileBackend {
		return c.SGLang.Directory
	}
	return ""
}

// Where is the folder, the host:port for HTTP, or the election of the store; "" if the workers did not say.
func (c *Config) Where() string {
	if folder := c.Folder(); folder != "" {
		return folder
	}
	if m := c.master(); m != nil {
		return m.where()
	}
	return ""
}

// Identity names the store and how its objects are called: under configurations of one identity, what has the same name
// is the same object. c must have passed Check.
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

// Rule is what workers of this configuration load. c must have passed Check.
func (c *Config) Rule() Rule {
	if c.SGLang != nil {
		return c.SGLang.Rule()
	}
	return Rule{most: noBound}
}

// Bounded reports whether what workers of this configuration are found to load is an upper bound.
func (c *Config) Bounded() bool { return c.SGLang != nil && c.SGLang.Bounded() }

// String says in a few words what c is; "" is nothing.
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

// Layout is what the coordinator needs of v.
func (v *VLLM) Layout() Layout {
	return Layout{Groups: v.Groups, SchedulerBlockSize: v.SchedulerBlockSize, HashBlockSize: v.HashBlockSize,
		UseEagle: v.UseEagle, Profile: v.Profile}
}

// Usable says why workers of this configuration can be credited with nothing of the store, or "" if they can:
// blockSize, in tokens, is what the index counts in.
func (c *Config) Usable(blockSize uint32) (reason string) {
	if err := c.Check(); err != nil {
		return err.Error()
	}
	if c.SGLang != nil && c.SGLang.PageSize != int(blockSize) {
		return fmt.Sprintf("the store's pages have %d tokens, the index's blocks %d", c.SGLang.PageSize, blockSize)
	}
	return c.Unasked()
}

// GroupSpecs is what a configuration says of the worker's own KV-cache groups, by number, for an engine whose blocks
// have a size in tokens; nil if it says nothing. c must have passed Check.
func (c *Config) GroupSpecs(blockSize uint32) (list []events.GroupSpec) {
	if c.VLLM == nil {
		return nil
	}
	flagged := slices.ContainsFunc(c.VLLM.Groups, func(g Group) bool { return g.Eagle })
	for _, g := range c.VLLM.Groups {
		spec := events.GroupSpec{
			Kind: map[Kind]events.Attention{Full: events.AttentionFull, Sliding: events.AttentionSlidingWindow,
				ChunkedLocal: events.AttentionChunkedLocal, Mamba: events.AttentionMamba}[g.Kind],
			// hashes that read ahead drop nothing
			Drops: (g.Eagle || c.VLLM.UseEagle && !flagged) && c.VLLM.HashLookahead == 0,
		}
		if uint32(g.BlockSize) == blockSize { // a window of other blocks means nothing in the index
			spec.Window = uint32(g.Window)
		}
		list = append(list, spec)
	}
	return list
}
