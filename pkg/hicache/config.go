package hicache

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
)

// Bounds of what a configuration may say; what lies beyond is a mistake and would cost memory.
const (
	maxRanks     = 1 << 12 // of each kind, and keys of one page in all
	maxPageSize  = 1 << 16 // tokens
	maxBlockSize = 1 << 20 // tokens
	maxGroups    = 256
	maxLookahead = 64 // tokens
)

// DefaultMetricsPort is where a Mooncake master answers HTTP unless told otherwise.
const DefaultMetricsPort = 9003

// Config is what a worker registers of the shared store it uses. At most one of its fields is set; none means that the
// worker uses no store that is known here. Configs are values: nothing here changes one.
type Config struct {
	SGLang *SGLang `json:"sglang_hicache_mooncake,omitempty"`
	VLLM   *VLLM   `json:"vllm_mooncake_store,omitempty"`
}

// Master is where a Mooncake master is found.
type Master struct {
	Address     string `json:"master_server_address,omitempty"` // host:port of its RPC; only the host is used here
	MetricsPort int    `json:"master_metrics_port,omitempty"`   // of its HTTP; 0 is 9003
}

// HTTP is the master's host:port for HTTP, or "" if no address is known.
func (m Master) HTTP() string {
	if m.Address == "" {
		return ""
	}
	host, _, err := net.SplitHostPort(m.Address)
	if err != nil {
		host = m.Address
	}
	port := m.MetricsPort
	if port == 0 {
		port = DefaultMetricsPort
	}
	return net.JoinHostPort(host, fmt.Sprint(port))
}

func (m Master) check() error {
	if m.MetricsPort < 0 || m.MetricsPort > 65535 {
		return fmt.Errorf("master_metrics_port %d is no port", m.MetricsPort)
	}
	return nil
}

// SGLang is the configuration of SGLang's HiCache with a store behind it, as SGLang's workers under NVIDIA Dynamo
// publish it (ai-dynamo/dynamo › components/src/dynamo/sglang/register.py). Null and absent fields are zero.
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

	// PrefetchCapacity is how many tokens the engine loads ahead at most (0.8 of what its host pool has more than its
	// device pool); 0 is not known, and then no limit is applied.
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

// The kinds.
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

// The profiles.
const (
	Safe      Profile = "safe"      // vLLM 0.32.0 without partial hits; the default
	Partial   Profile = "partial"   // vLLM 0.32.0 with hits that end within a block (enable_partial_hash_hits)
	Reference Profile = "reference" // vLLM 0.24.0, bit for bit, its two EAGLE defects included
)

// The releases of SGLang in which names changed (python/sglang/srt/mem_cache/storage/mooncake_store/mooncake_store.py
// and hicache_storage.py of the published wheels).
var (
	rankStyleSince  = version{0, 5, 8}
	modelKeysSince  = version{0, 5, 17}
	namespacesSince = version{0, 5, 20}
)

func (s *SGLang) modelInKeys() bool {
	switch {
	case s.ModelInKeys != nil:
		return *s.ModelInKeys
	case s.EngineVersion != "":
		return since(s.EngineVersion, modelKeysSince)
	}
	return s.ModelName != ""
}

func (s *SGLang) plainStyle() bool {
	return s.MLAKeyStyle == "plain" || s.MLAKeyStyle == "" && s.EngineVersion != "" &&
		!since(s.EngineVersion, rankStyleSince)
}

func (s *SGLang) namespacesIgnored() bool {
	return s.Namespaces == "ignored" || s.Namespaces == "" && s.EngineVersion != "" &&
		!since(s.EngineVersion, namespacesSince)
}

// settled is s with nothing left open to its release, so that two that name the same objects are equal.
func (s SGLang) settled() SGLang {
	model := s.modelInKeys()
	s.ModelInKeys, s.MLAKeyStyle, s.Namespaces = &model, map[bool]string{true: "plain", false: "rank"}[s.plainStyle()],
		map[bool]string{true: "ignored", false: "hashed"}[s.namespacesIgnored()]
	if !s.IsMLA {
		s.MLAKeyStyle = ""
	}
	if !model && s.Backend == "mooncake" {
		s.ModelName = ""
	}
	s.EngineVersion = ""
	return s
}

