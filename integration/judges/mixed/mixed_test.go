//go:build judges

package mixed

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

const (
	old = true
	now = false

	partitions = 8
	model      = "m"
)

// site is a NATS server with nodes of both versions, and engines with shims of both versions.
type site struct {
	*testing.T
	ctx     context.Context
	nats    string
	ns      *jetstream.Namespace
	client  *client.Client
	nodes   map[string]*harness.Process
	before  map[string]bool   // nodes of the version before
	https   map[string]string // where the nodes serve HTTP
	engines map[string]*enginesim.Engine
	shims   map[string]*harness.Process
	prompts map[string][]uint32 // the last prompt of every engine; all prompts have a common prefix
}

func newSite(t *testing.T) *site {
	ctx, cancel := context.WithTimeout(t.Context(), 4*harness.Patience)
	t.Cleanup(cancel)
	return &site{T: t, ctx: ctx, nats: harness.StartNATS(t), nodes: map[string]*harness.Process{},
		before: map[string]bool{}, https: map[string]string{},
		engines: map[string]*enginesim.Engine{}, shims: map[string]*harness.Process{}, prompts: map[string][]uint32{}}
}

func (s *site) program(version bool, name string) string {
	if version == old {
		return harness.Before(s, name)
	}
	return name
}

// node starts a node and waits for readiness.
func (s *site) node(version bool, id string) {
	s.Helper()
	args := []string{"serve", "--nats", s.nats, "--node-id", id, "--replication", "2", "--partitions",
		fmt.Sprint(partitions), "--http-listen", "127.0.0.1:0", "--drain-timeout", "15m", "--snapshot-interval", "1h"}
	if version == now { // all nodes in a zone, so that the owners differ from the choice of the previous version
		args = append(args, "--zone", "rack-1")
	}
	p := harness.Start(s, s.program(version, "indexer"), args...)
	s.nodes[id], s.before[id] = p, version == old
	s.https[id] = p.WaitFor(`HTTP is served" listen=(\S+)`)[1]
	p.WaitFor(`msg=ready`)
	if s.ns == nil {
		s.ns = harness.OpenNamespace(s, s.ctx, s.nats)
		s.client = harness.Client(s, s.ns.Conn(), "default", client.Options{})
	}
}

// shim starts a worker's shim, and the engine if necessary.
func (s *site) shim(version bool, worker string) {
	s.Helper()
	if s.engines[worker] == nil {
		s.engines[worker] = harness.StartSimEngine(s)
	}
	e := s.engines[worker]
	args := []string{"run", "--engine", e.Endpoint(), "--replay", e.Replay(), "--instance", worker, "--model", model,
		"--block-size", fmt.Sprint(harness.BlockSize), "--nats", s.nats}
	if version == now { // previous nodes read the records too
		args = append(args, "--role", "decode", "--total-kv-blocks", "1000", "--taint", "a", "--topology", "zone=eu-1")
	}
	s.shims[worker] = harness.Start(s, s.program(version, "worker-shim"), args...)
	s.shims[worker].WaitFor("caught up")
}

// serve serves a prompt on an engine: common blocks and own blocks.
func (s *site) serve(worker string, common, own int) {
	s.Helper()
	prompt := harness.Tokens(1, common*harness.BlockSize)
	prompt = append(prompt, harness.Tokens(1_000_000*(len(s.prompts)+1)+len(s.prompts[worker]),
		own*harness.BlockSize)...)
	harness.ServePrompt(s, s.engines[worker], prompt)
	s.prompts[worker] = prompt
}

// hybrid publishes a worker of a hybrid model with ten blocks. The engine can continue from eight.
func (s *site) hybrid(worker events.WorkerID) {
	s.Helper()
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		s.Fatal(err)
	}
	full := events.Event{Kind: events.Stored, Tier: events.Device, Attention: events.AttentionFull,
		Locals: hasher.Hash(nil, harness.Tokens(1, 10*harness.BlockSize))}
	for i := range full.Locals {
		full.Blocks = append(full.Blocks, events.BlockHash(i+1))
	}
	window := events.Event{Kind: events.Stored, Tier: events.Device, Group: 1, Attention: events.AttentionSlidingWindow,
		Window: 2 * harness.BlockSize, Blocks: full.Blocks[5:8]}
	harness.PublishAs(s, s.ctx, s.ns, worker, &events.Batch{Incarnation: 1, FirstID: 1, Model: model,
		BlockSize: harness.BlockSize, Events: []events.Event{full, window}})
}

// settled waits until two of the nodes serve every partition, by the command of either version.
func (s *site) settled() {
	s.Helper()
	for _, version := range []bool{old, now} {
		harness.Eventually(s, fmt.Sprintf("%d nodes have settled", len(s.nodes)), func() (bool, string) {
			var status api.ClusterStatus
			text := s.command(version, &status, "cluster")
			total := 0
			for _, n := range status.Nodes {
				total += len(n.Ready)
			}
			copies := min(2, len(s.nodes))
			return len(status.Nodes) == len(s.nodes) && total == partitions*copies && len(status.Short) == 0, text
		})
	}
}

