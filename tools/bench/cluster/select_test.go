package cluster

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestInside measures choices in process, small.
func TestInside(t *testing.T) {
	server := natskit.Start(t, natsserver.Options{})
	conn := natskit.Connect(t, server)
	s := &selecting{SelectOptions: SelectOptions{Workers: 8, Blocks: 80, UnderWay: 100, Callers: 8, Decisions: 100,
		Rounds: 2},
		bed: bed{ctx: t.Context(), users: &users{bare: &user{conn: conn}}, o: Options{Partitions: 4}}}
	if err := s.inside(); err != nil {
		t.Fatal(err)
	}
	r := &s.report
	if r.DecisionP99 <= 0 || r.Inside <= 0 || len(r.Stages) != 6 || r.Stages[0].N != 200 || len(r.Policies) != 2 ||
		r.Policies[0].Policy != "kvatlas" || r.Policies[1].PerSecond <= 0 || r.Policies[1].Stages[5].N != 200 {
		t.Errorf("%+v", r)
	}
}

// TestCompareCosts checks that nodes agree if every node's best worker costs nearly the minimum on the other nodes.
func TestCompareCosts(t *testing.T) {
	for _, c := range []struct {
		second map[events.WorkerID]float64
		same   bool
		most   float64
	}{
		{map[events.WorkerID]float64{"a": 100, "b": 150}, true, 0},
		{map[events.WorkerID]float64{"a": 101, "b": 100}, false, 0.5 / 1.5},
		{map[events.WorkerID]float64{"a": 149, "b": 150}, true, 0.49 / 1.49},
	} {
		var differences []float64
		same := compareCosts([]map[events.WorkerID]float64{{"a": 100, "b": 150}, c.second}, &differences)
		if most := slices.Max(differences); same != c.same || len(differences) != 2 || math.Abs(most-c.most) > 1e-9 {
			t.Errorf("%v: %v, %v; want %v, %v", c.second, same, differences, c.same, c.most)
		}
	}
}

// TestSelectOptions checks that a single error reports all faults.
func TestSelectOptions(t *testing.T) {
	o := SelectDefaults()
	if err := o.Validate(); err != nil {
		t.Fatal(err)
	}
	o.Blocks, o.Rounds, o.Dynamo = 3, 0, "/nowhere/python"
	err := o.Validate()
	for _, name := range []string{"--blocks", "--rounds", "--dynamo"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s is not reported: %v", name, err)
		}
	}
}
