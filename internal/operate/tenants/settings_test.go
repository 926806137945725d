package tenants

import (
	"strings"
	"testing"
)

// TestSettings reads files with quotas.
func TestSettings(t *testing.T) {
	quotas, err := parseQuotas([]byte("\"*\": {tokens_per_minute: 600000}\n" +
		"salt:acme: {tokens_per_minute: 1200000, count: computed, over: lower, class: batch}\n\"-\": {tokens_per_minute: 1}\n"))
	if err != nil || len(quotas) != 3 || *quotas[Everyone] != (Quota{600_000, CountRequested, Reject, ""}) ||
		*quotas["salt:acme"] != (Quota{1_200_000, CountComputed, Lower, "batch"}) {
		t.Fatalf("%+v, %v", quotas, err)
	}
	for text, says := range map[string]string{
		"- a": "not YAML", "acme: {tokens_per_minute: 1}": "SOURCE:VALUE",
		"salt:a: {tokens_per_minute: 0}": "tokens_per_minute",
		"salt:a: {tokens: 1}":            "tokens", "salt:a: {tokens_per_minute: 1, over: stop}": "over is",
		"salt:a: {tokens_per_minute: 1, class: batch}": "class is for", "salt:a: {tokens_per_minute: -1}": "salt:a",
		"salt:a: {tokens_per_minute: 1, count: all}": "count is", "salt:a: 7": "salt:a",
	} {
		if _, err := parseQuotas([]byte(text)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %s", text, err, says)
		}
	}
}

// FuzzQuotas reads any file: each accepted quota is valid.
func FuzzQuotas(f *testing.F) {
	f.Add([]byte("\"*\": {tokens_per_minute: 600000}"))
	f.Add([]byte("salt:acme: {tokens_per_minute: 1200000, count: computed, over: lower, class: batch}"))
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, text []byte) {
		quotas, err := parseQuotas(text)
		for name, q := range quotas {
			if err == nil && CheckQuota(q) != nil {
				t.Errorf("%s: %+v", name, q)
			}
		}
	})
}
