package source

import (
	"slices"
	"testing"
)

// TestDynamoSubjects: beside each release's subject of events, the other topics are received in every scope in which a
// release publishes.
func TestDynamoSubjects(t *testing.T) {
	for subject, want := range map[string][]string{
		"namespace.n.component.c.kv-events": {"namespace.n.kv_metrics", "namespace.n.component.c.kv_metrics",
			"namespace.n.component.c.endpoint.*.kv_metrics"},
		"namespace.n.component.c.kv_events": {"namespace.n.kv_metrics", "namespace.n.component.c.kv_metrics",
			"namespace.n.component.c.endpoint.*.kv_metrics"},
		"namespace.n.component.c.endpoint.generate.kv-events": {"namespace.n.kv_metrics",
			"namespace.n.component.c.kv_metrics", "namespace.n.component.c.endpoint.generate.kv_metrics"},
		"namespace.n.component.*.endpoint.*.kv-events": {"namespace.n.kv_metrics", "namespace.n.component.*.kv_metrics",
			"namespace.n.component.*.endpoint.*.kv_metrics"},
		"namespace.n.kv-events": nil,
		"elsewhere":             nil,
	} {
		if got := besideEvents(subject, topicLoads); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", subject, got, want)
		}
	}
	for subject, want := range map[string]string{
		"namespace.n.component.c.kv-events":            "namespace.n.component.c.endpoint.*.kv-events",
		"namespace.n.component.*.kv-events":            "namespace.n.component.*.endpoint.*.kv-events",
		"namespace.n.component.c.endpoint.e.kv-events": "",
		"namespace.n.component.c.kv_events":            "",
		"elsewhere.kv-events":                          "",
		"namespace.n.component.c":                      "",
	} {
		if got := ofEndpoints(subject); got != want {
			t.Errorf("%s: %q, want %q", subject, got, want)
		}
	}
}
