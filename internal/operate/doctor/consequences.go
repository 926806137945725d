package doctor

import (
	"slices"
	"strings"
)

// consequence is a rule: a finding of cause explains findings of the faults in of. With sameRank, the
// findings must concern the same rank.
type consequence struct {
	cause    Fault
	sameRank bool
	of       []Fault
}

// consequences are the rules for grouping the findings of one cause.
var consequences = []consequence{
	{jetStreamOff, false, []Fault{nodeNone}},
	{jetStreamDown, false, []Fault{nodeNone, nodeProblem, nodeNotReady, shimWaiting, replicasApart, recordingFailing}},
	{streamLeaderless, false, []Fault{nodeNone, nodeProblem, nodeNotReady, shimWaiting, replicasApart}},
	{jetStreamStorage, false, []Fault{nodeProblem, shimWaiting, recordingFailing}},
	{namespaceMissing, false, []Fault{nodeNone}},
	{namespaceRecord, false, []Fault{nodeNone}},
	{namespaceStreams, false, []Fault{nodeNone}},
	{nodeNone, false, []Fault{streamMissing}},
	{recordingMissing, false, []Fault{recordingFailing}},
	{recordingChanged, false, []Fault{recordingFailing}},
	{streamMissing, false, []Fault{nodeProblem, shimWaiting}},
	{streamUnwritable, false, []Fault{nodeProblem, shimWaiting}},
	{bucketFull, false, []Fault{nodeProblem}},
	{nodeSilent, false, []Fault{partitionsUnserved, workersMissing, zoneShared}},
	{nodeNotReady, false, []Fault{nodeProblem, partitionsUnserved, workersMissing, zoneShared, replicasApart}},
	{partitionsUnserved, false, []Fault{workersMissing}},
	{modelUnclaimed, true, []Fault{leaseNone, shimSilent}},
	{modelUnclaimed, false, []Fault{workerNone}},
	{leaseExpired, true, []Fault{engineSilent, engineGone, engineQuiet, engineUnreachable, workerIncomplete, replayDead}},
	{engineGone, true, []Fault{replayDead, engineUnreachable, engineUnknown}},
	{engineSilent, true, []Fault{replayDead, engineUnreachable, engineUnknown}},
	{severalEngines, true, []Fault{engineQuiet, eventsSkipped, messagesLost, joinedLate}},
	{engineUnusable, true, []Fault{workerIncomplete, engineQuiet, eventsSkipped, engineBlockSize}},
	{engineAdapters, true, []Fault{eventsSkipped}},
	{engineNoEvents, true, []Fault{engineQuiet, shimNoReplay}},
	{messagesUnreadable, true, []Fault{engineQuiet, workerIncomplete}},
	{eventsSkipped, true, []Fault{engineQuiet}},
	{shimNoReplay, true, []Fault{engineNoReplay, messagesLost, joinedLate, nodeProblem}},
	{replayDead, true, []Fault{messagesLost, joinedLate, nodeProblem}},
	{joinedLate, true, []Fault{nodeProblem}},
	{tokenizerFailed, false, []Fault{nodeProblem}},
	{nodeProblem, false, []Fault{shimWaiting}},
}

// explain removes consequences, and adds their ids to the finding of the cause. Rules for root causes come first. A
// warning with an error among its consequences becomes an error.
func (r *Report) explain() {
	var all []*Finding
	for i := range r.Checks {
		for j := range r.Checks[i].Findings {
			all = append(all, &r.Checks[i].Findings[j])
		}
	}
	for _, rule := range consequences {
		for _, f := range all {
			if f.explained || !slices.Contains(rule.of, f.ID) {
				continue
			}
			i := slices.IndexFunc(all, func(cause *Finding) bool {
				return cause.ID == rule.cause && !cause.explained && cause != f && cause.explains(f, rule.sameRank)
			})
			if i < 0 {
				continue
			}
			f.explained = true
			if f.Severity == Error && rule.cause != engineGone { // an ended engine cannot answer a replay
				all[i].Severity = Error
			}
			for _, id := range append([]Fault{f.ID}, f.Causes...) {
				if !slices.Contains(all[i].Causes, id) {
					all[i].Causes = append(all[i].Causes, id)
				}
			}
		}
	}
	for i := range r.Checks {
		c := &r.Checks[i]
		c.Findings = slices.DeleteFunc(c.Findings, func(f Finding) bool { return f.explained })
	}
}

// explains reports whether a finding can be the cause of another finding, if the rule permits the faults.
func (f *Finding) explains(other *Finding, sameRank bool) bool {
	switch {
	case sameRank:
		return f.covers(other)
	case f.ID == nodeNotReady && other.ID == nodeProblem:
		return f.Where == other.Where
	case f.ID == tokenizerFailed:
		return strings.Contains(other.Evidence, "texts for "+f.Where+" ")
	}
	return (f.ID != nodeProblem || f.storage) && (other.ID != nodeProblem || other.storage)
}

// covers reports whether two findings concern the same rank.
func (f *Finding) covers(other *Finding) bool {
	return f.rank.Instance != "" && f.rank.Instance == other.rank.Instance &&
		(f.allOf || other.allOf || f.rank.Rank == other.rank.Rank)
}
