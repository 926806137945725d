package whatif

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/tools/routesim"
)

// notes adds the sentences about unknown facts to a report.
func (r *replays) notes(rep *Report, today *Fleet) {
	add := func(on bool, format string, args ...any) {
		if on {
			rep.Notes = append(rep.Notes, fmt.Sprintf(format, args...))
		}
	}
	c := &rep.Counts
	add(c.Older > 0,
		"%d older requests are beyond the limit of this analysis and are not replayed (--max-requests)", c.Older)
	add(c.DroppedByNode > 0, "the nodes dropped %d records: the replay lacks their requests or latencies", c.DroppedByNode)
	add(c.Unreadable > 0, "%d batches of the recording are damaged or of a later build", c.Unreadable)
	add(c.Refused > 0, "%d refused requests are not replayed", c.Refused)
	add(c.Disaggregated > 0, "%d requests with a separate prefill worker are not replayed", c.Disaggregated)
	add(c.OtherBlocks > 0, "%d requests in another block size are not replayed", c.OtherBlocks)
	add(c.TooLong > 0, "%d requests are larger than the memory of a worker and are not replayed", c.TooLong)
	add(c.Pinned > 0, "%d requests named their worker; the replays with choices choose freely", c.Pinned)
	add(c.EngineHashes > 0, "%d requests were given by engine hashes: their common prefixes with others are unknown",
		c.EngineHashes)
	add(c.Incomplete > 0, "%d requests were routed while partitions of the index were missing", c.Incomplete)
	add(c.Unreported > 0, "%d of %d requests have no report of the engine: their measured reuse is the estimate of the "+
		"index (POST /v1/report, or a gateway, reports the engine's)", c.Unreported, c.Replayed)
	add(c.NoLatency > 0, "%d of %d requests have no time to the first token (routers report it by prefill_complete, and "+
		"free records it at the end)", c.NoLatency, c.Replayed)
	add(c.NoOutput > 0,
		"%d requests have no length of the answer: their answers get the length that fits the duration, or "+
			"the usual length", c.NoOutput)
	add(time.Duration(c.LongestPause)*time.Millisecond > 10*time.Minute, "the longest pause without a request is %s: the "+
		"recording may have been off", time.Duration(c.LongestPause)*time.Millisecond)
	add(c.NoSession > 0 && routesim.UsesSessions(rep.ChangedPolicy), "%d of %d requests have no session_id: %s chooses "+
		"by the first 1,024 tokens of their prompts, and may look worse than with the sessions of your clients", c.NoSession,
		c.Replayed, rep.ChangedPolicy)
	r.fleetNotes(add, today)
	add(rep.Span > rep.Engine.BlockSize, "a recorded name covers %d tokens; common prefixes end at these borders, unless "+
		"the worker of the request held more (a smaller --record-span of indexer serve is exact)", rep.Span)
	add(!r.fitted,
		"too few latencies for a fit: the simulated engines have the speed of published figures, and times are "+
			"not comparable with yours")
}

func (r *replays) fleetNotes(add func(bool, string, ...any), today *Fleet) {
	var gone, unknown []string
	for _, w := range r.recorded.Workers {
		if !slices.ContainsFunc(today.Workers, func(x Worker) bool { return x.Name == w.Name }) {
			gone = append(gone, w.Name)
		}
	}
	for _, w := range today.Workers {
		if w.Held {
			unknown = append(unknown, w.Name)
		}
	}
	add(len(gone) > 0, "workers of the recording that may not be chosen today: %s", joined(gone))
	add(len(r.o.Fleet.Skipped) > 0, "registered workers that may not be chosen today: %s",
		joined(slices.Clone(r.o.Fleet.Skipped)))
	add(len(unknown) > 0,
		"the capacity of these workers is not registered: %s; the replay uses the blocks that they hold now, "+
			"or --fleet-capacity", joined(unknown))
	distinct, room := map[uint64]bool{}, 0
	for _, x := range r.list[:r.measured] {
		for _, n := range x.names {
			distinct[n] = true
		}
	}
	for _, w := range today.Workers {
		room += w.DeviceBlocks + w.HostBlocks
	}
	per := r.list[0].span / r.list[0].blockSize
	add(len(distinct)*per < room,
		"the first half of the recording has about %d blocks, and the workers have room for %d: "+
			"caches were not full, and older blocks are missing in the replay", len(distinct)*per, room)
}
