package envoy

import (
	"os"
	"strings"
	"testing"
)

// TestEdit checks that the shipped configuration accepts any number of engines, and that an error names a missing line.
func TestEdit(t *testing.T) {
	text, err := os.ReadFile("../../deploy/envoy/envoy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{File: "f", Indexer: "127.0.0.1:7001", Engines: []string{"127.0.0.1:7002", "127.0.0.1:7003"},
		Edits: []string{"request_body_mode: BUFFERED", "request_body_mode: X"}}
	out, err := cfg.edit(text)
	if err != nil {
		t.Fatal(err)
	}
	for part, times := range map[string]int{"port_value: 0}": 2, "port_value: 7001}": 1, "port_value: 7002}": 1,
		"port_value: 7003}": 1, "port_value: 800": 0, "request_body_mode: X": 1, "- endpoint:": 3} {
		if strings.Count(string(out), part) != times {
			t.Errorf("%q is not there %d times:\n%s", part, times, out)
		}
	}
	cfg.Edits = []string{"missing", ""}
	if _, err := cfg.edit(text); err == nil || !strings.Contains(err.Error(), "f has no missing") {
		t.Error(err)
	}
}
