package host

import (
	"fmt"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
)

// OfRank returns the shim of the i-th rank. vllm-project/vllm › vllm/distributed/kv_events.py, offset_endpoint_port,
// adds the rank to the ports of all endpoints, and SGLang does the same.
func (s *Shim) OfRank(i uint32) (*Shim, error) {
	one := *s
	one.Rank += i
	var err error
	if one.Engine, err = zmtp.PortsAfter(s.Engine, i); err == nil && s.Replay != "" {
		one.Replay, err = zmtp.PortsAfter(s.Replay, i)
	}
	return &one, err
}

// checkPorts finds ranks with missing or shared endpoints. For example, a replay port next to the event port is the
// event port of rank 1.
func (s *Shim) checkPorts() error {
	taken := map[string]string{}
	for i := range s.Ranks {
		one, err := s.OfRank(i)
		if err != nil {
			return fmt.Errorf("--ranks %d: %w", s.Ranks, err)
		}
		for _, e := range []struct{ what, endpoint string }{{"event", one.Engine}, {"replay", one.Replay}} {
			what := fmt.Sprintf("rank %d's %s endpoint", one.Rank, e.what)
			if other := taken[e.endpoint]; other != "" && e.endpoint != "" {
				return fmt.Errorf(
					"%s is both %s and %s: leave --ranks ports between --engine and --replay, in the engine's configuration too", e.endpoint, other, what)
			}
			taken[e.endpoint] = what
		}
	}
	return nil
}
