// Command policy registers a routing policy of its own, as a program outside of kvatlas's module may, and chooses by it.
package main

import (
	"fmt"
	"math/rand/v2"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// notLast drops worker "last".
type notLast struct{}

func (notLast) Name() string { return "not_last" }

func (notLast) Filter(v *routing.View) {
	for i := range v.Len() {
		if v.At(i).Worker.ID == "last" {
			v.Drop(i, "is the last")
		}
	}
}

// byRank costs what the rank's number is.
type byRank struct{}

func (byRank) Name() string { return "by_rank" }

func (byRank) Score(v *routing.View, cost []float64) {
	for i := range cost {
		cost[i] = 10 * float64(v.At(i).Rank)
	}
}

// first chooses the first of the cheapest.
type first struct{}

func (first) Pick(v *routing.View, cost, probability []float64, _ *rand.Rand) int {
	best := 0
	for i := range cost {
		if cost[i] < cost[best] {
			best = i
		}
	}
	probability[best] = 1
	return best
}

func init() {
	routing.Register("mine", func(routing.Config) (routing.Policy, error) {
		return routing.Policy{
			Filters: []routing.Filter{routing.Affinity(), notLast{}},
			Scorers: []routing.Scorer{routing.DynamoCost(), byRank{}},
			Picker:  first{},
		}, nil
	})
}

func main() {
	s, err := routing.New("mine", routing.DefaultConfig())
	if err != nil {
		panic(err)
	}
	var candidates []routing.Candidate
	for _, id := range []events.WorkerID{"a", "b", "last"} {
		w := &routing.Worker{ID: id}
		for rank := range events.Rank(2) {
			candidates = append(candidates, routing.Candidate{Worker: w, Rank: rank, HasLoad: true})
		}
	}
	candidates[3].Device = 8 // "b" rank 1: worth less than its rank costs
	r := &routing.Request{ISL: 160, BlockSize: 16, Blocks: 10, Explain: true}
	choice, err := s.Choose(r, candidates, rand.New(rand.NewPCG(1, 2)), new(routing.Scratch))
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s rank %d costs %v; policies: %q\n", choice.Worker, choice.Rank, choice.Cost, routing.Policies())
	for _, c := range choice.Explanation.Candidates {
		fmt.Printf("%s/%d: %v\n", c.Worker, c.Rank, c.Scores)
	}
	for _, d := range choice.Explanation.Dropped {
		fmt.Printf("%s/%d: %s\n", d.Worker, d.Rank, d.Reason)
	}
}
