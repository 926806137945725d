package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestUsersComeAndGo adds a shim's user to a running server, replaces the key and removes the user, only with commands:
// in the configuration of an indexer's own server, with a reload by SIGHUP, and with signed JWTs, without a reload.
func TestUsersComeAndGo(t *testing.T) {
	t.Parallel()
	var subtests testkit.Group
	defer subtests.Wait()
	for _, kind := range []string{"embedded", "jwt"} {
		subtests.Run(t, kind, func(t *testing.T) {
			dir, addr := t.TempDir(), loopback.Reserve(t)
			keys, config, resolver := filepath.Join(dir, "keys"), filepath.Join(dir, "nats.conf"), filepath.Join(dir, "jwt")
			auth := func(args ...string) harness.Result {
				t.Helper()
				r := harness.Run(t, "indexer", append([]string{"auth"}, args...)...)
				if r.Code != 0 {
					t.Fatalf("%q: %s", args, r.Stderr)
				}
				return r
			}
			write := func(accounts string) {
				t.Helper()
				if kind == "jwt" {
					accounts = fmt.Sprintf("listen: %q\njetstream { store_dir: %q, max_file_store: 1TB }\n%s", addr,
						filepath.Join(dir, "js"), accounts)
				}
				if err := os.WriteFile(config, []byte(accounts), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			example := []string{"example", "--namespace", "a", "--partitions", "4", "--shim", "w1", "--keys", keys}
			login, ending := "--nats-nkey", ".nk"
			if kind == "jwt" {
				example, login, ending = append(example, "--jwt", "--resolver-dir", resolver), "--nats-creds", ".creds"
			}
			write(auth(example...).Stdout)
			as := func(user, secret string) []string {
				return []string{"--nats", addr, "--namespace", "a", login, secret, "--nats-inbox-prefix", "_INBOX_" + user}
			}
			secret := func(user string) string { return filepath.Join(keys, "a-"+user+ending) }
			serve := append(as("node", secret("node")), "serve", "--partitions", "4", "--http-listen", "")
			var server *harness.Process
			if kind == "jwt" {
				server = harness.Start(t, "nats-server", "-c", config)
				server.WaitFor(`Server is ready`)
				harness.Start(t, "indexer", serve...).WaitFor(`msg=ready`)
			} else {
				server = harness.Start(t, "indexer", append(serve[2:], "--data", filepath.Join(dir, "data"), "--nats-listen", addr,
					"--nats-config", config)...)
				server.WaitFor(`msg=ready`)
			}
			reloads := 0
			// publish makes the changes of the commands effective on the server.
			publish := func() {
				t.Helper()
				if kind == "jwt" {
					auth("push", "--nats", addr, "--keys", keys)
					return
				}
				write(auth("print", "--keys", keys).Stdout)
				if err := server.Cmd.Process.Signal(syscall.SIGHUP); err != nil {
					t.Fatal(err)
				}
				reloads++
				server.WaitFor(fmt.Sprintf(`(?s)(has read the configuration again.*){%d}`, reloads))
			}
			works := func(file string) error {
				o := nats.UserCredentials(file)
				if kind != "jwt" {
					var err error
					if o, err = nats.NkeyOptionFromSeed(file); err != nil {
						return err
					}
				}
				nc, err := nats.Connect("nats://"+addr, o, nats.Timeout(harness.Patience),
					nats.CustomInboxPrefix("_INBOX_shim-w2"))
				if err != nil {
					return err
				}
				defer nc.Close()
				// The import of the account works: JetStream answers.
				_, err = nc.Request("$JS.API.STREAM.INFO.KV_EVENTS_a_"+fmt.Sprint(partitionIn4(t, "w2")), nil, harness.Patience)
				return err
			}
			auth("add", "--shim", "w2", "--model", "m", "--keys", keys)
			publish()
			if err := works(secret("shim-w2")); err != nil {
				t.Fatalf("an added user: %v", err)
			}
			old := filepath.Join(dir, "old"+ending)
			if text, err := os.ReadFile(secret("shim-w2")); err != nil {
				t.Fatal(err)
			} else if err := os.WriteFile(old, text, 0o600); err != nil {
				t.Fatal(err)
			}
			auth("rotate", "--user", "shim-w2", "--keys", keys)
			publish()
			for _, file := range []string{old, secret("shim-w2")} {
				if err := works(file); err != nil {
					t.Errorf("%s, while both keys are valid: %v", file, err)
				}
			}
			auth("rotate", "--user", "shim-w2", "--finish", "--keys", keys)
			publish()
			if err := works(secret("shim-w2")); err != nil {
				t.Errorf("the new key: %v", err)
			}
			if err := works(old); err == nil || !strings.Contains(err.Error(), "uthorization") {
				t.Errorf("the old key, after the rotation: %v", err)
			}
			if text, err := os.ReadFile(secret("shim-w2")); err != nil {
				t.Fatal(err)
			} else if err := os.WriteFile(old, text, 0o600); err != nil {
				t.Fatal(err)
			}
			auth("remove", "--user", "shim-w2", "--keys", keys)
			publish()
			if err := works(old); err == nil || !strings.Contains(err.Error(), "uthorization") {
				t.Errorf("a removed user: %v", err)
			}
			// The other users still work.
			if r := harness.Run(t, "indexer", append(as("reader", secret("reader")), "workers")...); r.Code != 0 {
				t.Errorf("a reader: %+v", r)
			}
		})
	}
}
