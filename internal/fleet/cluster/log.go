package cluster

import "slices"

// reported is the state of the cluster in the log lines so far. The goroutine of Join, and then of Run, owns it.
type reported struct {
	peers    []string
	owned    string
	problems []string
	silent   bool // other nodes receive no heartbeats of this node
}

// reportTrouble logs an error in the heartbeats of this node, and the recovery.
func (m *Member) reportTrouble(err error) {
	r := &m.reported
	switch {
	case err == nil && r.silent:
		r.silent = false
		m.cfg.Log.Info("other nodes receive the heartbeats of this node again")
	case err != nil && !r.silent && len(r.peers) > 0:
		r.silent = true
		m.cfg.Log.Warn("other nodes do not receive the heartbeats of this node, which retries", "error", err, "what_to_do",
			"check that NATS has room and that more than half of its servers are up; queries are answered meanwhile")
	}
}

// reportView logs the differences between a view and the view before.
func (m *Member) reportView(v *View) {
	log, r := m.cfg.Log, &m.reported
	var peers []string
	for i := range v.Peers {
		peers = append(peers, v.Peers[i].Node)
	}
	for _, name := range peers {
		if !slices.Contains(r.peers, name) {
			log.Info("a node is there", "node", name)
		}
	}
	for _, name := range r.peers {
		if !slices.Contains(peers, name) {
			log.Info("a node is gone", "node", name)
		}
	}
	for _, problem := range v.Problems {
		if !slices.Contains(r.problems, problem) {
			log.Warn(problem, "what_to_do", "give all nodes of the namespace one version and one --partitions")
		}
	}
	if owned := v.Owned.String(); owned != r.owned {
		if r.owned == "" {
			log.Info("this node keeps partitions", "partitions", owned)
		} else {
			log.Info("this node keeps other partitions", "partitions", owned, "before", r.owned)
		}
		r.owned = owned
	}
	r.peers, r.problems = peers, v.Problems
}
