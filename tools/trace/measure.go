package trace

import (
	"fmt"
	"slices"
	"strings"
)

// Shape is the result of [Measure].
type Shape struct {
	Requests      int
	Input, Output Spread  // tokens
	Blocks        int     // hash ids of all requests together
	Distinct      int     // number of different blocks
	Shared        Spread  // shared blocks of a follow-up and earlier requests
	Turns         Spread  // requests of a conversation
	Single        float64 // share of conversations with a single request
	FollowUps     float64 // share of requests with an earlier prefix beyond the first block
	Extends       float64 // share of follow-ups that repeat all full blocks of the followed request
	Pause         Spread  // seconds from a request to the follow-up
	Arrivals      Spread  // requests in three seconds
	Duration      int64   // ms from the first request to the last
}

// Spread is the mean and some quantiles of a list of numbers.
type Spread struct {
	Mean                         float64
	P10, P25, P50, P75, P90, P99 int
	Min, Max                     int
}

// Reused returns the share of blocks that an earlier request had.
func (s Shape) Reused() float64 {
	if s.Blocks == 0 {
		return 0
	}
	return 1 - float64(s.Distinct)/float64(s.Blocks)
}

// Measure returns the shape of a trace. A request follows the latest request with the longest common prefix, if the
// prefix is longer than a block.
func Measure(reqs []Request) Shape {
	latest := map[uint64]int{} // hash id → the last request with the id
	turns := map[int]int{}     // first request of a conversation → number of requests
	first := make([]int, len(reqs))
	var input, output, shared, pauses, arrivals []int
	s := Shape{Requests: len(reqs)}
	extends := 0
	for i, r := range reqs {
		input, output = append(input, r.InputLength), append(output, r.OutputLength)
		same := 0
		for same < len(r.HashIDs) {
			if _, known := latest[r.HashIDs[same]]; !known {
				break
			}
			same++
		}
		first[i] = i
		if same > 1 {
			p := latest[r.HashIDs[same-1]]
			first[i] = first[p]
			shared, pauses = append(shared, same), append(pauses, int((r.Timestamp-reqs[p].Timestamp+500)/1000))
			if same >= len(reqs[p].HashIDs)-1 {
				extends++
			}
		}
		turns[first[i]]++
		for _, h := range r.HashIDs {
			latest[h] = i
		}
		s.Blocks += len(r.HashIDs)
		s.Duration = max(s.Duration, r.Timestamp)
	}
	s.Distinct = len(latest)
	if len(reqs) == 0 {
		return s
	}
	arrivals = make([]int, s.Duration/tick+1)
	for _, r := range reqs {
		if r.Timestamp >= 0 {
			arrivals[r.Timestamp/tick]++
		}
	}
	var perUser []int
	single := 0
	for _, n := range turns {
		if perUser = append(perUser, n); n == 1 {
			single++
		}
	}
	s.Input, s.Output, s.Shared, s.Pause = spread(input), spread(output), spread(shared), spread(pauses)
	s.Turns, s.Arrivals = spread(perUser), spread(arrivals)
	s.Single = float64(single) / float64(len(perUser))
	s.FollowUps = float64(len(shared)) / float64(len(reqs))
	s.Extends = float64(extends) / float64(max(1, len(shared)))
	return s
}

func spread(xs []int) Spread {
	if len(xs) == 0 {
		return Spread{}
	}
	slices.Sort(xs)
	sum := 0.0
	for _, x := range xs {
		sum += float64(x)
	}
	at := func(percent int) int { return xs[len(xs)*percent/100] }
	return Spread{sum / float64(len(xs)), at(10), at(25), at(50), at(75), at(90), at(99), xs[0], xs[len(xs)-1]}
}

func (s Spread) String() string {
	return fmt.Sprintf("%.0f: %d %d %d %d %d %d", s.Mean, s.P10, s.P25, s.P50, s.P75, s.P90, s.P99)
}

// String returns a table with a line for every fact; spreads are "mean: p10 p25 p50 p75 p90 p99".
func (s Shape) String() string {
	var b strings.Builder
	row := func(name string, format string, args ...any) {
		fmt.Fprintf(&b, "%-38s "+format+"\n", append([]any{name}, args...)...)
	}
	row("requests; minutes", "%d; %.0f", s.Requests, float64(s.Duration)/60000)
	row("input tokens", "%v", s.Input)
	row("output tokens", "%v", s.Output)
	row("blocks; distinct; share reused", "%d; %d; %.3f", s.Blocks, s.Distinct, s.Reused())
	row("follow-ups; of these extend the whole", "%.3f; %.3f", s.FollowUps, s.Extends)
	row("blocks shared by a follow-up", "%v", s.Shared)
	row("turns; share with one; most", "%.2f; %.2f; %d", s.Turns.Mean, s.Single, s.Turns.Max)
	row("s until the follow-up", "%v", s.Pause)
	row("requests in 3 s", "%v", s.Arrivals)
	return b.String()
}
