package server

import (
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/index/node"
	"github.com/kvatlas/kvatlas/internal/operate/metrics"
)

// figures returns the values of a scrape. It does not block the application of events.
func (s *Server) figures() *metrics.Figures {
	status, applied := s.node.Recent()
	f := &metrics.Figures{Status: s.complete(status), Ages: ages(&applied.Ages), Loads: s.workerLoads(),
		Spans: s.Tracer.Counts(), Curves: s.curves.Tiers()}
	for class, n := range applied.Events {
		f.Events = append(f.Events, metrics.EventCount{Source: class.Source, Event: class.Kind.String(),
			Tier: class.Tier.String(), Count: n})
	}
	return f
}

// ages is a histogram in seconds.
func ages(a *node.Ages) metrics.Histogram {
	h := metrics.Histogram{Buckets: map[float64]uint64{}, Sum: a.Sum.Seconds()}
	for i, n := range a.Counts {
		h.Count += n
		if i < len(node.AgeBounds) {
			h.Buckets[node.AgeBounds[i].Seconds()] = h.Count
		}
	}
	return h
}

// workerLoads lists the load of every loaded rank and of every model.
func (s *Server) workerLoads() (list []metrics.WorkerLoad) {
	for _, model := range s.loads.Models() {
		name := model.Name
		if model.Group != "" {
			name += ":" + model.Group
		}
		list = append(list, metrics.WorkerLoad{Model: name})
		add := func(t *load.Table) {
			for _, row := range t.Rows() {
				list = append(list, metrics.WorkerLoad{Model: name, Worker: string(row.Rank.Instance),
					Requests: int(row.Requests), PrefillTokens: row.PrefillTokens, Blocks: row.Blocks})
			}
		}
		s.loads.Read(model, add)
		s.loads.ReadForeign(model, add)
	}
	return list
}
