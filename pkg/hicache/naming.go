package hicache

import (
	"slices"
	"strings"
)

// Releases of SGLang that changed names (python/sglang/srt/mem_cache/storage/mooncake_store/mooncake_store.py and
// hicache_storage.py of the published wheels).
var (
	rankStyleSince  = version{0, 5, 8}
	modelKeysSince  = version{0, 5, 17}
	namespacesSince = version{0, 5, 20}
	poolsSince      = version{0, 5, 11} // several pools per page (batch_exists_v2)
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

// keyPrefix returns the prefix of Mooncake's keys, before an underscore. "" means no prefix.
func (s *SGLang) keyPrefix() string {
	if given := s.givenPrefix(); given != nil {
		return *given
	}
	model := strings.ReplaceAll(s.ModelName, "/", "-")
	switch {
	case !s.modelInKeys():
		return s.ExtraBackendTag
	case s.ExtraBackendTag == "":
		return model
	}
	return s.ExtraBackendTag + "_" + model
}

// givenPrefix returns the registered prefix of keys: KeyPrefix, or the prefix in the layout, which exists even without
// a list of objects. It returns nil without a prefix.
func (s *SGLang) givenPrefix() *string {
	if l := s.ObjectLayout.inner(); s.KeyPrefix == nil && l != nil {
		return l.KeyPrefix
	}
	return s.KeyPrefix
}

// hybridFamilies are parts of the names of models that SGLang keeps in several pools. SGLang serves no layout for
// models with ranks in the keys. The list only marks a result as an upper bound: a model outside of the list needs
// Hybrid.
var hybridFamilies = []string{"gpt-oss", "qwen3-next", "qwen3.5", "deepseek-v3.2", "deepseek-v4", "kimi-linear",
	"llama-4", "gemma-3", "gemma-4", "mimo-v2", "step-3.5", "step3p5", "falcon-h1", "nemotron-h", "jamba", "lfm2",
	"granite-4", "minimax-text", "minimax-m1"}

// bounded reports whether the content of a store is only an upper bound of the engine's loads: the engine may need
// objects of further pools, and no ObjectLayout lists them. Hybrid overrides the rule. Without Hybrid, the rule applies
// to MLA models and to known hybrid models, unless the release has no such pools.
func (s *SGLang) bounded() bool {
	switch {
	case s.Backend != mooncakeBackend || s.layout() != nil:
		return false
	case s.Hybrid != nil:
		return *s.Hybrid
	}
	if s.EngineVersion != "" && !since(s.EngineVersion, poolsSince) {
		return false
	}
	name := strings.ToLower(s.ModelName + " " + s.keyPrefix())
	return s.IsMLA || slices.ContainsFunc(hybridFamilies, func(part string) bool { return strings.Contains(name, part) })
}

// settled returns s with all defaults of the release set, so that configurations with equal object names are equal.
func (s SGLang) settled() SGLang {
	model := s.modelInKeys()
	s.ModelInKeys, s.MLAKeyStyle, s.Namespaces = &model, map[bool]string{true: "plain", false: "rank"}[s.plainStyle()],
		map[bool]string{true: "ignored", false: "hashed"}[s.namespacesIgnored()]
	if !s.IsMLA {
		s.MLAKeyStyle = ""
	}
	if !model && s.Backend == mooncakeBackend {
		s.ModelName = ""
	}
	if s.TenantID == defaultTenant {
		s.TenantID = ""
	}
	s.EngineVersion, s.KVEventsEndpoint, s.Hybrid = "", "", nil
	return s
}

// differing returns two settled configurations without the fields that may differ: the limits of loads, and for equal
// object names, the parts of the names.
func differing(a, b *SGLang) (x, y SGLang) {
	x, y = a.settled(), b.settled()
	y.PrefetchThreshold, y.PrefetchCapacity = x.PrefetchThreshold, x.PrefetchCapacity
	if x.Backend != mooncakeBackend || y.Backend != mooncakeBackend {
		return x, y
	}
	p, q := x.keyPrefix(), y.keyPrefix()
	if p == q || a.givenPrefix() != nil || b.givenPrefix() != nil {
		for s, prefix := range map[*SGLang]string{&x: p, &y: q} {
			s.KeyPrefix, s.ExtraBackendTag, s.ModelName, s.ModelInKeys = &prefix, "", "", nil
		}
	}
	if a.sameSuffixes(b) {
		for _, s := range []*SGLang{&x, &y} {
			s.TPSize, s.PPSize, s.IsMLA, s.MLAKeyStyle, s.TPLCMSize, s.ShouldSplitHeads = 0, 0, false, "", 0, false
			s.ObjectLayout = nil
		}
	}
	return x, y
}

// sameSuffixes reports whether two configurations have the same object names, except for the prefix.
func (s *SGLang) sameSuffixes(other *SGLang) bool {
	suffixes, trailing, _ := s.objects()
	others, windows, _ := other.objects()
	slices.Sort(suffixes)
	slices.Sort(others)
	return slices.Equal(suffixes, others) && slices.EqualFunc(trailing, windows, func(a, b Pool) bool {
		return a.TrailingPages == b.TrailingPages && slices.Equal(a.Suffixes, b.Suffixes)
	})
}
