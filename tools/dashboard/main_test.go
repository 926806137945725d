package main

import (
	"bytes"
	"os"
	"testing"
)

// TestFile holds the dashboard's file to the program.
func TestFile(t *testing.T) {
	is, err := os.ReadFile("../../deploy/grafana/kvatlas.json")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(is, dashboard()) {
		t.Error("deploy/grafana/kvatlas.json is old: go generate ./tools/dashboard writes it")
	}
}