// command runs a command of either version that prints JSON.
func (s *site) command(version bool, into any, words ...string) string {
	s.Helper()
	r := harness.Run(s, s.program(version, "indexer"), append(words, "--nats", s.nats, "--json")...)
	if r.Code != 0 || json.Unmarshal([]byte(r.Stdout), into) != nil {
		return fmt.Sprintf("%v: %+v", words, r)
	}
	return r.Stdout
}

// volatile are fields that depend on the moment or the node, and fields that the previous version does not have.
var volatile = []string{"record", "stale_ms", "age_ms", "seq", "expires_in_ms", "renewed_ms", "age_seconds", "lease",
	"cleared"}

// steady removes the volatile fields from a JSON value. A value under both an old and a new name is removed under the
// old name.
func steady(v any) any {
	switch v := v.(type) {
	case map[string]any:
		maps.DeleteFunc(v, func(name string, _ any) bool { return slices.Contains(volatile, name) })
		if pending, both := v["pending"]; both && reflect.DeepEqual(pending, v["parked"]) {
			delete(v, "pending")
		}
		for name := range v {
			v[name] = steady(v[name])
		}
	case []any:
		for i := range v {
			v[i] = steady(v[i])
		}
	case string:
		if v == "unknown_block" { // the rank's node cannot see other holders
			return "not_held"
		}
	}
	return v
}

// equal waits until all nodes over HTTP, and the commands of both versions over NATS, have the same right answers.
func (s *site) equal(when string) {
	s.Helper()
	type question struct {
		method, path string
		body         any
		words        []string
	}
	var questions []question
	for worker, prompt := range s.prompts {
		tokens := harness.CommaList(prompt)
		for _, explain := range []bool{false, true} {
			q := question{"POST", "/v1/find", api.Query{Model: model, Tokens: prompt, Explain: explain},
				[]string{"query", "--model", model, "--tokens", tokens}}
			if explain {
				q.words = append(q.words, "--explain")
			}
			questions = append(questions, q)
		}
		harness.Eventually(s, when+": "+worker+" is found", func() (bool, string) {
			a, err := s.client.Find(s.ctx, &api.Query{Model: model, Tokens: prompt})
			if err != nil || !a.Complete {
				return false, fmt.Sprintf("%+v, %v", a, err)
			}
			found := map[string]uint32{}
			for _, o := range a.Workers {
				found[string(o.Instance)] = o.Device
			}
			hit := uint32(s.engines[worker].Hit(prompt))
			return found[worker] == hit && hit > 0 && found["hybrid"] == 8, fmt.Sprintf("%v, want %d", found, hit)
		})
	}
	questions = append(questions, question{method: "GET", path: "/v1/workers", words: []string{"workers"}})
	for _, q := range questions {
		harness.Eventually(s, fmt.Sprintf("%s: all answers are equal: %.60s", when, q.words), func() (bool, string) {
			answers := map[string]any{}
			for id, addr := range s.https {
				var v any
				if err := harness.HTTPDo(addr, q.method, q.path, q.body, &v); err != nil {
					return false, err.Error()
				}
				answers[id] = steady(v)
			}
			for name, version := range map[string]bool{"old command": old, "new command": now} {
				var v any
				if text := s.command(version, &v, q.words...); v == nil {
					return false, text
				}
				answers[name] = steady(v)
			}
			first := answers["new command"]
			for name, v := range answers {
				if !reflect.DeepEqual(v, first) {
					return false, fmt.Sprintf("the answer of %s is\n%v\nof the new command\n%v", name, v, first)
				}
			}
			return true, ""
		})
	}
}

// healthy waits until the commands of both versions report all nodes without problems, and equal replicas.
func (s *site) healthy(when string) {
	s.Helper()
	for _, version := range []bool{old, now} {
		harness.Eventually(s, when+": the status is of all nodes, without problems", func() (bool, string) {
			var status struct {
				Nodes    []struct{ Node string }
				Problems []string
			}
			text := s.command(version, &status, "status")
			return len(status.Nodes) == len(s.nodes) && len(status.Problems) == 0, text
		})
		harness.Eventually(s, when+": replicas have the same checksum", func() (bool, string) {
			r := harness.Run(s, s.program(version, "indexer"), "status", "--verify", "--nats", s.nats)
			return r.Code == 0 && strings.Count(r.Stdout, "\n") > partitions, fmt.Sprintf("%+v", r)
		})
	}
}

