package hicache

import (
	"errors"
	"fmt"
)

// Check returns an error if c is invalid.
func (c *Config) Check() error {
	switch {
	case c.SGLang != nil && c.VLLM != nil:
		return errors.New("hicache: a worker has both a store of SGLang and a store of vLLM")
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

// complaints are the faults of a configuration.
type complaints []error

func (c *complaints) add(bad bool, format string, args ...any) {
	if bad {
		*c = append(*c, fmt.Errorf(format, args...))
	}
}

// unless adds a complaint if the field is not between least and most.
func (c *complaints) unless(field string, is, least, most int) {
	c.add(is < least || is > most, "%s %d: want %d to %d", field, is, least, most)
}

// version adds a complaint about an invalid release. An empty release is valid.
func (c *complaints) version(text string) {
	if _, err := parseVersion(text); text != "" {
		c.add(err != nil, "%v", err)
	}
}

func (s *SGLang) check() error {
	var wrong complaints
	wrong.add(s.Backend != mooncakeBackend && s.Backend != fileBackend, "backend %q: only %s and %s are known", s.Backend,
		mooncakeBackend, fileBackend)
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
	wrong.add(s.Backend == mooncakeBackend && s.givenPrefix() == nil && s.modelInKeys() && s.ModelName == "",
		"the store's keys have the model's name (model_in_keys, or engine_version 0.5.17 and later), but there is no "+
			"model_name and no key_prefix")
	wrong.add(s.Backend == fileBackend && s.ModelName == "", "backend file without a model_name")
	wrong.add(s.Backend == fileBackend && s.Directory == "", "backend file without a directory")
	if s.ObjectLayout != nil {
		s.ObjectLayout.check(&wrong, s)
	}
	wrong.add(len(wrong) == 0 && s.keysPerPage() > maxRanks, "%d keys of one page: at most %d", s.keysPerPage(),
		maxRanks)
	return errors.Join(append(wrong, s.Master.Check())...)
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
	return errors.Join(append(wrong, v.Master.Check())...)
}
