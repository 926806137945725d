package natsauth

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestInboxFromKey: the inbox prefix of each user follows from its key: from the roster in the folder of a seed, and
// from the permissions in credentials.
func TestInboxFromKey(t *testing.T) {
	t.Parallel()
	for _, mode := range []Mode{Static, JWT} {
		dir := t.TempDir()
		r := newRing(t, dir, mode)
		grants, err := r.Grants("a")
		if err != nil || len(grants) < 5 {
			t.Fatal(grants, err)
		}
		for _, g := range grants {
			_, file := r.credential("a", &g)
			inbox := InboxOfSeed(file)
			if mode == JWT {
				inbox = InboxOfCreds(file)
			}
			if inbox != g.Inbox {
				t.Errorf("%s, %s: the inbox is %q, want %q", mode, g.User, inbox, g.Inbox)
			}
		}
		if mode == JWT && InboxOfCreds(r.SystemCreds()) != "" {
			t.Error("the credentials of the system user have a specific inbox prefix")
		}
		seed, err := os.ReadFile(r.SeedFile("a", &grants[0]))
		if err != nil {
			t.Fatal(err)
		}
		elsewhere := filepath.Join(t.TempDir(), "user.nk")
		if err := os.WriteFile(elsewhere, seed, 0o600); err != nil {
			t.Fatal(err)
		}
		if inbox := InboxOfSeed(elsewhere) + InboxOfSeed(dir+"/nothing") + InboxOfCreds(elsewhere); inbox != "" {
			t.Errorf("without a roster the inbox is %q", inbox)
		}
	}
}

// TestSettings: a user's settings file contains the key, inbox, namespace and address, and is removed with the user.
func TestSettings(t *testing.T) {
	t.Parallel()
	r := newRing(t, t.TempDir(), Static)
	grants, err := r.Grants("a")
	if err != nil {
		t.Fatal(err)
	}
	g := grants[len(grants)-1]
	if g.Role != RoleShim {
		t.Fatalf("the last user is %+v", g)
	}
	if err := r.WriteSettings("a", "nats://n:4222", &g); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(r.SettingsFile("a", &g))
	for _, want := range []string{"nats-nkey: /", g.User + ".nk\n", "nats-inbox-prefix: " + g.Inbox, "namespace: a\n",
		"nats: nats://n:4222"} {
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%q is not in %s, %v", want, text, err)
		}
	}
	if err := r.Remove("a", g.User); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(r.SettingsFile("a", &g)); err == nil {
		t.Error("the settings of a removed user stay")
	}
}
