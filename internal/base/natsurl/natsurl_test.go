package natsurl

import (
	"strings"
	"testing"
)

func TestAddresses(t *testing.T) {
	t.Parallel()
	for _, good := range []string{"h", "h:4222", "nats://h", "tls://h:1", "wss://h/path", "nats://user:p%2Fw@h:4222",
		"nats://token@h", "[::1]:4222", "nats://[::1]"} {
		if err := Check(good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for bad, want := range map[string]string{
		"":                           "no host",
		"nats://":                    "no host",
		"nats://h::":                 "no host",
		"::1:4222":                   "brackets",
		"http://h":                   `scheme "http"`,
		"h:0":                        `port "0"`,
		"h:65536":                    `port "65536"`,
		"h:x":                        "invalid port",
		"nats://user:secret@h:99999": `"nats://user:xxxxx@h:99999": port "99999"`,
		"nats://user:sec/ret@h":      `"nats://user:xxxxx@h" cannot be read; in a user or password`,
		"nats://user:sec%ret@h":      `"nats://user:xxxxx@h" cannot be read`,
		"nats://sec ret@h":           `"nats://xxxxx@h" cannot be read`,
	} {
		err := Check(bad)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "sec") ||
			strings.Contains(err.Error(), "ret@") {
			t.Errorf("%q: %v; want %q", bad, err, want)
		}
	}
	for address, want := range map[string]string{
		"h:1":                               "h:1",
		"nats://user:a@b:c@h:1,tls://tok@g": "nats://user:xxxxx@h:1,tls://xxxxx@g",
		"user:pw@h":                         "user:xxxxx@h",
	} {
		if got := Shown(address); got != want {
			t.Errorf("%q is shown as %q; want %q", address, got, want)
		}
	}
}
