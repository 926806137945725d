package doctor

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/index/node"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestOneFindingForEachCause breaks valid facts in one place, with all consequences: a single finding lists the
// consequences. Two causes are two findings.
func TestOneFindingForEachCause(t *testing.T) {
	unreadable := "partitions 0-7: " + node.LogUnreadable + ": timeout (of partition 0)" + survey.RemedyMark + "see NATS"
	wrongSize := func(f *Facts) {
		f.Records = []registry.Record{{Instance: "w1",
			Shim: &registry.ShimState{Unusable: "32 tokens" + survey.RemedyMark + "16"}}}
		w := &f.Workers.Workers[0]
		w.BlockSize, w.Stored = 32, 0
		w.Record.Because(api.WorkerIncomplete, "no block size")
		f.Shims[0].Heard.Skipped = map[string]uint64{"block_size": 7}
		f.Engines[0].Reported.BlockSize = 32
	}
	for _, c := range []struct {
		name  string
		fault func(*Facts)
		want  string
	}{
		{"a shim has the wrong block size", wrongSize,
			"engine_unusable w1/0 [engine_quiet worker_incomplete events_skipped engine_block_size]"},
		{"and the other worker has another fault", func(f *Facts) {
			wrongSize(f)
			f.Workers.Workers[1].Stored = 0
		}, "engine_quiet w2/0 []; engine_unusable w1/0 [engine_quiet worker_incomplete events_skipped engine_block_size]"},
		{"JetStream has no quorum", func(f *Facts) {
			f.AccountError = jetstream.ErrNoLeader
			f.Nodes.Nodes[0].Status.Problems = []string{unreadable}
			f.Nodes.Nodes[1].Status.Problems = []string{unreadable}
			f.Shims[0].Waiting = &control.Waiting{Why: "timeout", Do: "see NATS"}
		}, "jetstream_down n1 [node_problem shim_waiting]"},
		{"the reason is unknown", func(f *Facts) {
			f.Nodes.Nodes[0].Status.Problems = []string{unreadable, "the token file is empty" + survey.RemedyMark + "correct it"}
			f.Nodes.Nodes[1].Status.Problems = []string{unreadable}
			f.Shims[0].Waiting = &control.Waiting{Why: "timeout", Do: "see NATS"}
		}, "node_problem node a []; node_problem nodes a, b [shim_waiting]"},
		{"a node is gone", func(f *Facts) {
			f.Nodes.Nodes[1].Status.Cluster.Unserved = []events.Partition{2, 3, 4}
			f.Nodes.Nodes[0].Status, f.Workers.Complete, f.Workers.Missing = nil, false, []events.Partition{2, 3, 4}
		}, "node_silent node a [partitions_unserved workers_missing]"},
		{"an engine has ended", func(f *Facts) {
			f.Workers.Workers[0].Engine = api.EngineGone
			f.Shims[0].Heard.ReplayFailed = "refused"
		}, "engine_gone w1/0 [replay_dead]"},
		{"there is no replay endpoint", func(f *Facts) {
			f.Shims[0].Replay = false
			f.Shims[0].Heard.Gaps, f.Shims[0].Heard.JoinedLate = 1, 1
			f.Engines[0].Reported.Ranks[0].Replay = ""
			f.Nodes.Nodes[0].Status.Problems = []string{"w1/0: none of the 5 blocks can be used", "w2/0: other"}
		}, "node_problem node a []; shim_no_replay w1/0 [node_problem messages_lost joined_late engine_no_replay]"},
		{"all logs were changed", func(f *Facts) {
			for p := range events.Partition(3) {
				f.Streams = append(f.Streams, jetstream.StreamState{Name: fmt.Sprint("KV_EVENTS_default_", p+1), Replicas: 1,
					Direct: true, Batches: true, Partition: p + 1})
			}
			for i := range f.Streams {
				f.Streams[i].Odd = []string{"max_age"}
			}
		}, "stream_changed the logs of partitions 0-3 []"},
	} {
		f := fine()
		c.fault(f)
		r := &Report{}
		for _, k := range checks {
			r.Checks = append(r.Checks, Result{Check: k.name, Findings: k.judge(f)})
		}
		r.explain()
		var got []string
		for _, f := range slices.Concat(r.Findings(Error), r.Findings(Warning)) {
			got = append(got, fmt.Sprintf("%s %s %v", f.ID, f.Where, f.Causes))
		}
		slices.Sort(got)
		if got := strings.Join(got, "; "); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// TestSeverityFollowsConsequences: a warning with an error among its consequences is an error, except for an ended
// engine.
func TestSeverityFollowsConsequences(t *testing.T) {
	for cause, want := range map[Fault]Severity{shimNoReplay: Error, engineGone: Warning} {
		rank := events.RankKey{Instance: "w"}
		r := &Report{Checks: []Result{{Findings: []Finding{finding(Warning, cause, "w/0", "", "", "").about(rank, false),
			finding(Error, nodeProblem, "node a", "", "", "").about(rank, false),
			finding(Error, replayDead, "w/0", "", "", "").about(rank, false)}}}}
		r.explain()
		if got := r.Checks[0].Findings[0]; got.Severity != want || len(got.Causes) != 1 {
			t.Errorf("%s: %+v", cause, got)
		}
	}
}

// TestRulesAreInOrder: rules that explain a cause come before the rules of the cause, so every finding is listed with
// its root cause.
func TestRulesAreInOrder(t *testing.T) {
	for i, rule := range consequences {
		for _, later := range consequences[i+1:] {
			if slices.Contains(later.of, rule.cause) && rule.cause != nodeProblem {
				t.Errorf("%s explains %s, but the rule of %s comes earlier", later.cause, rule.cause, rule.cause)
			}
		}
	}
}
