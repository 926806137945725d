package control

import (
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestAnswersNameTheirRank: an answer on the subject of a rank is skipped if it names another rank.
func TestAnswersNameTheirRank(t *testing.T) {
	t.Parallel()
	w1, w2 := events.RankKey{Instance: "w1"}, events.RankKey{Instance: "w2"}
	body := []byte(`{"instance":"w2","rank":0,"incarnation":77}`)
	for _, c := range []struct {
		from *events.RankKey
		want int
	}{{nil, 1}, {&w2, 1}, {&w1, 0}} {
		got := read([]jetstream.Reply{{Body: body, From: c.from}}, func(Shim) bool { return true })
		if len(got) != c.want {
			t.Errorf("from %v: %d answers, want %d", c.from, len(got), c.want)
		}
	}
}
