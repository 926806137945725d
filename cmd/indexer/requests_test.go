package main

import (
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

func TestRequestsLine(t *testing.T) {
	line := requestsLine([]api.RequestCount{
		{Transport: api.OverHTTP, Operation: "find", Outcome: "malformed", Count: 1},
		{Transport: api.OverNATS, Operation: "find", Outcome: "busy", Count: 3},
		{Transport: api.OverNATS, Operation: "find", Outcome: "ok", Count: 1},
		{Transport: api.FromNodes, Operation: "find", Outcome: "busy", Count: 3},
	})
	want := "find over http malformed 1, find over nats busy 3 ok 1, find over node busy 3"
	if line != want {
		t.Errorf("%q, want %q", line, want)
	}
}
