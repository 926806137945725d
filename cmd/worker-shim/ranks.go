package main

import (
	"fmt"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
)

const maxRanks = 1024

// ofRank is what to do for the i-th of the ranks: vllm-project/vllm › vllm/distributed/kv_events.py,
// offset_endpoint_port, adds the rank to the ports of all endpoints, and SGLang does the same.
func (r *running) ofRank(i uint32) (*running, error) {
	one := *r
	one.rank += i
	var err error
	if one.engine, err = zmtp.PortsAfter(r.engine, i); err == nil && r.replay != "" {
		one.replay, err = zmtp.PortsAfter(r.replay, i)
	}
	if err == nil && r.engineSnapshot != "" {
		one.engineSnapshot, err = zmtp.PortsAfter(r.engineSnapshot, i)
	}
	return &one, err
}

// checkPorts finds ranks whose endpoints do not exist, or coincide: a replay port chosen next to the event port is rank
// 1's event port.
func (r *running) checkPorts() error {
	taken := map[string]string{}
	for i := range r.ranks {
		one, err := r.ofRank(i)
		if err != nil {
			return fmt.Errorf("--ranks %d: %w", r.ranks, err)
		}
		for _, e := range []struct{ what, endpoint string }{{"event", one.engine}, {"replay", one.replay},
			{"snapshot", one.engineSnapshot}} {
			if e.what == "snapshot" && e.endpoint == one.replay {
				continue // the replay socket answers that too
			}
			what := fmt.Sprintf("rank %d's %s endpoint", one.rank, e.what)
			if other := taken[e.endpoint]; other != "" && e.endpoint != "" {
				return fmt.Errorf(
					"%s is both %s and %s: leave --ranks ports between --engine and --replay, in the engine's configuration too", e.endpoint, other, what)
			}
			taken[e.endpoint] = what
		}
	}
	return nil
}
