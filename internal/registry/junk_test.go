package registry

import (
	"testing"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestJunkIsErased: keys that a shim may write and that mean nothing are noted for erasure, and no others.
func TestJunkIsErased(t *testing.T) {
	t.Parallel()
	var j junk
	for key, want := range map[string]bool{
		"5.w1.0": false, "5.w1.4095": false, "operator.w1": false, jetstream.ProbeKey: false,
		"5.w1.4096": true, "5.w1.4294967295": true, "5.w1.x0": true, "5.w1.01": true, "5.w1.jN": true, "x.w1.0": true,
	} {
		j = nil
		_, rank, ok := jetstream.ParseWorkerKey(key)
		j.see(&jetstream.Entry{Key: key, Revision: 7}, ok, rank.Rank)
		if got := j[key] == 7; got != want {
			t.Errorf("%s: noted %v, want %v", key, got, want)
		}
	}
	for i := range 2 * maxJunk {
		j.see(&jetstream.Entry{Key: "5.w1.x" + string(rune('a'+i%26)) + string(rune(i+0x100))}, false, 0)
	}
	if len(j) > maxJunk {
		t.Errorf("%d keys are remembered", len(j))
	}
}