// Where is the folder, or the host:port for HTTP, of the store; "" if the workers did not say.
func (c *Config) Where() string {
	switch {
	case c.SGLang != nil && c.SGLang.Backend == "file":
		return c.SGLang.Directory
	case c.SGLang != nil:
		return c.SGLang.HTTP()
	case c.VLLM != nil:
		return c.VLLM.HTTP()
	}
	return ""
}

// Identity names the store and how its objects are called: under configurations of one identity, what has the same name
// is the same object. c must have passed Check.
func (c *Config) Identity() string {
	if v := c.VLLM; v != nil {
		return fmt.Sprintf("vllm %q %q %q %q tp%d pp%d pcp%d dcp%d heads%d %v %d", v.HTTP(), v.CachePrefix,
			modelTail(v.ModelName), v.StoreNamespace,
			v.TPSize, v.PPSize, v.PCPSize, v.DCPSize, v.NumKVHead, v.Groups, v.HashBlockSize)
	}
	x := c.SGLang.settled()
	return fmt.Sprintf("%s %q tp%d pp%d mla:%v%s heads:%v/%d tag:%q model:%v %q", x.Backend, c.Where(), x.TPSize,
		x.PPSize, x.IsMLA, x.MLAKeyStyle,
		x.ShouldSplitHeads, x.TPLCMSize, x.ExtraBackendTag, *x.ModelInKeys, x.ModelName)
}

// Rule is what workers of this configuration load. c must have passed Check.
func (c *Config) Rule() Rule {
	if c.SGLang != nil {
		return c.SGLang.Rule()
	}
	return Rule{Most: NoBound}
}

// String says in a few words what c is; "" is nothing.
func (c *Config) String() string {
	switch {
	case c == nil:
		return ""
	case c.SGLang != nil && c.SGLang.Backend == "file":
		return "SGLang's files in " + c.SGLang.Directory
	case c.SGLang != nil:
		return "SGLang's pages in " + c.SGLang.Backend + " at " + c.SGLang.HTTP()
	case c.VLLM != nil:
		return "vLLM's blocks in mooncake at " + c.VLLM.HTTP()
	}
	return ""
}

// ParseConfig reads the configuration of one worker, in JSON, and checks it. A field that is not known is an error: it
// would be one that was misspelt.
func ParseConfig(data []byte) (c Config, err error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return Config{}, fmt.Errorf("hicache: read a configuration: %w", err)
	}
	return c, c.Check()
}

// Check says what is wrong with c; nil is nothing.
func (c *Config) Check() error {
	switch {
	case c.SGLang != nil && c.VLLM != nil:
		return errors.New("hicache: one worker has SGLang's store and vLLM's")
	case c.SGLang != nil:
		if err := c.SGLang.check(); err != nil {
			return fmt.Errorf("hicache: sglang_hicache_mooncake: %w", err)
		}
	case c.VLLM != nil:
		if err := c.VLLM.check(); err != nil {
			return fmt.Errorf("hicache: vllm_mooncake_store: %w", err)
		}
	}
	return nil
}

