package main

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// maxRanks is how many ranks one process shims at the most.
const maxRanks = 1024

// ofRank is what to do for the i-th of the ranks: vllm-project/vllm › vllm/distributed/kv_events.py,
// offset_endpoint_port, adds the rank to the ports of all endpoints, and SGLang does the same.
func (r *running) ofRank(i uint32) (*running, error) {
	one := *r
	one.rank += i
	var err error
	if one.engine, err = offset(r.engine, i); err == nil && r.replay != "" {
		one.replay, err = offset(r.replay, i)
	}
	if err == nil && r.engineSnapshot != "" {
		one.engineSnapshot, err = offset(r.engineSnapshot, i)
	}
	return &one, err
}

// offset adds to an endpoint's port.
func offset(endpoint string, by uint32) (string, error) {
	if by == 0 {
		return endpoint, nil
	}
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", fmt.Errorf("several ranks need tcp:// endpoints: %s has no port to count from", endpoint)
	}
	host, text, err := net.SplitHostPort(rest)
	if err != nil {
		return "", err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port+uint64(by) > 65535 {
		return "", fmt.Errorf("%s: there is no port %s + %d", endpoint, text, by)
	}
	return "tcp://" + net.JoinHostPort(host, strconv.FormatUint(port+uint64(by), 10)), nil
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
