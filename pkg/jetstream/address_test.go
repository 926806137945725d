package jetstream

import (
	"errors"
	"strings"
	"testing"
	"time"
)

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