func (s *SGLang) check() error {
	var wrong []error
	complain := func(bad bool, format string, args ...any) {
		if bad {
			wrong = append(wrong, fmt.Errorf(format, args...))
		}
	}
	complain(s.Backend != "mooncake" && s.Backend != "file", "backend %q: only mooncake and file are known", s.Backend)
	complain(s.PageSize < 1 || s.PageSize > maxPageSize, "page_size %d: want 1 to %d", s.PageSize, maxPageSize)
	complain(s.TPSize < 1 || s.TPSize > maxRanks, "tp_size %d: want 1 to %d", s.TPSize, maxRanks)
	complain(s.PPSize < 1 || s.PPSize > maxRanks, "pp_size %d: want 1 to %d", s.PPSize, maxRanks)
	complain(s.TPLCMSize < 0 || s.TPLCMSize > maxRanks, "tp_lcm_size %d: want 0 to %d", s.TPLCMSize, maxRanks)
	complain(s.ShouldSplitHeads && s.IsMLA, "should_split_heads of an MLA model, which has no heads to split")
	complain(s.ShouldSplitHeads && s.TPSize > 0 && s.TPLCMSize%s.TPSize != 0,
		"should_split_heads, but tp_lcm_size %d is no multiple of tp_size %d", s.TPLCMSize, s.TPSize)
	complain(s.MLAKeyStyle != "" && s.MLAKeyStyle != "rank" && s.MLAKeyStyle != "plain",
		"mla_key_style %q: want rank or plain", s.MLAKeyStyle)
	complain(s.Namespaces != "" && s.Namespaces != "hashed" && s.Namespaces != "ignored",
		"namespaces %q: want hashed or ignored", s.Namespaces)
	complain(s.PrefetchThreshold < 0, "prefetch_threshold %d is negative", s.PrefetchThreshold)
	complain(s.PrefetchCapacity < 0, "prefetch_capacity_limit %d is negative", s.PrefetchCapacity)
	if s.EngineVersion != "" {
		_, err := parseVersion(s.EngineVersion)
		complain(err != nil, "%v", err)
	}
	complain(s.Backend == "mooncake" && s.modelInKeys() && s.ModelName == "",
		"the store's keys have the model's name (model_in_keys, or engine_version 0.5.17 and later), but there is no model_name")
	complain(s.Backend == "file" && s.ModelName == "", "backend file without a model_name")
	complain(s.Backend == "file" && s.Directory == "", "backend file without a directory")
	complain(len(wrong) == 0 && s.keysPerPage() > maxRanks, "%d keys of one page: at most %d", s.keysPerPage(),
		maxRanks)
	return errors.Join(append(wrong, s.Master.check())...)
}

func (v *VLLM) check() error {
	var wrong []error
	complain := func(bad bool, format string, args ...any) {
		if bad {
			wrong = append(wrong, fmt.Errorf(format, args...))
		}
	}
	complain(modelTail(v.ModelName) == "", "model_name %q has no last element", v.ModelName)
	complain(v.TPSize < 1 || v.TPSize > maxRanks, "tp_size %d: want 1 to %d", v.TPSize, maxRanks)
	complain(v.PPSize < 1 || v.PPSize > maxRanks, "pp_size %d: want 1 to %d", v.PPSize, maxRanks)
	complain(v.PCPSize < 0 || v.PCPSize > maxRanks, "pcp_size %d: want 0 to %d", v.PCPSize, maxRanks)
	complain(v.DCPSize < 0 || v.DCPSize > maxRanks, "dcp_size %d: want 0 to %d", v.DCPSize, maxRanks)
	complain(v.NumKVHead < 1, "num_kv_heads %d: want 1 or more", v.NumKVHead)
	complain(v.DCPSize > 1 && v.TPSize%v.DCPSize != 0, "tp_size %d is no multiple of dcp_size %d", v.TPSize, v.DCPSize)
	complain(len(wrong) == 0 && v.TPSize*v.PPSize*max(v.PCPSize, 1) > maxRanks,
		"%d ranks: at most %d", v.TPSize*v.PPSize*max(v.PCPSize, 1), maxRanks)
	switch v.algo() {
	case algoSHA256, algoXXH3:
		complain(v.HashBlockSize > maxPickled, "hash_block_size %d with hash_algo %s: at most %d", v.HashBlockSize,
			v.algo(), maxPickled)
	case algoSHA256CBOR, algoXXH3CBOR:
	default:
		complain(true, "hash_algo %q: want %s, %s, %s or %s", v.HashAlgo, algoSHA256, algoSHA256CBOR, algoXXH3,
			algoXXH3CBOR)
	}
	complain(v.HashLookahead < 0 || v.HashLookahead > maxLookahead, "hash_lookahead_tokens %d: want 0 to %d",
		v.HashLookahead, maxLookahead)
	if v.EngineVersion != "" {
		_, err := parseVersion(v.EngineVersion)
		complain(err != nil, "%v", err)
	}
	if _, err := NewCoordinator(v.Layout()); err != nil {
		wrong = append(wrong, err)
	}
	return errors.Join(append(wrong, v.Master.check())...)
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
	return ""
}
