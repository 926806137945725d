package events

import "testing"

// MooncakeStoreConnector's copies are skipped by their form. If the worker has registered the store, they are skipped
// in any form with lower-case cpu. Copies of other connectors count.
func TestStoreCopies(t *testing.T) {
	tokens := count(1, 4)
	for _, c := range []struct {
		name    string
		more    []pair
		skipped [2]bool // without and with a registered store
	}{
		{"the connector's form", []pair{{"medium", "cpu"}, {"group_idx", 0}}, [2]bool{true, true}},
		{"before it had groups, and LMCache's in process", []pair{{"medium", "cpu"}}, [2]bool{false, true}},
		{"the offloading connector's", []pair{{"medium", "CPU"}, {"group_idx", 0}}, [2]bool{}},
		{"another with a kind", []pair{{"medium", "cpu"}, {"group_idx", 0},
			{"kv_cache_spec_kind", "full_attention"}}, [2]bool{false, true}},
		{"the device's", []pair{{"medium", "GPU"}, {"group_idx", 0}}, [2]bool{}},
	} {
		for i, registered := range []bool{false, true} {
			d, err := NewDecoder(DecoderConfig{Engine: VLLM, BlockSize: 4, Store: registered})
			if err != nil {
				t.Fatal(err)
			}
			m, err := d.Decode(message(t, store(names(1), nil, tokens, c.more...)))
			if skipped := d.Counts()[skipStore] == 1; err != nil || skipped != c.skipped[i] || skipped != (len(m.Events) == 0) {
				t.Errorf("%s, registered %v: %+v, %v, %v", c.name, registered, m.Events, d.Counts(), err)
			}
		}
	}
	if skipStore.Loses() || !SkipCopySize.Loses() {
		t.Error("a copy in the store is lost, or one of another size is not")
	}
}
