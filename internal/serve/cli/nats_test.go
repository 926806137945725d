package cli

import (
	"errors"
	"strings"
	"testing"
)

// TestRefusalAdvice: the advice for a refused subject names the missing flag.
func TestRefusalAdvice(t *testing.T) {
	const violation = `nats: Permissions Violation for `
	for text, want := range map[string]string{
		violation + `Subscription to "_INBOX.abc.*"`:                      "--nats-inbox-prefix",
		violation + `Publish to "kv.v1.prod.q.find"`:                      `--namespace`,
		violation + `Publish to "$JS.API.STREAM.INFO.KV_EVENTS_prod-2_0"`: `not "prod-2"`,
		violation + `Publish to "$KV.kvatlas_prod_workers.probe"`:         `if that is not "prod"`,
		violation + `Publish to "$SYS.REQ.USER.INFO"`:                     "a user with this right",
		"nats: slow consumer":                                             "",
	} {
		if got := RefusalAdvice(errors.New(text)); got == "" != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
	if AsyncAdvice(errors.New("slow consumer")) == "" {
		t.Error("an error without advice")
	}
}
