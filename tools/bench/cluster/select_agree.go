package cluster

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Agreement is the agreement of three nodes on the same prompts at the same moment. Costs include the computing time of
// a worker, so costs of slightly different moments differ slightly. A booking reaches the other nodes about a
// millisecond later. If a comparison is earlier, the nodes agree at a repeated comparison.
type Agreement struct {
	Policy  string  `json:"policy"`
	Prompts int     `json:"prompts"`
	Agreed  float64 `json:"agreed"`          // share of the prompts with the same best worker, or one as good, on all
	AtOnce  float64 `json:"agreed_at_once"`  // the same, by the first comparison
	Longest float64 `json:"longest_ms"`      // until the nodes agreed
	P50     float64 `json:"difference_p50"`  // of a candidate's cost on two nodes, as a share of the greater one
	P99     float64 `json:"difference_p99"`  // the same
	Most    float64 `json:"difference_most"` // the same
}

const (
	agreePrompts = 300
	agreeWithin  = time.Second // of the first comparison
	asGood       = 0.02        // relative cost above the best worker's that counts as equal
)

// agreements sends the same prompts to all nodes during running requests. The prefills of these requests end on other
// nodes than the bookings.
func (s *selecting) agreements(nodes []*process) error {
	var asks []*client.Client
	for _, n := range nodes {
		m, err := n.wait(s.ctx, `HTTP is served" listen=(\S+)`)
		if err != nil {
			return err
		}
		c, err := client.HTTP([]string{"http://" + m[1]}, client.Options{})
		if err != nil {
			return err
		}
		defer c.Close()
		asks = append(asks, c)
	}
	for _, policy := range selectPolicies {
		a := Agreement{Policy: policy, Prompts: agreePrompts}
		var differences []float64
		agreed, atOnce := 0, 0
		for i := range agreePrompts {
			booked := s.request()
			booked.Policy = policy
			if _, err := asks[i%3].Select(s.ctx, booked); err != nil {
				return err
			}
			same, repeated, err := s.agree(asks, policy, &differences)
			if err != nil {
				return err
			}
			if same {
				agreed++
			}
			if repeated == 0 {
				atOnce++
			}
			a.Longest = max(a.Longest, float64(repeated)/float64(time.Millisecond))
			if err := asks[(i+1)%3].PrefillComplete(s.ctx, model, booked.RequestID); err != nil {
				return err
			}
			if err := asks[(i+2)%3].Free(s.ctx, model, booked.RequestID); err != nil {
				return err
			}
		}
		slices.Sort(differences)
		at := func(q float64) float64 { return differences[int(q*float64(len(differences)-1))] }
		a.Agreed, a.AtOnce = float64(agreed)/agreePrompts, float64(atOnce)/agreePrompts
		a.P50, a.P99, a.Most = at(0.5), at(0.99), at(1)
		s.report.Agreements = append(s.report.Agreements, a)
	}
	return nil
}

// agree compares the nodes until they agree, for [agreeWithin] at most. repeated is the time of the repetitions, and
// differences has only those of the first comparison.
func (s *selecting) agree(asks []*client.Client, policy string, differences *[]float64) (same bool,
	repeated time.Duration, err error) {
	costs, err := s.costs(asks, policy)
	if err != nil {
		return false, 0, err
	}
	same = compareCosts(costs, differences)
	for began := time.Now(); !same && repeated < agreeWithin; repeated = time.Since(began) {
		if costs, err = s.costs(asks, policy); err != nil {
			return false, 0, err
		}
		same = compareCosts(costs, new([]float64))
	}
	return same, repeated, nil
}

// costs sends a prompt to all nodes at the same time.
func (s *selecting) costs(asks []*client.Client, policy string) ([]map[events.WorkerID]float64, error) {
	r := s.request()
	r.Policy, r.Book, r.RequestID, r.Advisory, r.Explain = policy, false, "", true, true
	costs, errs := make([]map[events.WorkerID]float64, len(asks)), make([]error, len(asks))
	var all sync.WaitGroup
	for n, c := range asks {
		all.Go(func() {
			var answer *api.Selection
			if answer, errs[n] = c.Select(s.ctx, r); errs[n] != nil {
				return
			}
			if len(answer.Explanation.Candidates) != s.Workers {
				errs[n] = fmt.Errorf("%d of %d candidates have a cost", len(answer.Explanation.Candidates), s.Workers)
				return
			}
			costs[n] = map[events.WorkerID]float64{}
			for _, x := range answer.Explanation.Candidates {
				costs[n][x.Worker] = x.Cost
			}
		})
	}
	all.Wait()
	return costs, errors.Join(errs...)
}

// compareCosts appends the differences between the costs of the first node and the other nodes. It reports whether the
// best worker of every node is as good as the best worker on all other nodes.
func compareCosts(costs []map[events.WorkerID]float64, differences *[]float64) (same bool) {
	same = true
	for n, own := range costs {
		best := math.Inf(1)
		var worker events.WorkerID
		for w, c := range own {
			if c < best {
				best, worker = c, w
			}
		}
		for m, other := range costs {
			least := math.Inf(1)
			for w, c := range other {
				least = min(least, c)
				if n == 0 && m > 0 {
					*differences = append(*differences, math.Abs(c-own[w])/max(math.Abs(c), math.Abs(own[w]), 1e-9))
				}
			}
			same = same && other[worker] <= least+asGood*math.Abs(least)
		}
	}
	return same
}
