package survey

import (
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestAProblemOfSeveralNodesIsSaidOnce: what nodes share, as a disk that is full, is one problem of them all.
func TestAProblemOfSeveralNodesIsSaidOnce(t *testing.T) {
	status := func(ready bool, problems ...string) *api.Status { return &api.Status{Ready: ready, Problems: problems} }
	r := Report{Nodes: []Node{
		{Node: "a", Status: status(true, "the disk is full", "a's own")},
		{Node: "b", Status: status(false, "the disk is full")},
		{Node: "c", Error: "node c is gone"},
		{Node: "d", Status: status(true)},
	}}
	want := []string{
		"nodes a, b: the disk is full", "node a: a's own",
		"node b: it is not ready: it restores, or catches up with the log", "node c is gone",
	}
	if got := r.problems(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
