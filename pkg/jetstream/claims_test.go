package jetstream

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
)

// TestClaimsRequired reads the requirement of model claims from a user's permissions on a real server.
func TestClaimsRequired(t *testing.T) {
	t.Parallel()
	marker := Names("n").ClaimsRequired()
	all := `"$JS.API.>", "$KV.>", "kv.v1.n.>", "_INBOX.>"`
	for name, c := range map[string]struct {
		user string
		want bool
	}{
		"the marker is listed":           {claimsUser(all + `, "$SYS.REQ.USER.INFO", "` + marker + `"`), true},
		"a wildcard matches the marker":  {claimsUser(all + `, "$SYS.REQ.USER.INFO"`), false},
		"the marker of another is there": {claimsUser(all + `, "$SYS.REQ.USER.INFO", "kv.v1.m.claims.required"`), false},
		"everything is permitted":        {claimsUser(`">"`), false},
		"the request is not permitted":   {claimsUser(all + `, "` + marker + `"`), false},
		"there are no permissions":       {`{ user: u, password: p }`, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := configServer(t, claimsAccount(c.user))
			refused := make(chan error, 10)
			conn := connect(t, ConnOptions{URLs: []string{srv.ClientURL()}, User: "u", Password: "p",
				AsyncError: func(err error) { refused <- err }})
			ns, err := JoinNamespace(ctxFor(t), conn, NamespaceConfig{Name: "n"})
			if err != nil {
				t.Fatal(err)
			}
			got, err := ns.ClaimsRequired(ctxFor(t))
			if err != nil || got != c.want {
				t.Errorf("required: %v, %v; want %v", got, err, c.want)
			}
			if len(refused) > 0 {
				t.Errorf("the refused request is reported: %v", <-refused)
			}
		})
	}
}

func claimsUser(publish string) string {
	return fmt.Sprintf(`{ user: u, password: p, permissions: { publish: { allow: [%s] }, subscribe: { allow: [">"] } } }`,
		publish)
}

func claimsAccount(user string) string {
	return "jetstream: enabled\naccounts { A { jetstream: enabled, users: [" + user + "] } }"
}

// TestClaimsRequiredIsWatched changes permissions in the configuration of a running server. No connection is closed.
func TestClaimsRequiredIsWatched(t *testing.T) {
	t.Parallel()
	conf := filepath.Join(t.TempDir(), "nats.conf")
	write := func(publish string) {
		t.Helper()
		if err := os.WriteFile(conf, []byte(claimsAccount(claimsUser(publish))), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`">"`)
	opts, err := server.ProcessConfigFile(conf)
	if err != nil {
		t.Fatal(err)
	}
	opts.StoreDir = t.TempDir()
	srv := plainServer(t, opts)
	conn := connect(t, ConnOptions{URLs: []string{srv.ClientURL()}, User: "u", Password: "p"})
	ns, err := JoinNamespace(ctxFor(t), conn, NamespaceConfig{Name: "n"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(ctxFor(t))
	defer cancel()
	states := make(chan bool, 1)
	go ns.WatchClaimsRequired(ctx, func(required bool) {
		select {
		case states <- required:
		case <-ctx.Done():
		}
	})
	until := func(want bool) {
		t.Helper()
		for {
			select {
			case got := <-states:
				if got == want {
					return
				}
			case <-ctx.Done():
				t.Fatalf("claims do not become required: %v", want)
			}
		}
	}
	reload := func() {
		t.Helper()
		changed, err := server.ProcessConfigFile(conf)
		if err != nil {
			t.Fatal(err)
		}
		changed.StoreDir, changed.Port, changed.Host = opts.StoreDir, opts.Port, opts.Host
		changed.NoLog, changed.NoSigs = opts.NoLog, opts.NoSigs
		if err := srv.ReloadOptions(changed); err != nil {
			t.Fatal(err)
		}
	}
	until(false)
	write(`">", "` + Names("n").ClaimsRequired() + `"`)
	reload()
	until(true)
	write(`">"`)
	reload()
	until(false)
}
