package harness

import (
	"fmt"
	"slices"
	"time"
)

// Tally counts answers.
type Tally struct {
	Asked, Answered, Complete int
	Took                      []time.Duration // of the received answers
	Gap                       time.Duration   // the longest time without an answer that overlaps the fault
	Failures                  map[string]int

	Unexcused int // incomplete answers with at most one affected indexer and no affected connection
}

func (t *Tally) String() string {
	slices.Sort(t.Took)
	if len(t.Took) == 0 {
		return fmt.Sprintf("%d queries, no answers: %v", t.Asked, t.Failures)
	}
	share := func(n int) float64 { return 100 * float64(n) / float64(t.Asked) }
	return fmt.Sprintf(
		"%d queries, %.2f %% answered, %.2f %% complete, %d incomplete without excuse, p50 %v, p99 %v, longest gap %v; errors: %v", t.Asked, share(t.Answered), share(t.Complete), t.Unexcused,
		t.Took[len(t.Took)/2].Round(10*time.Microsecond), t.Took[len(t.Took)*99/100].Round(10*time.Microsecond),
		t.Gap.Round(time.Millisecond), t.Failures)
}

// Add adds the counts of another Tally.
func (t *Tally) Add(o *Tally) {
	t.Asked, t.Answered, t.Complete = t.Asked+o.Asked, t.Answered+o.Answered, t.Complete+o.Complete
	t.Took, t.Gap, t.Unexcused = append(t.Took, o.Took...), max(t.Gap, o.Gap), t.Unexcused+o.Unexcused
	for why, n := range o.Failures {
		t.Failures[why] += n
	}
}
