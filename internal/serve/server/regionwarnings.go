package server

import (
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/regions"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// sighting is a name with a wrong configuration.
type sighting struct {
	name        string
	since, last time.Duration
}

// note records a message of a name, unless another name sent one recently.
func (x *sighting) note(name string, now, recent time.Duration) {
	if now-x.last > recent {
		*x = sighting{}
	}
	if x.name == "" {
		*x = sighting{name: name, since: now}
	}
	if x.name == name {
		x.last = now
	}
}

// persists reports whether the last message is recent, and the first one is at least this old.
func (x *sighting) persists(now, recent, old time.Duration) bool {
	return x.name != "" && now-x.last <= recent && now-x.since >= old
}

// receiveRegion counts messages of other regions on the subject that servers must not pass on.
func (s *Server) receiveRegion(m jetstream.Request) {
	r, name := s.regional, string(m.Body)
	if name == r.Name || regions.CheckName(name) != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.leaks++; r.leaks == 1 {
		s.log.Warn("requests reach other regions: NATS passes on more than digests", "region", name, "what_to_do", leakRemedy)
	}
	r.leaking.note(name, r.now(), r.MaxAge)
}

const leakRemedy = "permit only the digests' subject on the leaf node connections; see docs/regions.md"

// regionsStatus returns the state of the exchange, or nil without a region, and warnings.
func (s *Server) regionsStatus() (out *api.RegionsStatus, warnings []string) {
	r := s.regional
	if r == nil {
		return nil, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now, c, status := r.now(), r.machine.Counts(), r.published
	out = &status
	out.Region, out.Leaks = r.Name, r.leaks
	out.Received, out.Malformed, out.Broken, out.Refused = c.Digests, c.Malformed, c.Broken, c.Refused
	out.Regions = append([]api.RegionStatus{}, r.view.Load().Status(now)...)
	if r.leaking.persists(now, r.MaxAge, 0) {
		warnings = append(warnings, fmt.Sprintf("requests of region %s reach this region: NATS passes on more than digests; "+
			"what to do: %s", r.leaking.name, leakRemedy))
	}
	if r.twin.persists(now, r.MaxAge, r.MaxAge) { // a node that joins may be unknown at first
		warnings = append(warnings, fmt.Sprintf("node %s of another cluster publishes digests with this region's name, %s, "+
			"which are ignored; what to do: start its indexer serve with another --region", r.twin.name, r.Name))
	}
	for _, x := range out.Regions {
		if x.PriceMS != nil && x.State == api.RegionUnknown && now > r.MaxAge {
			warnings = append(warnings, fmt.Sprintf("the blocks of region %s are unknown: %s; what to do: check that its nodes "+
				"run with --region %s, and that NATS connects the regions; docs/regions.md", x.Region, x.Reason, x.Region))
		}
	}
	return out, warnings
}
