package enginehttp

import (
	"encoding/hex"
	"reflect"
	"testing"
)

// TestLoadStat reads messages as msgspec of SGLang 0.5.19 and 0.5.23 encodes them, with later fields, and with errors.
func TestLoadStat(t *testing.T) {
	n := func(v uint64) *uint64 { return &v }
	const tag = "a84c6f616453746174" // "LoadStat"
	for name, c := range map[string]struct {
		payload string
		want    *Load // nil: an error
	}{
		"0.5.19": {"96" + tag + "0203" + "21" + "cd0640" + "00",
			&Load{Running: 2, Waiting: 3, UsedBlocks: 3, TotalBlocks: 100}},
		"0.5.23, one rank": {"9b" + tag + "0203" + "21" + "cd0640" + "c0" + "4d" + "00000000",
			&Load{Running: 2, Waiting: 3, WaitingTokens: n(77), UsedBlocks: 3, TotalBlocks: 100}},
		"appended later": {"99" + tag + "0203" + "2100" + "c0" + "4d" + "c0" + "91a178",
			&Load{Running: 2, Waiting: 3, WaitingTokens: n(77)}},
		"another tag":         {"96" + "a84c6f616453746175" + "020321000000", nil},
		"too short":           {"95" + tag + "02032100", nil},
		"a negative number":   {"96" + tag + "ff032100c0", nil},
		"a text for a number": {"96" + tag + "a178032100c0", nil},
		"more bytes":          {"96" + tag + "02032100c000", nil},
		"cut":                 {"96" + tag + "020321", nil},
		"empty":               {"", nil},
	} {
		payload, err := hex.DecodeString(c.payload)
		if err != nil {
			t.Fatal(name, err)
		}
		got, err := LoadStat([][]byte{[]byte("load"), make([]byte, 8), payload}, 16)
		if c.want != nil {
			c.want.Source = LoadStatSource
		}
		if c.want == nil && err == nil || c.want != nil && (err != nil || !reflect.DeepEqual(got, *c.want)) {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, c.want)
		}
	}
	if _, err := LoadStat([][]byte{{}, {}}, 16); err == nil {
		t.Error("two frames are a load")
	}
}

// FuzzLoadStat: no message makes the decoder fail.
func FuzzLoadStat(f *testing.F) {
	f.Add([]byte("\x96\xa8LoadStat\x02\x03\x21\x00\xc0"))
	f.Fuzz(func(_ *testing.T, payload []byte) { _, _ = LoadStat([][]byte{{}, {}, payload}, 16) })
}
