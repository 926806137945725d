package registry

import (
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestKeysAreExact: keys in records are case-sensitive and must be unique.
func TestKeysAreExact(t *testing.T) {
	key := events.RankKey{Instance: "w"}
	record := Record{Version: recordVersion, Instance: "w", Model: "m", BlockSize: 16, LeaseMS: 10_000, State: Held}
	text, err := record.encode()
	if err != nil {
		t.Fatal(err)
	}
	if r, err := decode(key, text); err != nil || r.Model != "m" {
		t.Fatalf("%+v, %v", r, err)
	}
	for insert, want := range map[string]string{`"MODEL":"other",`: "", `"Block_Size":1,`: "",
		`"model":"other",`: "twice"} {
		changed := append([]byte("{"+insert), text[1:]...)
		last := append(text[:len(text)-1:len(text)-1], ","+strings.TrimSuffix(insert, ",")+"}"...)
		for _, text := range [][]byte{changed, last} {
			r, err := decode(key, text)
			if want == "" && (err != nil || r.Model != "m" || r.BlockSize != 16) ||
				want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("%s: %+v, %v", text, r, err)
			}
		}
	}
	if _, err := decodeOperator("w", []byte(`{"version":1,"instance":"w","instance":"w"}`)); err == nil {
		t.Error("a duplicate key in an operator's record is accepted")
	}
}
