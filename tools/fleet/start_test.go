package fleet

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// TestNodesThatStartOneAfterTheOther checks a staggered start. Early nodes restore partitions that they later give
// away. The number of such restores must stay within a bound for every kept partition.
func TestNodesThatStartOneAfterTheOther(t *testing.T) {
	t.Parallel()
	s := size{nodes: 12, copies: 2, partitions: 64}
	if testkit.Whole { // .ci/daily
		s = size{nodes: 64, copies: 2, partitions: 512}
	}
	for _, c := range []struct {
		over time.Duration
		most float64 // restores for each partition at the end
	}{{3 * time.Second, 1.1}, {10 * time.Second, 1.9}, {30 * time.Second, 2.5}} {
		w := newWorld(t, 1, s)
		for i := range s.nodes {
			w.after(c.over*time.Duration(i)/time.Duration(s.nodes), func() { w.start(fmt.Sprintf("indexer-%d", i)) })
		}
		w.run(c.over)
		took := w.untilSettled()
		kept := s.copies * int(s.partitions)
		t.Logf("%d nodes within %v: settled %v later, %d partitions restored for %d to be kept", s.nodes, c.over, took,
			w.counts.restores, kept)
		if float64(w.counts.restores) > c.most*float64(kept) {
			t.Errorf("%d nodes within %v restore %d partitions for %d to be kept", s.nodes, c.over, w.counts.restores,
				kept)
		}
	}
}
