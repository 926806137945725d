package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestVerifyReplicas compares replicas of a growing log, which are at different positions at the time of a query. The
// checksum of a replica is its position, except on a node with a loss.
func TestVerifyReplicas(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var mu sync.Mutex
		grows := [3]int{0, rng.IntN(40), rng.IntN(3000)} // growth of a partition at a query
		// the logs when the last request came, and when the last was answered
		var logs, came [3]events.StreamSeq
		round := ""
		lost := rng.IntN(2) == 0
		ask := func(_ context.Context, node string, at []api.PartitionSeq) (*api.Status, error) {
			mu.Lock()
			defer mu.Unlock()
			s := &api.Status{}
			if fmt.Sprint(at) != round {
				round, logs = fmt.Sprint(at), came
			}
			for p := range events.Partition(3) {
				logs[p] += events.StreamSeq(grows[p])
				seq := logs[p]
				for _, want := range at {
					if want.Partition == p && want.Seq >= seq && grows[p] > 0 {
						seq = want.Seq // the replica reaches the position during the wait, as other replicas do
					}
				}
				came[p] = max(came[p], seq)
				sum := fmt.Sprint(seq)
				if lost && p == 1 && node == "c" {
					sum = "bad"
				}
				d := api.PartitionDetail{State: "serving", Checksum: sum, LogLast: came[p]}
				d.Partition, d.Seq = p, seq
				if p == 2 && node == "b" {
					d.State = "restoring"
				}
				s.Partitions = append(s.Partitions, d)
			}
			return s, nil
		}
		list, err := verifyReplicas(t.Context(), []string{"a", "b", "c"}, ask)
		if err != nil || len(list) != 3 || len(list[0].Replicas) != 3 || len(list[2].Replicas) != 2 {
			t.Fatalf("seed %d: %+v, %v", seed, list, err)
		}
		if !list[0].Equal || !list[2].Equal || list[1].Equal == lost {
			t.Fatalf("seed %d: lost %v: %+v", seed, lost, list)
		}
	}
	_, err := verifyReplicas(t.Context(), []string{"a", "b"}, func(_ context.Context, node string,
		_ []api.PartitionSeq) (*api.Status, error) {
		if node == "b" {
			return nil, api.Errorf(api.CodeNotReady, "the replica is not at the position")
		}
		return &api.Status{}, nil
	})
	if err == nil || !strings.Contains(err.Error(), "node b") {
		t.Errorf("a node that does not answer: %v", err)
	}
}
