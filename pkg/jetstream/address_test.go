package jetstream

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestAddresses(t *testing.T) {
	t.Parallel()
	for _, good := range []string{"h", "h:4222", "nats://h", "tls://h:1", "wss://h/path", "nats://user:p%2Fw@h:4222",
		"nats://token@h", "[::1]:4222", "nats://[::1]"} {
		if err := CheckAddress(good); err != nil {
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
		err := CheckAddress(bad)
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
		if got := ShownAddress(address); got != want {
			t.Errorf("%q is shown as %q; want %q", address, got, want)
		}
	}
}

// TestAddressesAreShownWithoutSecrets checks every text of a connection with an address.
func TestAddressesAreShownWithoutSecrets(t *testing.T) {
	t.Parallel()
	srv := configServer(t, `jetstream: enabled, authorization { token: "secret" }`)
	url := strings.Replace(srv.ClientURL(), "nats://", "nats://secret@", 1)
	back := make(chan string, 1)
	c := connect(t, ConnOptions{URLs: []string{url}, Reconnected: func(url string) { back <- url }})
	want := strings.Replace(srv.ClientURL(), "nats://", "nats://xxxxx@", 1)
	if got := c.ServerURL(); got != want {
		t.Errorf("connected to %q, want %q", got, want)
	}
	if err := c.nc.ForceReconnect(); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-back:
		if got != want {
			t.Errorf("reconnected to %q, want %q", got, want)
		}
	case <-time.After(patience):
		t.Fatal("not connected again")
	}
	_, err := Connect(ctxFor(t), ConnOptions{URLs: []string{"nats://user:secret@127.0.0.1:1"}})
	if !errors.Is(err, ErrUnavailable) || strings.Contains(err.Error(), "secret") {
		t.Errorf("where nobody is: %v", err)
	}
	_, err = Connect(ctxFor(t), ConnOptions{URLs: []string{"nats://user:secret@::1:4222"}, Wait: true})
	if err == nil || errors.Is(err, ErrUnavailable) || strings.Contains(err.Error(), "secret") {
		t.Errorf("Connect waits for an invalid address: %v", err)
	}
}
