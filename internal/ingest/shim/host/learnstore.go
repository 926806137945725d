package host

import (
	"cmp"
	"fmt"
	"log/slog"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// Reset removes the findings about an engine process. The store stays registered until the next process has announced
// its groups.
func (w *watcher) Reset() {
	w.Examiner.Reset()
	w.groups = hicache.Observed{}
}

// learnGroups registers the store with the KV-cache groups of the events, if --l3-config lists no groups.
func (w *watcher) learnGroups(list []events.Event) {
	if w.cfg.l3 == nil || !w.cfg.l3.Open() || w.report == nil {
		return
	}
	more := false
	for i := range list {
		more = w.groups.Add(&list[i]) || more
	}
	if !more {
		return
	}
	if c, usable := w.groups.Config(w.cfg.l3, w.cfg.BlockSize); usable {
		w.report.SetStore(&c)
		w.log.Info("the shared store is registered with the groups of the engine's events", "groups",
			len(c.VLLM.Groups), "last", fmt.Sprintf("%+v", c.VLLM.Groups[len(c.VLLM.Groups)-1]))
	}
}

// learnStore completes a configuration of SGLang's store with missing facts of the engine: release, name of the model,
// objects of a page, and the limit of loads ahead. Configurations of further stores stay unchanged.
func learnStore(c *hicache.Config, said enginehttp.Engine, log *slog.Logger) *hicache.Config {
	if c == nil || c.SGLang == nil || said.Store == nil {
		return c
	}
	s := *c.SGLang
	s.EngineVersion = cmp.Or(s.EngineVersion, said.Version)
	s.ModelName = cmp.Or(s.ModelName, said.Model)
	s.PrefetchCapacity = cmp.Or(s.PrefetchCapacity,
		s.PrefetchLimit(said.Store.HostTokens, said.Store.DeviceTokens, said.Store.BufferOnly))
	learned := &hicache.Config{SGLang: &s}
	if s.ObjectLayout == nil && said.Store.Layout != nil {
		err := strictjson.Unmarshal(said.Store.Layout, &s.ObjectLayout)
		if err == nil {
			err = learned.Check()
		}
		if err != nil {
			log.Warn("the engine's list of a page's objects in the shared store is not used", "error", err, "what_to_do",
				"correct the contradicting fields of --l3-config; until then l3 of this worker is an upper bound")
			s.ObjectLayout = nil
		}
	}
	if err := learned.Check(); err != nil {
		log.Warn("the engine's report of the shared store contradicts --l3-config and is ignored", "error", err,
			"what_to_do", "correct --l3-config")
		return c
	}
	reason := ""
	if l := s.ObjectLayout; l != nil {
		reason = l.Reason
	}
	log.Info("read the engine's use of the shared store", "version", s.EngineVersion, "objects_listed",
		s.Listed(), "not_listed_because", reason, "prefetch_capacity_limit", s.PrefetchCapacity)
	return learned
}
