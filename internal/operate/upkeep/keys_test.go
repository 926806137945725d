package upkeep

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
)

// TestKeys: each change is in the servers' configuration, and only the changed users are printed.
func TestKeys(t *testing.T) {
	t.Parallel()
	for _, mode := range []natsauth.Mode{natsauth.Static, natsauth.JWT} {
		dir := t.TempDir()
		ring, err := natsauth.Create(dir, mode)
		if err != nil {
			t.Fatal(err)
		}
		var servers, users strings.Builder
		k := &Keys{Ring: ring, Resolver: "jwt", NATS: "nats://n1", Servers: &servers, Users: &users}
		step := func(what string, err error, printed ...string) {
			t.Helper()
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			for _, want := range printed {
				if !strings.Contains(users.String(), want) {
					t.Errorf("%s prints %q, without %q", what, &users, want)
				}
			}
			if mode == natsauth.Static && !strings.HasPrefix(servers.String(), "accounts {") {
				t.Errorf("%s prints no accounts: %q", what, &servers)
			}
			servers.Reset()
			users.Reset()
		}
		lines := func() int { return strings.Count(users.String(), "\n") }
		step("create", k.Create([]string{"a"}, 4, &UserNames{}), "node: ", "shim: ", "reader: ", "--config ")
		if text, err := os.ReadFile(filepath.Join(dir, "a-reader.yaml")); err != nil ||
			!strings.Contains(string(text), "nats://n1") {
			t.Errorf("the settings of the reader: %s, %v", text, err)
		}
		err = k.Add("a", &UserNames{Shims: []string{"w1"}, Analysts: []string{"x"}})
		if want := 3 + 1; lines() != want {
			t.Errorf("add prints %d lines, want two users, the settings and the next step: %q", lines(), &users)
		}
		step("add", err, "shim-w1: ", "analyst-x: ")
		step("rotate", k.Rotate("a", []string{"reader"}, false), "reader: ")
		step("finish", k.Rotate("a", []string{"reader", "router"}, true), "router: no old key")
		step("rotate all", k.Rotate("a", nil, false), "analyst-x: ", "node: ")
		step("remove", k.Remove("a", []string{"shim-w1"}))
		if err := k.Print(false); err != nil || strings.Contains(users.String(), "shim-w1") {
			t.Errorf("after the removal: %q, %v", &users, err)
		}
		for what, err := range map[string]error{
			"add": k.Add("a", &UserNames{Models: []string{"m"}}), "remove": k.Remove("a", nil),
		} {
			if _, is := errors.AsType[*usage.Error](err); !is {
				t.Errorf("%s of nothing: %v", what, err)
			}
		}
	}
}
