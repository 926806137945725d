package natsauth

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func newRing(t *testing.T, dir string, mode Mode) *Ring {
	t.Helper()
	r, err := Create(dir, mode)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.AddNamespace("a", 4); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Add(Member{Namespace: "a", Role: RoleShim, Worker: "w1", Models: []string{"m"}}); err != nil {
		t.Fatal(err)
	}
	if err := r.Save(); err != nil {
		t.Fatal(err)
	}
	return r
}

// TestRotation: both keys are valid until the rotation is finished. Afterwards only the new key is valid.
func TestRotation(t *testing.T) {
	t.Parallel()
	for _, mode := range []Mode{Static, JWT} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			newRing(t, dir, mode)
			again := func() *Ring {
				r, err := Open(dir)
				if err != nil {
					t.Fatal(err)
				}
				return r
			}
			keys := func() []string {
				m, _, err := again().member("a", "shim-w1")
				if err != nil {
					t.Fatal(err)
				}
				return m.Keys
			}
			ending := ".nk"
			if mode == JWT {
				ending = ".creds"
			}
			secret := filepath.Join(dir, "a-shim-w1"+ending)
			first, before := keys(), readFile(t, secret)
			r := again()
			if err := r.Rotate("a", "shim-w1"); err != nil {
				t.Fatal(err)
			}
			if err := r.Save(); err != nil {
				t.Fatal(err)
			}
			both := keys()
			if len(both) != 2 || both[1] != first[0] || both[0] == first[0] {
				t.Fatalf("keys %v after %v", both, first)
			}
			if readFile(t, secret+".old") != before || readFile(t, secret) == before {
				t.Error("the new secret does not have the name of the old secret, or the old secret is missing")
			}
			if err := again().Rotate("a", "shim-w1"); err == nil || !strings.Contains(err.Error(), "--finish") {
				t.Errorf("a second rotation: %v", err)
			}
			if text, err := again().ServerConfig("jwt"); mode == Static && (err != nil || !strings.Contains(text, both[0]) ||
				!strings.Contains(text, both[1])) {
				t.Error("the servers do not accept both keys", err)
			}
			r = again()
			if ended, err := r.Finish("a", "shim-w1"); err != nil || !ended {
				t.Fatal(ended, err)
			}
			if err := r.Save(); err != nil {
				t.Fatal(err)
			}
			if now := keys(); !slices.Equal(now, both[:1]) {
				t.Errorf("keys %v", now)
			}
			if _, err := os.Stat(secret + ".old"); err == nil {
				t.Error("the old secret is still there")
			}
			if ended, err := again().Finish("a", "shim-w1"); err != nil || ended {
				t.Error("finished again", ended, err)
			}
		})
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestRemoval: a shim's user can be removed, with all its files. A namespace's own users cannot be removed.
func TestRemoval(t *testing.T) {
	t.Parallel()
	for _, mode := range []Mode{Static, JWT} {
		r := newRing(t, t.TempDir(), mode)
		if err := r.Rotate("a", "shim-w1"); err != nil {
			t.Fatal(err)
		}
		if err := r.Remove("a", "shim-w1"); err != nil {
			t.Fatal(err)
		}
		left, err := filepath.Glob(filepath.Join(r.dir, "*shim*"))
		if err != nil || len(left) > 0 {
			t.Errorf("%s: left %v, %v", mode, left, err)
		}
		if (mode == JWT) != (len(r.Removed) == 1) {
			t.Errorf("%s: accounts to remove: %v", mode, r.Removed)
		}
		g, err := r.Add(Member{Namespace: "a", Role: RoleReader, Name: "team x"})
		if err != nil || g.User != "reader-team=20x" || g.Inbox != "_INBOX_reader-team=20x" {
			t.Errorf("%s: a further reader: %+v, %v", mode, g, err)
		}
		if err := r.Remove("a", g.User); err != nil {
			t.Errorf("%s: a further reader is removed: %v", mode, err)
		}
		for _, user := range []string{"node", "reader", "router", "operator"} {
			if err := r.Remove("a", user); err == nil || !strings.Contains(err.Error(), "rotate") {
				t.Errorf("%s: %s was removed: %v", mode, user, err)
			}
		}
		if err := r.Remove("a", "shim-w1"); err == nil || !strings.Contains(err.Error(), "reader") {
			t.Errorf("%s: an unknown user: %v", mode, err)
		}
	}
}

// TestKeysOfOlderReleases: keys of a release without rosters stay, and missing keys are created.
func TestKeysOfOlderReleases(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	before := newRing(t, dir, Static)
	if err := os.Remove(filepath.Join(dir, rosterFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(before.seedPath("a", "router")); err != nil {
		t.Fatal(err)
	}
	r, err := Create(dir, Static)
	if err != nil {
		t.Fatal(err)
	}
	r.KeepKeys()
	if err := r.AddNamespace("a", 4); err != nil {
		t.Fatal(err)
	}
	for i := range r.Members {
		same := r.Members[i].Keys[0] == before.Members[i].Keys[0]
		if same != (r.Members[i].Role != RoleRouter) {
			t.Errorf("%s: key %s after %s", r.Members[i].Role, r.Members[i].Keys[0], before.Members[i].Keys[0])
		}
	}
	if other, err := Create(dir, Static); err != nil {
		t.Fatal(err)
	} else if err := other.AddNamespace("a", 4); err == nil || !strings.Contains(err.Error(), "a-node.nk") {
		t.Errorf("keys were overwritten: %v", err)
	}
}

// TestOnlyTheOwnerReadsSecrets: only the owner may read a secret, and the roster contains no secrets.
func TestOnlyTheOwnerReadsSecrets(t *testing.T) {
	t.Parallel()
	for _, mode := range []Mode{Static, JWT} {
		r := newRing(t, filepath.Join(t.TempDir(), "keys"), mode)
		files, err := os.ReadDir(r.dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			info, err := f.Info()
			if err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("%s: mode %v, %v", f.Name(), info.Mode(), err)
			}
		}
		if info, err := os.Stat(r.dir); err != nil || info.Mode().Perm() != 0o700 {
			t.Error(info.Mode(), err)
		}
		text := readFile(t, filepath.Join(r.dir, rosterFile))
		for _, f := range files {
			if strings.HasSuffix(f.Name(), ".nk") && strings.Contains(text, strings.TrimSpace(readFile(t,
				filepath.Join(r.dir, f.Name())))) {
				t.Errorf("the roster has the secret of %s", f.Name())
			}
		}
	}
}