// TestMixedCluster runs nodes and shims of both versions in a cluster. All nodes and commands have the same right
// answers, also after the death of a node of either version.
func TestMixedCluster(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.node(old, "a")
	s.node(now, "b")
	s.node(now, "c")
	s.node(old, "d")
	for i, version := range []bool{old, now, old, now} {
		worker := fmt.Sprint("w", i)
		s.shim(version, worker)
		s.serve(worker, 12, 3*i)
	}
	s.hybrid("hybrid")
	s.settled()
	s.equal("four nodes")
	s.healthy("four nodes")
	s.zones()
	s.drained("w0", "w1")
	s.equal("two workers are drained")
	for _, id := range []string{"a", "b"} {
		s.nodes[id].Kill()
		delete(s.nodes, id)
		delete(s.https, id)
		s.settled()
		s.serve("w0", 12, 5)
		s.serve("w1", 12, 7)
	}
	s.equal("a node of each version")
	s.records("a node of each version", "w0", "w1")
}

// zones waits until every node's status has the zones of all nodes with a zone.
func (s *site) zones() {
	s.Helper()
	harness.Eventually(s, "zones are shown", func() (bool, string) {
		var r survey.Report
		text := s.command(now, &r, "status")
		return len(r.Nodes) == len(s.nodes) && !slices.ContainsFunc(r.Nodes, func(n survey.Node) bool {
			return (n.Zone == "rack-1") == s.before[n.Node]
		}), text
	})
}

// drained drains workers, and waits until every current node reports them as drained.
func (s *site) drained(workers ...string) {
	s.Helper()
	for _, w := range workers {
		if r := harness.Run(s, "indexer", "workers", "drain", w, "--nats", s.nats); r.Code != 0 {
			s.Fatalf("drain %s: %+v", w, r)
		}
	}
	s.records("drained", workers...)
}

// records waits until every current node has a record of every worker with a shim, and the given workers are drained.
func (s *site) records(when string, drained ...string) {
	s.Helper()
	for id, addr := range s.https {
		harness.Eventually(s, when+": node "+id+" has the records", func() (bool, string) {
			var list api.WorkerList
			if err := harness.HTTPDo(addr, "GET", "/v1/workers", nil, &list); err != nil {
				return false, err.Error()
			}
			states := map[string]api.WorkerState{}
			for _, w := range list.Workers {
				if w.Record != nil {
					states[string(w.Instance)] = w.Record.State
				}
			}
			if s.before[id] && len(states) == 0 {
				return true, "" // the node has no records
			}
			for w := range s.shims {
				want := api.WorkerSchedulable
				if slices.Contains(drained, w) {
					want = api.WorkerDraining
				}
				if states[w] != want {
					return false, fmt.Sprint(states)
				}
			}
			return true, ""
		})
	}
}

// TestUpgradeAndBack restarts nodes and shims of the previous version as the current version, in sequence, on the same
// snapshots and log, during events. Then it restarts a node as the previous version on the snapshots and the log of the
// current version.
func TestUpgradeAndBack(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	ids := []string{"a", "b", "c"}
	for _, id := range ids {
		s.node(old, id)
	}
	workers := []string{"w0", "w1", "w2"}
	for i, w := range workers {
		s.shim(old, w)
		s.serve(w, 12, 3*i)
	}
	s.hybrid("hybrid")
	s.settled()
	s.equal("all of the version before")
	s.healthy("all of the version before")
	snapshot := func(version bool) {
		t.Helper()
		if r := harness.Run(t, s.program(version, "indexer"), "snapshot", "now", "--nats", s.nats); r.Code != 0 {
			t.Fatalf("snapshot now: %+v", r)
		}
	}
	restart := func(version bool, id string) {
		t.Helper()
		s.nodes[id].Stop()
		s.serve("w0", 12, 4) // the log goes on behind the snapshot
		s.node(version, id)
		if !strings.Contains(s.nodes[id].Said(), "restored") {
			t.Errorf("node %s does not log a snapshot:\n%s", id, s.nodes[id].Said())
		}
		s.settled()
	}
	snapshot(old)
	lives := func() (list []events.Incarnation) {
		var all api.WorkerList
		s.command(now, &all, "workers")
		for _, w := range all.Workers {
			list = append(list, w.Incarnation)
		}
		return list
	}
	begun := lives()
	for i, id := range ids {
		restart(now, id)
		s.shims[workers[i]].Stop()
		s.shim(now, workers[i])
		s.serve(workers[i], 12, 2+i)
		s.equal("node " + id + " is of this version")
		s.healthy("node " + id + " is of this version")
	}
	if got := lives(); !slices.Equal(got, begun) || len(got) != len(workers)+1 {
		t.Errorf("incarnations %v, before %v: a new shim must continue the incarnation", got, begun)
	}
	s.drained("w0")
	snapshot(now)
	snapshot(now) // both kept snapshots are of the current version
	restart(old, "c")
	s.shims["w2"].Stop()
	s.shim(old, "w2")
	s.serve("w2", 12, 9)
	s.equal("node c and shim w2 are of the version before again")
	s.healthy("node c and shim w2 are of the version before again")
	s.records("node c and shim w2 are of the version before again", "w0")
	if got := lives(); !slices.Equal(got, begun) {
		t.Errorf("incarnations %v, before %v", got, begun)
	}
}
