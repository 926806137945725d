package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/internal/ingest/enginehttp"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/pkg/events"
)

func judgeShims(f *Facts) (list []Finding) {
	answered := map[events.RankKey]bool{}
	slices.SortFunc(f.Shims, func(a, b control.Shim) int { return a.Key().Compare(b.Key()) })
	for i := range f.Shims {
		answered[f.Shims[i].Key()] = true
		list = append(list, judgeShim(&f.Shims[i])...)
	}
	if f.Workers == nil {
		return list
	}
	for i := range f.Workers.Workers {
		w := &f.Workers.Workers[i]
		key := events.RankKey{Instance: w.Instance, Rank: w.Rank}
		if w.Lease == nil || w.Lease.State != string(registry.Held) || answered[key] {
			continue
		}
		if w.Lease.Stopped != nil {
			list = append(list, finding(Warning, shimStopped, key.String(), "the shim was stopped while its engine ran",
				fmt.Sprintf("process %d on %s stopped at %s; the engine's later events are unknown",
					w.Lease.PID, w.Lease.Host, w.Lease.Stopped.UTC().Format(time.RFC3339)),
				fmt.Sprintf("start its worker-shim again before the lease expires at %s; then the rank is cleared",
					w.Lease.Expires.UTC().Format(time.RFC3339))).about(key, false))
			continue
		}
		list = append(list, finding(Warning, shimSilent, key.String(), "the shim has a lease and does not answer",
			fmt.Sprintf("process %d on %s renewed the lease at %s; no answer on the control subject within two seconds",
				w.Lease.PID, w.Lease.Host, w.Lease.Renewed.UTC().Format(time.RFC3339)),
			"start the process again if it has ended or hangs; otherwise let the shim's NATS user subscribe to the "+
				"control subjects: "+
				"indexer auth create --shim "+escape.Shell(string(w.Instance))).about(key, false))
	}
	return list
}

func judgeShim(s *control.Shim) (list []Finding) {
	where := s.Key().String()
	found := func(id Fault, severity Severity, what, evidence, remedy string) {
		list = append(list, finding(severity, id, where, what, evidence, remedy).about(s.Key(), false))
	}
	if w := s.Waiting; w != nil {
		found(shimWaiting, Error, "the log accepts no events from the shim",
			fmt.Sprintf("since %s: %s",
				w.Since.UTC().Format(time.RFC3339), w.Why), w.Do)
	}
	if !s.Replay && s.Endpoint != "" { // without an endpoint, no flag corrects this
		found(shimNoReplay, Warning, "the shim has no replay endpoint: earlier events of the engine are unknown, "+
			"and each gap clears the rank",
			fmt.Sprint(s), `start the engine with "replay_endpoint":"tcp://*:5657" in --kv-events-config, and give `+
				"worker-shim run --replay tcp://HOST:5657")
	}
	h := s.Heard
	if h == nil {
		return list
	}
	if h.ReplayFailed != "" {
		found(replayDead, Error, "the replay endpoint does not answer", s.ReplayEndpoint+": "+h.ReplayFailed,
			"check that --replay is the engine's replay_endpoint, and the route to the port from "+s.Host)
	}
	if h.Unreadable > 0 {
		found(messagesUnreadable, Error, "messages of the engine are unreadable", fmt.Sprintf("%d of %d since the shim began",
			h.Unreadable, h.Messages), "give worker-shim run the right --source; see its log for details. "+
			"If a message was damaged, restart the engine and then its shim: a replay sends the message again. "+
			"If the engine is newer than in docs/engines, report it: --on-unreadable clear keeps answers correct, but lower, "+
			"until then")
	}
	skipped := maps.Clone(h.Skipped)
	if n := skipped[events.SkipCopySize.String()]; n > 0 {
		delete(skipped, events.SkipCopySize.String())
		found(copiesSkipped, Warning,
			"copies below the device are not whole blocks, and do not count; the device's blocks are correct",
			fmt.Sprintf("%s %d", events.SkipCopySize, n),
			"make the chunk of the engine's connector (LMCache: chunk_size) a multiple of the engine's block size; "+
				"leave --block-size as it is. LMCache's save_unfull_chunk keeps such copies too")
	}
	if len(skipped) > 0 {
		var parts []string
		for _, reason := range slices.Sorted(maps.Keys(skipped)) {
			parts = append(parts, fmt.Sprintf("%s %d", reason, skipped[reason]))
		}
		remedy := "see worker-shim's log, and docs/engines for the limits of this engine release"
		if skipped[events.SkipBlockSize.String()] > 0 {
			remedy = "if engine_unusable names the rank too, start its shim with the --block-size given there; otherwise " +
				"the device's blocks have the shim's --block-size, and the skipped events belong to another group"
		}
		if h.Skipped[events.SkipAdapter.String()] > 0 {
			remedy = enginehttp.NameAdapters
		}
		found(eventsSkipped, Error, "events of the engine are skipped", strings.Join(parts, ", "), remedy)
	}
	if h.Gaps > 0 {
		found(messagesLost, Warning, "messages of the engine were lost, and the rank was cleared",
			plural(int(h.Gaps), "time")+
				" since the shim began at "+s.Since.UTC().Format(time.RFC3339),
			`raise "buffer_steps" (and "hwm") in the engine's --kv-events-config, and give worker-shim run --replay`)
	}
	if h.JoinedLate > 0 {
		found(joinedLate, Warning, "the engine published before its shim started, and could not repeat the events",
			plural(int(h.JoinedLate), "time"),
			`start the shim before the engine; raise "buffer_steps" in --kv-events-config; `+
				`or empty the engine's cache: POST /reset_prefix_cache`)
	}
	return list
}

// splitRemedy splits the problem of a status into the problem and its remedy. Without a remedy it returns otherwise.
func splitRemedy(problem, otherwise string) (what, remedy string) {
	if what, remedy, ok := strings.Cut(problem, survey.RemedyMark); ok {
		return what, remedy
	}
	return problem, otherwise
}
