package main

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// Defaults of the room for queries.
const (
	// waitingQueries is how many queries a node answers at once: where others share its partitions, queries wait for
	// them most of their time.
	waitingQueries = 128

	// queuePerCore is how many queries may wait for each core: some 50 ms of work, at 0.1 ms a query.
	queuePerCore = 512
)

// roomForQueries is how many queries over NATS are answered at once, and how many wait.
func (s *serving) roomForQueries() (workers, queue int) {
	cores := runtime.GOMAXPROCS(0)
	workers, queue = s.queryWorkers, s.queryQueue
	if workers == 0 {
		workers = max(waitingQueries, cores)
	}
	if queue == 0 {
		queue = queuePerCore * cores
	}
	return workers, queue
}

// refusalsEvery is how often at most the log says that requests were refused for want of room.
const refusalsEvery = 10 * time.Second

// logRefusals makes log lines of requests that are refused for want of room, until ctx ends.
func logRefusals(ctx context.Context, outcomes *api.Outcomes, log *slog.Logger) {
	before := map[api.RequestCount]uint64{}
	for ctx.Err() == nil {
		select {
		case <-time.After(refusalsEvery):
		case <-ctx.Done():
		}
		before = sayRefusals(before, outcomes.Counts(), log)
	}
}

// sayRefusals says how many were refused since before, for each outcome with what helps, and returns what is before
// now.
func sayRefusals(
	before map[api.RequestCount]uint64, counts []api.RequestCount, log *slog.Logger,
) (now map[api.RequestCount]uint64) {
	now = make(map[api.RequestCount]uint64, len(counts))
	said := map[string]uint64{}
	for _, c := range counts {
		key := c
		key.Count = 0
		now[key] = c.Count
		if _, is := api.Overloaded(c.Outcome); is {
			said[c.Outcome] += c.Count - before[key]
		}
	}
	for outcome, n := range said {
		if whatToDo, _ := api.Overloaded(outcome); n > 0 {
			log.Warn("requests were not answered", "outcome", outcome, "requests", n, "what_to_do", whatToDo)
		}
	}
	return now
}

// requestsLine says what became of requests to a node; empty if there were none.
func requestsLine(counts []api.RequestCount) string {
	var parts []string
	last := ""
	for _, c := range counts {
		if by := fmt.Sprintf("%s over %s", c.Operation, c.Transport); by != last {
			parts, last = append(parts, by), by
		}
		parts[len(parts)-1] += fmt.Sprintf(" %s %d", c.Outcome, c.Count)
	}
	return strings.Join(parts, ", ")
}
