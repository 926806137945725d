package main

import (
	"cmp"
	"log/slog"

	"github.com/kvatlas/kvatlas/internal/enginehttp"
	"github.com/kvatlas/kvatlas/internal/strictjson"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// learnStore is a configuration of SGLang's store with what the engine says and the configuration leaves open: its
// release, the model's name, the objects of a page, and how much it loads ahead.
// Any other configuration is returned as it is.
func learnStore(c *hicache.Config, said enginehttp.Engine, log *slog.Logger) *hicache.Config {
	if c == nil || c.SGLang == nil || said.Store == nil {
		return c
	}
	s := *c.SGLang
	s.EngineVersion = cmp.Or(s.EngineVersion, said.Version)
	s.ModelName = cmp.Or(s.ModelName, said.Model)
	s.PrefetchCapacity = cmp.Or(s.PrefetchCapacity,
		hicache.PrefetchLimit(s.EngineVersion, said.Store.HostTokens, said.Store.DeviceTokens, said.Store.BufferOnly))
	learned := &hicache.Config{SGLang: &s}
	if s.ObjectLayout == nil && said.Store.Layout != nil {
		err := strictjson.Unmarshal(said.Store.Layout, &s.ObjectLayout)
		if err == nil {
			err = learned.Check()
		}
		if err != nil {
			log.Warn("the engine's list of a page's objects in the shared store is not used", "error", err, "what_to_do",
				"correct --l3-config where it contradicts the engine; until then l3 of this worker is an upper bound")
			s.ObjectLayout = nil
		}
	}
	if err := learned.Check(); err != nil {
		log.Warn("what the engine says of its shared store contradicts --l3-config and is not used", "error", err,
			"what_to_do", "correct --l3-config")
		return c
	}
	reason := ""
	if l := s.ObjectLayout; l != nil {
		reason = l.Reason
	}
	log.Info("the engine says how it uses the shared store", "version", s.EngineVersion, "objects_listed",
		s.Listed(), "not_listed_because", reason, "prefetch_capacity_limit", s.PrefetchCapacity)
	return learned
}
