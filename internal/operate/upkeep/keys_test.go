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

// lines returns the users and notes of a result, a line each.
func lines(r *KeysResult) string {
	var b strings.Builder
	for _, u := range r.Users {
		b.WriteString(u.User + ": " + u.Flags + "\n")
	}
	for _, note := range r.Notes {
		b.WriteString(note + "\n")
	}
	return b.String()
}

// TestKeys: each change is in the servers' configuration, and the result has only the changed users.
func TestKeys(t *testing.T) {
	t.Parallel()
	for _, mode := range []natsauth.Mode{natsauth.Static, natsauth.JWT} {
		dir := t.TempDir()
		k := &Keys{Folder: filepath.Join(dir, "keys"), Resolver: "jwt", NATS: "nats://n1"}
		step := func(what string, err error, printed ...string) {
			t.Helper()
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			for _, want := range printed {
				if !strings.Contains(lines(&k.Result), want) {
					t.Errorf("%s has the result %q, without %q", what, lines(&k.Result), want)
				}
			}
			if mode == natsauth.Static && what != "open" && !strings.HasPrefix(k.Result.Config, "accounts {") {
				t.Errorf("%s has no accounts: %q", what, k.Result.Config)
			}
			k.Result = KeysResult{}
		}
		created := k.Create(&NewKeys{Namespaces: []string{"a"}, Partitions: 4, JWT: mode == natsauth.JWT})
		step("create", created, "node: ", "shim: ", "reader: ", "--config ")
		if text, err := os.ReadFile(filepath.Join(k.Folder, "a-reader.yaml")); err != nil ||
			!strings.Contains(string(text), "nats://n1") {
			t.Errorf("the settings of the reader: %s, %v", text, err)
		}
		step("open", k.Open())
		err := k.Add(&UserNames{Shims: []string{"w1"}, Analysts: []string{"x"}})
		if want := 3 + 1; strings.Count(lines(&k.Result), "\n") != want {
			t.Errorf("add has a result other than two users, the settings and the next step: %q", lines(&k.Result))
		}
		step("add", err, "shim-w1: ", "analyst-x: ")
		step("rotate", k.Rotate([]string{"reader"}, false), "reader: ")
		step("finish", k.Rotate([]string{"reader", "router"}, true), "router: no old key")
		step("rotate all", k.Rotate(nil, false), "analyst-x: ", "node: ")
		step("remove", k.Remove([]string{"shim-w1"}))
		if err := k.Print(false); err != nil || strings.Contains(lines(&k.Result), "shim-w1") {
			t.Errorf("after the removal: %q, %v", lines(&k.Result), err)
		}
		for what, err := range map[string]error{
			"add": k.Add(&UserNames{Models: []string{"m"}}), "remove": k.Remove(nil),
		} {
			if _, is := errors.AsType[*usage.Error](err); !is {
				t.Errorf("%s of nothing: %v", what, err)
			}
		}
	}
}

// TestKeysOfSeveralNamespaces: a change needs the name of a namespace, if the folder has several.
func TestKeysOfSeveralNamespaces(t *testing.T) {
	t.Parallel()
	k := &Keys{Folder: t.TempDir()}
	if err := k.Create(&NewKeys{Namespaces: []string{"a", "b"}, Partitions: 4}); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{"add": k.Add(&UserNames{Shims: []string{"w"}}),
		"rotate": k.Rotate(nil, false), "remove": k.Remove([]string{"shim"})} {
		if _, is := errors.AsType[*usage.Error](err); !is || !strings.Contains(err.Error(), "--namespace is missing") {
			t.Errorf("%s without a namespace: %v", what, err)
		}
	}
	k.Namespace = "b"
	if err := k.Add(&UserNames{Shims: []string{"w"}}); err != nil {
		t.Error(err)
	}
	var wrong usage.Complaints
	(&NewKeys{Namespaces: []string{"NO"}, JWT: true, Keep: true}).Check(&wrong)
	if len(wrong) != 2 {
		t.Errorf("complaints: %v", wrong)
	}
}
