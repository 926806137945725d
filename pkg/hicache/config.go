package hicache

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"reflect"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/internal/dial"
	"github.com/kvatlas/kvatlas/internal/strictjson"
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

// defaultMetricsPort is where a Mooncake master answers HTTP unless told otherwise.
const defaultMetricsPort = 9003

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

// host is the host of an address, which is HOST:PORT or HOST; an IPv6 address stands with or without brackets.
func (m Master) host() (host string, err error) {
	if host, _, err = dial.SplitHostPort(m.Address); err == nil {
		return host, nil
	}
	host = m.Address
	if inner, bracketed := strings.CutPrefix(host, "["); bracketed {
		host = strings.TrimSuffix(inner, "]")
	}
	return host, dial.CheckHost(host)
}

// http is the master's host:port for HTTP, or "" if no address is known.
func (m Master) http() string {
	host, err := m.host()
	if m.Address == "" || err != nil {
		return ""
	}
	return net.JoinHostPort(host, fmt.Sprint(cmp.Or(m.MetricsPort, defaultMetricsPort)))
}

func (m Master) check() error {
	if m.MetricsPort < 0 || m.MetricsPort > 65535 {
		return fmt.Errorf("master_metrics_port %d is no port", m.MetricsPort)
	}
	if _, err := m.host(); m.Address != "" && err != nil {
		return fmt.Errorf("master_server_address is not HOST:PORT: %w", err)
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

// Folder is the folder of the store; "" if it is none. Who reads a configuration of somebody else must know the folder:
// to look into it says what is there.
func (c *Config) Folder() string {
	if c.SGLang != nil && c.SGLang.Backend == "file" {
		return c.SGLang.Directory
	}
	return ""
}

// CheckMaster says what is wrong with the address of the store's master; nil is nothing.
func (c *Config) CheckMaster() error {
	switch {
	case c.SGLang != nil:
		return c.SGLang.Master.check()
	case c.VLLM != nil:
		return c.VLLM.Master.check()
	}
	return nil
}

// Where is the folder, or the host:port for HTTP, of the store; "" if the workers did not say.
func (c *Config) Where() string {
	switch {
	case c.SGLang != nil && c.SGLang.Backend == "file":
		return c.SGLang.Directory
	case c.SGLang != nil:
		return c.SGLang.http()
	case c.VLLM != nil:
		return c.VLLM.http()
	}
	return ""
}

// Identity names the store and how its objects are called: under configurations of one identity, what has the same name
// is the same object. c must have passed Check.
func (c *Config) Identity() string {
	if v := c.VLLM; v != nil {
		return fmt.Sprintf("vllm %q %q %q %q tp%d pp%d pcp%d dcp%d heads%d %v %d", v.http(), v.CachePrefix,
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
	return Rule{most: noBound}
}

// String says in a few words what c is; "" is nothing.
func (c *Config) String() string {
	switch {
	case c == nil:
		return ""
	case c.SGLang != nil && c.SGLang.Backend == "file":
		return "SGLang's files in " + c.SGLang.Directory
	case c.SGLang != nil:
		return "SGLang's pages in " + c.SGLang.Backend + " at " + c.SGLang.http()
	case c.VLLM != nil:
		return "vLLM's blocks in mooncake at " + c.VLLM.http()
	}
	return ""
}

// ParseConfig reads the configuration of one worker, in JSON, and checks it. Fields that are not known, as those of a
// newer engine, are passed over: passed names one of them, and is nil if there is none.
func ParseConfig(data []byte) (c Config, passed, err error) {
	if err = DecodeConfig(data, &c); errors.Is(err, errNoField) {
		passed, c = err, Config{}
		err = decodeError(strictjson.Unmarshal(data, &c))
	}
	if err != nil {
		return Config{}, nil, err
	}
	return c, passed, c.Check()
}

// errNoField: there is no field of that name.
var errNoField = errors.New("there is no field")

// ParseModels reads {"MODEL": configuration, ...}, and says all that is wrong with the configurations.
func ParseModels(data []byte) (map[string]Config, error) {
	var texts map[string]json.RawMessage
	if err := DecodeConfig(data, &texts); err != nil {
		return nil, err
	}
	models := make(map[string]Config, len(texts))
	var wrong complaints
	for model, text := range texts {
		c, passed, err := ParseConfig(text)
		if err == nil {
			err = passed // a person has written it
		}
		models[model] = c
		wrong.add(err != nil, "model %q: %w", model, err)
	}
	return models, errors.Join(wrong...)
}

// DecodeConfig decodes a configuration, or what has some. Its errors name fields as they are written, and say what they
// should be. Whether the values make sense is for [Config.Check].
func DecodeConfig(data []byte, into any) error {
	return decodeError(strictjson.UnmarshalKnown(data, into))
}

// decodeError is an error of strictjson in words.
func decodeError(err error) error {
	if err == nil {
		return nil
	}
	var wrong *json.UnmarshalTypeError
	name, unknown := errors.AsType[strictjson.UnknownField](err)
	switch {
	case unknown:
		return fmt.Errorf("%w %q", errNoField, string(name))
	case errors.Is(err, strictjson.ErrTwice):
		return err
	case errors.As(err, &wrong) && wrong.Field == "":
		return fmt.Errorf("it is %s, not an object", article(wrong.Value))
	case errors.As(err, &wrong):
		return fmt.Errorf("%s is %s, not %s", wrong.Field, article(wrong.Value), wanted(wrong.Type))
	}
	return fmt.Errorf("it is no JSON: %w", err)
}

// article is a kind of JSON value as it is named in messages.
func article(kind string) string {
	switch name, _, _ := strings.Cut(kind, " "); name { // a number that does not fit is "number 1.5"
	case "string":
		return "text"
	case "bool":
		return "true or false"
	case "array":
		return "a list"
	case "object":
		return "an object"
	}
	return strings.Replace(kind, "number", "the number", 1)
}

// wanted is what a field wants, in words.
func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "text"
	case reflect.Slice:
		return "a list"
	case reflect.Struct:
		return "an object"
	}
	return "a whole number in its range"
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

// complaints are what is wrong with a configuration.
type complaints []error

func (c *complaints) add(bad bool, format string, args ...any) {
	if bad {
		*c = append(*c, fmt.Errorf(format, args...))
	}
}

// unless adds a complaint unless a field is from least to most.
func (c *complaints) unless(field string, is, least, most int) {
	c.add(is < least || is > most, "%s %d: want %d to %d", field, is, least, most)
}

// version adds a complaint of a release that is none; an empty one is not given.
func (c *complaints) version(text string) {
	if _, err := parseVersion(text); text != "" {
		c.add(err != nil, "%v", err)
	}
}

func (s *SGLang) check() error {
	var wrong complaints
	wrong.add(s.Backend != "mooncake" && s.Backend != "file", "backend %q: only mooncake and file are known", s.Backend)
	wrong.unless("page_size", s.PageSize, 1, maxPageSize)
	wrong.unless("tp_size", s.TPSize, 1, maxRanks)
	wrong.unless("pp_size", s.PPSize, 1, maxRanks)
	wrong.unless("tp_lcm_size", s.TPLCMSize, 0, maxRanks)
	wrong.add(s.ShouldSplitHeads && s.IsMLA, "should_split_heads of an MLA model, which has no heads to split")
	wrong.add(s.ShouldSplitHeads && s.TPSize > 0 && s.TPLCMSize%s.TPSize != 0,
		"should_split_heads, but tp_lcm_size %d is no multiple of tp_size %d", s.TPLCMSize, s.TPSize)
	wrong.add(s.MLAKeyStyle != "" && s.MLAKeyStyle != "rank" && s.MLAKeyStyle != "plain",
		"mla_key_style %q: want rank or plain", s.MLAKeyStyle)
	wrong.add(s.Namespaces != "" && s.Namespaces != "hashed" && s.Namespaces != "ignored",
		"namespaces %q: want hashed or ignored", s.Namespaces)
	wrong.add(s.PrefetchThreshold < 0, "prefetch_threshold %d is negative", s.PrefetchThreshold)
	wrong.add(s.PrefetchCapacity < 0, "prefetch_capacity_limit %d is negative", s.PrefetchCapacity)
	wrong.version(s.EngineVersion)
	wrong.add(s.Backend == "mooncake" && s.modelInKeys() && s.ModelName == "",
		"the store's keys have the model's name (model_in_keys, or engine_version 0.5.17 and later), but there is no model_name")
	wrong.add(s.Backend == "file" && s.ModelName == "", "backend file without a model_name")
	wrong.add(s.Backend == "file" && s.Directory == "", "backend file without a directory")
	wrong.add(len(wrong) == 0 && s.keysPerPage() > maxRanks, "%d keys of one page: at most %d", s.keysPerPage(),
		maxRanks)
	return errors.Join(append(wrong, s.Master.check())...)
}

func (v *VLLM) check() error {
	var wrong complaints
	wrong.add(modelTail(v.ModelName) == "", "model_name %q has no last element", v.ModelName)
	wrong.unless("tp_size", v.TPSize, 1, maxRanks)
	wrong.unless("pp_size", v.PPSize, 1, maxRanks)
	wrong.unless("pcp_size", v.PCPSize, 0, maxRanks)
	wrong.unless("dcp_size", v.DCPSize, 0, maxRanks)
	wrong.add(v.NumKVHead < 1, "num_kv_heads %d: want 1 or more", v.NumKVHead)
	wrong.add(v.DCPSize > 1 && v.TPSize%v.DCPSize != 0, "tp_size %d is no multiple of dcp_size %d", v.TPSize, v.DCPSize)
	wrong.add(len(wrong) == 0 && v.TPSize*v.PPSize*max(v.PCPSize, 1) > maxRanks,
		"%d ranks: at most %d", v.TPSize*v.PPSize*max(v.PCPSize, 1), maxRanks)
	switch v.algo() {
	case algoSHA256, algoXXH3:
		wrong.add(v.HashBlockSize > maxPickled, "hash_block_size %d with hash_algo %s: at most %d", v.HashBlockSize,
			v.algo(), maxPickled)
	case algoSHA256CBOR, algoXXH3CBOR:
	default:
		wrong.add(true, "hash_algo %q: want %s, %s, %s or %s", v.HashAlgo, algoSHA256, algoSHA256CBOR, algoXXH3,
			algoXXH3CBOR)
	}
	wrong.unless("hash_lookahead_tokens", v.HashLookahead, 0, maxLookahead)
	wrong.version(v.EngineVersion)
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
